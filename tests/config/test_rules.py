"""Settings that do not fit together are refused."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.load import load_config
from prfaas.config.options import NodeConfig
from prfaas.config.rules import is_loopback, split_peer
from prfaas.errors import ConfigError


def load(**flags: object) -> NodeConfig:
    return load_config(flags=flags, environ={})


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_is_known(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "127.0.0.1.x"])
def test_what_may_leave_the_machine_is_not_loopback(host):
    assert not is_loopback(host)


@given(
    st.one_of(
        st.integers(0, 2**32 - 1).map(lambda number: str(ipaddress.IPv4Address(number))),
        st.integers(0, 2**128 - 1).map(lambda number: str(ipaddress.IPv6Address(number))),
        st.from_regex(r"[a-z0-9.-]{1,40}", fullmatch=True),
    ),
    st.integers(1, 65_535),
)
def test_a_peer_splits_into_what_it_was_made_of(host, port):
    shown = f"[{host}]" if ":" in host else host
    assert split_peer(f"{shown}:{port}") == (host, port)


@pytest.mark.parametrize(
    "peer",
    [
        "host", "host:", ":80", "host:0", "host:65536", "host:x", "host:-1", "http://host:80",
        "host:80/x", "user@host:80", "::1:80", "host:٨", "ho st:80", "[]:80", "h:" + "9" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_peer_is_refused_with_the_flag(peer):
    with pytest.raises(ConfigError, match=r"^--peer: expected"):
        load(peer=peer)


@pytest.mark.parametrize("peer", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000"])
def test_a_node_is_not_its_own_peer(peer):
    with pytest.raises(ConfigError, match="own address"):
        load(peer=peer)


def test_a_peer_beyond_loopback_needs_consent_to_plaintext():
    with pytest.raises(ConfigError, match=r"10\.0\.0\.9 .* --allow-plaintext"):
        load(peer="10.0.0.9:8100")
    assert load(peer="10.0.0.9:8100", allow_plaintext=True).transport.peer == "10.0.0.9:8100"


def test_serving_kvcache_beyond_loopback_needs_consent_to_plaintext():
    with pytest.raises(ConfigError, match=r"--host: 0\.0\.0\.0 .* --allow-plaintext"):
        load(role="prefill", host="0.0.0.0")
    assert load(role="prefill", host="0.0.0.0", allow_plaintext=True).http.host == "0.0.0.0"


def test_a_pd_node_may_serve_its_api_anywhere():
    assert load(role="pd", host="0.0.0.0").http.host == "0.0.0.0"


def test_tls_takes_the_place_of_consent():
    tls = {"tls_cert": "cert.pem", "tls_key": "key.pem"}
    assert load(role="prefill", host="0.0.0.0", **tls).transport.tls_cert == "cert.pem"
    assert load(peer="10.0.0.9:8100", tls_ca="ca.pem").transport.tls_ca == "ca.pem"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tls_cert": "c"}, "--tls-cert has no effect without --tls-key"),
        ({"tls_key": "k", "tls_ca": "a"}, "--tls-key has no effect without --tls-cert"),
        ({"tls_cert": "c", "tls_key": "k"}, "--tls-cert has no effect without --tls-ca"),
        ({"tls_ca": "a", "role": "prefill"}, "--tls-ca has no effect without --tls-cert"),
    ],
)
def test_half_of_a_tls_setup_is_refused(flags, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        load(**flags)


def test_a_replayed_engine_needs_its_profile():
    assert load(engine="replay", profile="p.toml", speed="4", bytes_scale="0.01").replay.speed == 4
    with pytest.raises(ConfigError, match=r"^--engine: replay needs a profile, --profile$"):
        load(engine="replay")


@pytest.mark.parametrize(("name", "value"), [("speed", "4"), ("bytes_scale", "0.5")])
def test_what_is_replayed_has_no_effect_on_a_model(name, value):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag} has no effect without --engine replay$"):
        load(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "smollm2"),
        ("chat_template", "t.jinja"),
        ("device", "cuda"),
        ("dtype", "float32"),
        ("numerics", "strict"),
        ("threads", "2"),
        ("kv_ram_bytes", "1GiB"),
    ],
)
def test_what_weights_need_has_no_effect_on_a_replayed_engine(name, value):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag} has no effect with a replayed engine"):
        load(engine="replay", profile="p.toml", **{name: value})
