"""Flag > environment > TOML > default, and everything unknown or impossible is refused by name."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.load import load_config
from prfaas.config.options import NodeConfig
from prfaas.errors import ConfigError


def load(*, toml: str | None = None, environ=None, tmp_path=None, **flags):
    path = None
    if toml is not None:
        path = tmp_path / "node.toml"
        path.write_text(toml, encoding="utf-8")
    return load_config(flags=flags, environ=environ or {}, config_path=path)


@pytest.mark.parametrize(("role", "port"), [("pd", 8000), ("prefill", 8100), ("scheduler", 8200)])
def test_nothing_set_gives_the_defaults_with_the_roles_port(role, port):
    config = load(role=role)
    assert config.http.port == port
    assert config.engine == NodeConfig().engine
    assert config.transport == NodeConfig().transport


@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=3)))
def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(present, tmp_path):
    flag, variable, toml = present
    config = load(
        tmp_path=tmp_path,
        toml="[scheduler]\nthreshold_tokens = 3" if toml else None,
        environ={"PRFAAS_THRESHOLD_TOKENS": "2"} if variable else {},
        threshold_tokens="1" if flag else None,
        peer="127.0.0.1:9",
    )
    expected = 1 if flag else 2 if variable else 3 if toml else None
    assert config.scheduler.threshold_tokens == expected


def test_a_stronger_source_hides_only_its_own_key(tmp_path):
    config = load(
        tmp_path=tmp_path,
        toml='role = "prefill"\n[engine]\nthreads = 3\nchunk_tokens = 128\n[cache]\nram_bytes = "1GiB"',
        environ={"PRFAAS_CHUNK_TOKENS": "192", "HOME": "/", "PATH": "x"},
        threads="2",
    )
    assert (config.role, config.engine.threads, config.engine.chunk_tokens) == ("prefill", 2, 192)
    assert config.cache.ram_bytes == 1 << 30


def test_the_environment_may_name_the_file(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text("[engine]\nthreads = 3")
    environ = {"PRFAAS_CONFIG": str(path), "PRFAAS_MODELS_DIR": str(tmp_path)}
    assert load_config(flags={}, environ=environ).engine.threads == 3


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[engine]\nthreds = 1", "unknown key engine.threds; did you mean engine.threads?"),
        ("[engin]\nthreads = 1", "unknown key engin; did you mean engine?"),
        ("threads = 1", "unknown key threads; did you mean engine.threads?"),
        ("[http]\npeer = 'h:1'", "unknown key http.peer; did you mean .*transport.peer"),
        ("[transport]\nxyzzy = 1", "unknown key transport.xyzzy"),
        ("engine = 5", r"engine is a table; write \[engine\]"),
        ("[engine]\nthreads = 'x'", "engine.threads: expected a whole number, not 'x'"),
        ("[engine", "is not TOML"),
        ("role = 'decode'", "role: expected one of prefill, pd, scheduler, not 'decode'"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path_and_key(toml, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        load(toml=toml, tmp_path=tmp_path)
    assert str(tmp_path / "node.toml") in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_an_unreadable_file_is_refused_with_its_path(content, tmp_path):
    path = tmp_path / "node.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        load_config(flags={}, environ={}, config_path=path)


def test_an_unknown_variable_is_refused_with_its_neighbours():
    with pytest.raises(ConfigError, match="PRFAAS_TRESHOLD_TOKENS; did you mean PRFAAS_THRESHOLD"):
        load(environ={"PRFAAS_TRESHOLD_TOKENS": "1"})


def test_an_empty_variable_is_a_wrong_value_not_an_absent_one():
    with pytest.raises(ConfigError, match="PRFAAS_THREADS: expected a whole number, not ''"):
        load(environ={"PRFAAS_THREADS": ""})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"role": "prefill", "peer": "127.0.0.1:9"}, "--peer has no effect with role prefill"),
        ({"role": "prefill", "threshold_tokens": "1"}, "--threshold-tokens has no effect"),
        ({"role": "pd", "lease_s": "1"}, "--lease-s has no effect without --scheduler"),
        ({"role": "scheduler", "lease_s": "1"}, "--lease-s .* belongs to role prefill or pd"),
        (
            {"role": "scheduler", "scheduler": "h:1"},
            "--scheduler has no effect with role scheduler",
        ),
        ({"role": "prefill", "mode": "both"}, "--mode has no effect with role prefill"),
        ({"role": "scheduler", "peer": "127.0.0.1:9"}, "--peer has no effect with role scheduler"),
    ],
)
def test_a_setting_the_role_does_not_heed_is_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        load(**flags)


def test_a_setting_the_role_does_not_heed_is_refused_from_any_source(tmp_path):
    with pytest.raises(ConfigError, match=r"node.toml: transport.lease_s has no effect"):
        load(toml="[transport]\nlease_s = 1", tmp_path=tmp_path)
    with pytest.raises(ConfigError, match="PRFAAS_LEASE_S has no effect"):
        load(environ={"PRFAAS_LEASE_S": "1"})


@given(st.integers(1, 300), st.integers(0, 3000))
def test_snapshots_lie_a_whole_number_of_blocks_apart(block, snapshot):
    flags = {"block_tokens": str(block), "chunk_tokens": str(block)}
    every = {"snapshot_tokens": str(snapshot)}
    sent = {"transfer_snapshot_tokens": str(snapshot)}
    if snapshot % block == 0:
        config = load(**flags, **every, **sent)
        assert config.cache.snapshot_tokens == snapshot
        assert config.transport.transfer_snapshot_tokens == str(snapshot)
    else:
        for name, value in (every | sent).items():
            flag = "--" + name.replace("_", "-")
            with pytest.raises(ConfigError, match=f"{flag}: {snapshot} .* {block} tokens"):
                load(**flags, **{name: value})


@pytest.mark.parametrize("interval", ["-64", "nan", "1e3", "64.0", "", "Auto", "\u0664"])
def test_an_interval_of_sent_snapshots_is_auto_or_a_number(interval):
    with pytest.raises(ConfigError, match="--transfer-snapshot-tokens"):
        load(transfer_snapshot_tokens=interval)


@given(st.integers(1, 300), st.integers(1, 3000))
def test_a_chunk_is_a_whole_number_of_blocks(block, chunk):
    flags = {"block_tokens": str(block), "chunk_tokens": str(chunk)}
    if chunk % block == 0:
        assert load(**flags).engine.chunk_tokens == chunk
    else:
        with pytest.raises(ConfigError, match=f"--chunk-tokens: {chunk} .* {block} tokens"):
            load(**flags)
