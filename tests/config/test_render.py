"""A printed configuration loads to the configuration it shows."""

import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.load import load_config
from prfaas.config.render import render_toml
from prfaas.config.settings import SETTINGS

FLAGS = {
    "role": st.sampled_from(["pd", "prefill"]),
    "model": st.text(min_size=1, max_size=20).filter(str.isprintable),
    "host": st.sampled_from(["127.0.0.1", "::1"]),
    "port": st.integers(1, 65_535),
    "threads": st.integers(1, 1024),
    "cache_ram": st.integers(1 << 20, 1 << 50),
    "drain_timeout_s": st.floats(0, 86_400),
    "max_context_tokens": st.integers(2, 10**9),
    "allow_plaintext": st.booleans(),
    "log_format": st.sampled_from(["console", "json"]),
}


@given(st.fixed_dictionaries({}, optional=FLAGS))
def test_loading_a_printed_configuration_gives_it_again(flags):
    config = load_config(flags=flags, environ={})
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "node.toml")
        path.write_text(render_toml(config), encoding="utf-8")
        assert load_config(flags={}, environ={}, config_path=path) == config


@pytest.mark.parametrize("role", ["pd", "prefill", "scheduler"])
def test_exactly_the_settings_that_the_role_heeds_are_shown(role):
    text = render_toml(load_config(flags={"role": role}, environ={}))
    for setting in SETTINGS:
        if setting.section:
            assert (f"\n{setting.name} = " in text or f"\n# {setting.name} is" in text) == (
                role in setting.roles
            ), setting.key
    assert tomllib.loads(text)["role"] == role


def test_a_printed_member_of_a_fleet_loads_again(tmp_path):
    flags = {"scheduler": "127.0.0.1:8200", "cluster": "eu-1", "mode": "decode", "port": 8001}
    config = load_config(flags=flags, environ={})
    path = tmp_path / "node.toml"
    path.write_text(render_toml(config), encoding="utf-8")
    loaded = load_config(flags={}, environ={}, config_path=path)
    assert loaded == config
    assert loaded.fleet.scheduler == "127.0.0.1:8200"
    assert loaded.fleet.mode == "decode"


def test_a_secret_is_masked():
    config = load_config(flags={}, environ={"PRFAAS_API_KEY": "sesame"})
    assert config.http.api_key == "sesame"
    text = render_toml(config)
    assert "sesame" not in text
    assert 'api_key = "********"' in text
