"""What must hold between settings, beyond the limits of each."""

import ipaddress
import re
from collections.abc import Callable

from prfaas.cache.options import CacheOptions
from prfaas.config.options import FleetOptions, NodeConfig
from prfaas.errors import ConfigError
from prfaas.scheduler.options import SchedulerOptions
from prfaas.transport.options import TransportOptions

_CLUSTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

NameOf = Callable[[str], str]
"""Setting's key -> how the person who set it wrote it: a flag, a variable or a TOML key."""


def is_loopback(host: str) -> bool:
    """Return whether traffic to `host` stays on this machine; a name other than localhost may not."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_peer(peer: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `[v6]:port`.

    Raises:
        ValueError: another form, or a port outside 1..65535.
    """
    host, colon, port = peer.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    if (
        not colon
        or not host
        or (":" in host and not is_bracketed)
        or any(char in "/@?#[]" or char.isspace() for char in host)
    ):
        raise ValueError(f"expected host:port, not {peer!r}")
    if not (port.isascii() and port.isdigit()) or not 1 <= int(port[:6]) <= 65_535:
        raise ValueError(f"expected a port from 1 to 65535, not {port!r}")
    return host, int(port)


def check_rules(config: NodeConfig, name_of: NameOf, *, listens: bool = True) -> None:
    """Raise ConfigError for values that do not fit together; `config.http.port` is set.

    A process that does not listen may have a peer at the address that it would listen on.
    """
    chunk_tokens, block_tokens = config.engine.chunk_tokens, config.cache.block_tokens
    if chunk_tokens % block_tokens:
        raise ConfigError(
            f"{name_of('engine.chunk_tokens')}: {chunk_tokens} is no multiple of the block of"
            f" {block_tokens} tokens ({name_of('cache.block_tokens')})"
        )
    intervals = {"cache.snapshot_tokens": str(config.cache.snapshot_tokens)}
    if config.transport.transfer_snapshot_tokens != "auto":
        intervals["transport.transfer_snapshot_tokens"] = config.transport.transfer_snapshot_tokens
    for key, tokens in intervals.items():
        if not (tokens.isascii() and tokens.isdigit()) or int(tokens) % block_tokens:
            raise ConfigError(
                f"{name_of(key)}: {tokens} is no multiple of the block of {block_tokens} tokens"
                f" ({name_of('cache.block_tokens')})"
            )
    _check_replay(config, name_of)
    _check_cache(config, name_of)
    _check_tls(config, name_of)
    if listens:
        _check_listener(config, name_of)
    _check_peer(config, name_of, listens=listens)
    _check_fleet(config, name_of, listens=listens)
    _check_scheduler(config, name_of)


def _check_replay(config: NodeConfig, name_of: NameOf) -> None:
    """A node has weights or a profile, and no settings of the one it does not have."""
    if config.engine.kind == "replay":
        if config.engine.profile is None:
            raise ConfigError(
                f"{name_of('engine.kind')}: replay needs a profile, {name_of('engine.profile')}"
            )
        idle: dict[str, tuple[str, ...]] = {
            "model": ("model", "chat_template"),
            "engine": ("device", "dtype", "threads", "kv_ram_bytes"),
        }
        reason = f"with a replayed engine, {name_of('engine.kind')}"
    else:
        idle = {"replay": ("speed", "bytes_scale")}
        reason = "without --engine replay"
    for section, names in idle.items():
        options = getattr(config, section)
        for name in names:
            if getattr(options, name) != getattr(type(options)(), name):
                raise ConfigError(f"{name_of(f'{section}.{name}')} has no effect {reason}")


def _check_cache(config: NodeConfig, name_of: NameOf) -> None:
    if config.cache.dir is not None:
        return
    for name in ("disk_bytes", "tenant_disk_bytes", "ttl_s", "zero_freed"):
        if getattr(config.cache, name) != getattr(CacheOptions(), name):
            raise ConfigError(
                f"{name_of(f'cache.{name}')} has no effect without {name_of('cache.dir')}"
            )


def _check_tls(config: NodeConfig, name_of: NameOf) -> None:
    transport = config.transport
    if (transport.tls_cert is None) != (transport.tls_key is None):
        alone, missing = ("key", "cert") if transport.tls_cert is None else ("cert", "key")
        raise ConfigError(
            f"{name_of(f'transport.tls_{alone}')} has no effect without"
            f" {name_of(f'transport.tls_{missing}')}"
        )
    given = {"cert": transport.tls_cert, "ca": transport.tls_ca}
    if config.role == "scheduler" or config.fleet.scheduler is not None:
        needed: tuple[str, ...] = ("cert", "ca")  # it is reached by others, and reaches them
    else:
        needed = ("cert",) if config.role == "prefill" else ("ca",)
    for missing in needed:
        (other,) = given.keys() - {missing}
        if given[other] is not None and given[missing] is None:
            raise ConfigError(
                f"{name_of(f'transport.tls_{other}')} has no effect without"
                f" {name_of(f'transport.tls_{missing}')}"
            )


def _check_listener(config: NodeConfig, name_of: NameOf) -> None:
    host = config.http.host
    if is_loopback(host) or not _serves_nodes(config):
        return
    if config.transport.tls_cert is None and not config.transport.allow_plaintext:
        raise ConfigError(
            f"{name_of('http.host')}: {host} serves {_served(config)} unencrypted beyond this machine; give it"
            " --tls-cert and --tls-key, or allow it with --allow-plaintext on a network you trust"
        )


def _serves_nodes(config: NodeConfig) -> bool:
    return config.role != "pd" or config.fleet.scheduler is not None


def _served(config: NodeConfig) -> str:
    return "nodes" if config.role == "scheduler" else "KVCache"


def _check_peer(config: NodeConfig, name_of: NameOf, *, listens: bool) -> None:
    if config.transport.peer is None:
        return
    for peer in config.transport.peer.split(","):
        _check_one_peer(peer.strip(), config, name_of("transport.peer"), listens=listens)


def _check_one_peer(peer: str, config: NodeConfig, name: str, *, listens: bool) -> None:
    try:
        host, port = split_peer(peer)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if listens and port == config.http.port and _is_same_host(host, config.http.host):
        raise ConfigError(f"{name}: {peer} is this node's own address")
    if is_loopback(host) or config.transport.tls_ca is not None:
        return
    if not config.transport.allow_plaintext:
        raise ConfigError(
            f"{name}: KVCache from {host} would cross the network unencrypted; check the peer's"
            " certificate with --tls-ca, or allow it with --allow-plaintext on a network you trust"
        )


def _check_fleet(config: NodeConfig, name_of: NameOf, *, listens: bool) -> None:
    """A member of a fleet can be reached and reaches its scheduler; others have no settings of one."""
    if config.role == "scheduler":
        return
    if config.fleet.scheduler is None:
        _check_alone(config, name_of)
        return
    name = name_of("fleet.scheduler")
    try:
        host, port = split_peer(config.fleet.scheduler)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if listens and port == config.http.port and _is_same_host(host, config.http.host):
        raise ConfigError(f"{name}: {config.fleet.scheduler} is this node's own address")
    transport = config.transport
    if not (is_loopback(host) or transport.tls_ca is not None or transport.allow_plaintext):
        raise ConfigError(
            f"{name}: what this node tells {host} would cross the network unencrypted; check the"
            " scheduler's certificate with --tls-ca, or allow it with --allow-plaintext on a network you trust"
        )
    if not _CLUSTER.fullmatch(config.fleet.cluster):
        raise ConfigError(
            f"{name_of('fleet.cluster')}: {config.fleet.cluster!r} is no name: up to"
            " 64 letters, digits and . _ -, the first of them a letter or digit"
        )
    _check_advertised(config, name_of)


def _check_advertised(config: NodeConfig, name_of: NameOf) -> None:
    key, host = "http.host", config.http.host
    if config.fleet.advertise is not None:
        key = "fleet.advertise"
        try:
            host, _ = split_peer(config.fleet.advertise)
        except ValueError as error:
            raise ConfigError(f"{name_of(key)}: {error}") from None
    if _is_wildcard(host):
        raise ConfigError(
            f"{name_of(key)}: {host} is no address at which other nodes reach this one; name one with"
            f" {name_of('fleet.advertise')}"
        )


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def _check_alone(config: NodeConfig, name_of: NameOf) -> None:
    defaults: dict[str, tuple[FleetOptions | TransportOptions, tuple[str, ...]]] = {
        "fleet": (FleetOptions(), ("cluster", "advertise", "mode")),
        "transport": (
            TransportOptions(),
            ("lease_s", "max_transfers", "egress_limit_bytes_per_s")
            if config.role == "pd"
            else ("connect_timeout_s",),
        ),
    }
    for section, (options, names) in defaults.items():
        for name in names:
            if getattr(getattr(config, section), name) != getattr(options, name):
                raise ConfigError(
                    f"{name_of(f'{section}.{name}')} has no effect without {name_of('fleet.scheduler')}"
                )


def _check_scheduler(config: NodeConfig, name_of: NameOf) -> None:
    """Whoever routes has a choice to make, and no knob that its policy does not have."""
    options, default = config.scheduler, SchedulerOptions()
    set_names = [
        name
        for name in ("policy", "threshold_tokens", "egress_target")
        if getattr(options, name) != getattr(default, name)
    ]
    if not set_names or config.role == "prefill":
        return
    if config.role == "pd" and config.fleet.scheduler is not None:
        raise ConfigError(
            f"{name_of(f'scheduler.{set_names[0]}')} has no effect with {name_of('fleet.scheduler')}:"
            " the scheduler decides"
        )
    if config.role == "pd" and config.transport.peer is None:
        raise ConfigError(
            f"{name_of(f'scheduler.{set_names[0]}')} has no effect without {name_of('transport.peer')}"
        )
    policy = options.policy_in_force
    idle = {
        "threshold_tokens": ("local", "always-remote", "predictive"),
        "egress_target": ("local", "always-remote", "static"),
    }
    for name, policies in idle.items():
        if name in set_names and policy in policies:
            raise ConfigError(
                f"{name_of(f'scheduler.{name}')} has no effect with the policy {policy}"
                f" ({name_of('scheduler.policy')})"
            )


def _is_same_host(host: str, other: str) -> bool:
    return host == other or (is_loopback(host) and is_loopback(other))
