"""Files of the KV channel's security, and when it may go without."""

import ssl

import pytest

from prfaas.errors import ConfigError
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import asker_security, check_bind, peer_security, peer_tls
from tests.transport.certificates import Certificates


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_leave(host):
    check_bind(host, TransportOptions())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node7.example.com", ""])
def test_plaintext_leaves_loopback_only_with_leave(host):
    with pytest.raises(ConfigError, match="--allow-plaintext"):
        check_bind(host, TransportOptions())
    check_bind(host, TransportOptions(allow_plaintext=True))
    check_bind(host, TransportOptions(tls_cert="cert.pem", tls_key="key.pem"))


def test_without_files_nothing_is_demanded():
    for security in (asker_security(TransportOptions()), peer_security(TransportOptions())):
        assert security.cluster_key is None
        assert security.tls is None


def test_an_authority_makes_a_peer_demand_certificates(tmp_path):
    made = Certificates(tmp_path)
    cert, key = made.issue("node")
    alone = peer_security(TransportOptions(tls_cert=cert, tls_key=key)).tls
    mutual = peer_security(TransportOptions(tls_cert=cert, tls_key=key, tls_ca=made.authority)).tls
    asker = asker_security(TransportOptions(tls_ca=made.authority)).tls
    assert alone is not None
    assert alone.verify_mode is ssl.CERT_NONE
    assert mutual is not None
    assert mutual.verify_mode is ssl.CERT_REQUIRED
    assert asker is not None
    assert asker.check_hostname
    assert asker.verify_mode is ssl.CERT_REQUIRED


def test_a_port_that_clients_come_to_demands_no_certificate(tmp_path):
    made = Certificates(tmp_path)
    cert, key = made.issue("node")
    options = TransportOptions(tls_cert=cert, tls_key=key, tls_ca=made.authority)
    open_to_all = peer_tls(options, demands_certificate=False)
    assert open_to_all is not None
    assert open_to_all.verify_mode == ssl.CERT_NONE


def test_files_that_are_no_certificates_are_refused_by_name(tmp_path):
    made = Certificates(tmp_path)
    cert, key = made.issue("node")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("-----BEGIN NONSENSE-----")
    with pytest.raises(ConfigError, match=r"nonsense\.pem"):
        asker_security(TransportOptions(tls_ca=str(nonsense)))
    with pytest.raises(ConfigError, match=r"nonsense\.pem"):
        peer_security(TransportOptions(tls_cert=str(nonsense), tls_key=key))
    with pytest.raises(ConfigError, match=r"absent\.pem"):
        peer_security(TransportOptions(tls_cert=cert, tls_key=str(tmp_path / "absent.pem")))
    _, other_key = made.issue("other")
    with pytest.raises(ConfigError, match="cannot use TLS certificate"):
        peer_security(TransportOptions(tls_cert=cert, tls_key=other_key))
