"""How a node's KV channel is secured, read from the files that its options name."""

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.transport.cluster_key import ClusterKey, read_cluster_key
from prfaas.transport.options import TransportOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSecurity:
    """What one end knows and demands; by default nothing, which is for loopback."""

    cluster_key: ClusterKey | None = None
    tls: ssl.SSLContext | None = None


def asker_security(options: TransportOptions) -> ChannelSecurity:
    """Return how a node reaches its peer: by TLS if it has an authority to check the peer with.

    Raises ConfigError for a file that cannot be used.
    """
    return ChannelSecurity(cluster_key=_cluster_key(options), tls=_asker_tls(options))


def peer_security(options: TransportOptions) -> ChannelSecurity:
    """Return how a node lets askers in: by TLS if it has a certificate, by theirs if an authority.

    Raises ConfigError for a file that cannot be used.
    """
    return ChannelSecurity(cluster_key=_cluster_key(options), tls=peer_tls(options))


def check_bind(host: str, options: TransportOptions) -> None:
    """Raise ConfigError if the KV channel would leave loopback unencrypted without leave to."""
    if options.allow_plaintext or options.tls_cert is not None or _is_loopback(host):
        return
    raise ConfigError(
        f"the KV channel is not encrypted and http.host = {host!r} is not loopback; give it "
        "--tls-cert and --tls-key, or pass --allow-plaintext if every network between the nodes "
        "is trusted"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _cluster_key(options: TransportOptions) -> ClusterKey | None:
    if options.cluster_key_file is None:
        return None
    return read_cluster_key(Path(options.cluster_key_file).expanduser())


def peer_tls(
    options: TransportOptions, *, demands_certificate: bool = True
) -> ssl.SSLContext | None:
    """Return what a listening port of the KV channel speaks; None is plain TCP.

    With an authority it demands a certificate of everybody, unless others than nodes come to the port.
    """
    if options.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, options)
    if options.tls_ca is not None and demands_certificate:
        _load_authority(context, options.tls_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _asker_tls(options: TransportOptions) -> ssl.SSLContext | None:
    if options.tls_ca is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the chain and the host's name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_authority(context, options.tls_ca)
    if options.tls_cert is not None:
        _load_certificate(context, options)
    return context


def _load_certificate(context: ssl.SSLContext, options: TransportOptions) -> None:
    assert options.tls_cert is not None
    try:
        # Without a password callback OpenSSL would ask for one at the terminal.
        context.load_cert_chain(options.tls_cert, options.tls_key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot use TLS certificate {options.tls_cert} with key {options.tls_key}: {error}"
        ) from error


def _load_authority(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:
        raise ConfigError(f"cannot use TLS authority {path}: {error}") from error
