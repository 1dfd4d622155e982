"""Settings that do not fit together are refused."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.advertised import advertised
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


@pytest.mark.parametrize("peer", ["127.0.0.1:9,localhost:8000", "127.0.0.1:9, nothing", "h:1,"])
def test_each_of_several_peers_is_checked(peer):
    with pytest.raises(ConfigError, match=r"^--peer: "):
        load(peer=peer)
    assert load(peer="127.0.0.1:9, [::1]:9").transport.peer == "127.0.0.1:9, [::1]:9"


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
        ("threads", "2"),
        ("kv_ram_bytes", "1GiB"),
    ],
)
def test_what_weights_need_has_no_effect_on_a_replayed_engine(name, value):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag} has no effect with a replayed engine"):
        load(engine="replay", profile="p.toml", **{name: value})


JOINS = {"scheduler": "127.0.0.1:8200"}


@pytest.mark.parametrize("flags", [{"cluster": "eu"}, {"advertise": "h:1"}, {"mode": "decode"}])
def test_what_a_fleet_needs_to_know_has_no_effect_on_a_node_of_none(flags):
    (name,) = flags
    with pytest.raises(ConfigError, match=f"^--{name} has no effect without --scheduler$"):
        load(**flags)
    assert getattr(load(**flags, **JOINS).fleet, name) == flags[name]


def test_what_serving_kvcache_needs_has_an_effect_on_a_pd_node_of_a_fleet_only():
    for name, value in (("lease_s", "3"), ("max_transfers", "3"), ("egress_limit", "8Mbit")):
        flag = "--" + name.replace("_", "-")
        with pytest.raises(ConfigError, match=f"^{flag} has no effect without --scheduler$"):
            load(**{name: value})
    assert load(**JOINS, lease_s="3").transport.lease_s == 3
    with pytest.raises(ConfigError, match=r"^--connect-timeout-s has no effect without"):
        load(role="prefill", connect_timeout_s="1")
    assert load(role="prefill", **JOINS, connect_timeout_s="1").transport.connect_timeout_s == 1


@pytest.mark.parametrize("role", ["pd", "prefill"])
def test_a_member_of_a_fleet_names_an_address_that_others_can_reach(role):
    def joined(**flags: object) -> NodeConfig:
        return load(role=role, allow_plaintext=True, **JOINS, **flags)

    assert advertised(joined(port=9000)) == "127.0.0.1:9000"
    assert advertised(joined(host="::1", port=9000)) == "[::1]:9000"
    assert advertised(joined(host="0.0.0.0", advertise="node-3:9000")) == "node-3:9000"
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match=rf"^--host: {host} is no address .* --advertise$"):
            joined(host=host)
    with pytest.raises(ConfigError, match=r"^--advertise: 0\.0\.0\.0 is no address"):
        joined(advertise="0.0.0.0:9000")
    with pytest.raises(ConfigError, match=r"^--advertise: expected host:port"):
        joined(advertise="node-3")


@pytest.mark.parametrize("scheduler", ["127.0.0.1:8000", "localhost:8000"])
def test_a_node_is_not_its_own_scheduler(scheduler):
    with pytest.raises(ConfigError, match=r"^--scheduler: .* own address"):
        load(scheduler=scheduler)


@pytest.mark.parametrize("cluster", ["", "a b", "-a", "ü", "x" * 65])
def test_a_cluster_has_a_plain_name(cluster):
    with pytest.raises(ConfigError, match=r"^--cluster: "):
        load(**JOINS, cluster=cluster)


def test_a_fleet_beyond_loopback_needs_consent_to_plaintext_or_tls_on_both_ways():
    with pytest.raises(ConfigError, match=r"^--scheduler: .* 10\.0\.0\.9 .* --allow-plaintext"):
        load(scheduler="10.0.0.9:8200")
    assert load(scheduler="10.0.0.9:8200", allow_plaintext=True).fleet.scheduler == "10.0.0.9:8200"
    for flags in ({"role": "scheduler"}, JOINS):
        with pytest.raises(ConfigError, match=r"^--host: 0\.0\.0\.0 serves .* --allow-plaintext"):
            load(**flags, host="0.0.0.0")
        with pytest.raises(ConfigError, match=r"^--tls-ca has no effect without --tls-cert$"):
            load(**flags, tls_ca="a")
        with pytest.raises(ConfigError, match=r"^--tls-cert has no effect without --tls-ca$"):
            load(**flags, tls_cert="c", tls_key="k")
        tls = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a", "advertise": "node-1:8000"}
        if flags is not JOINS:
            del tls["advertise"]
        assert load(**flags, **tls, host="0.0.0.0").http.host == "0.0.0.0"
