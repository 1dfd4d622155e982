"""[[kv.groups]] describe a cache layout, and its S_kv is that of the model."""

from pathlib import Path
from typing import Any

import pytest

from prfaas.config.kv_layout import layout_kv_bytes, layout_kv_curve, layout_lines, read_layout
from prfaas.config.model_file import read_model
from prfaas.config.profiles import read_profile
from prfaas.config.tables import Table, read_toml
from prfaas.engine.kv_groups import kv_groups
from prfaas.engine.model_spec import layers_kv_bytes
from prfaas.errors import ConfigError
from tests.config.plan_files import PROFILE, UNSET, changed, toml

MODELS = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.json"))
FULL = {"kind": "full", "layers": [2], "bytes_per_token": 10}
WINDOW = {"kind": "window", "layers": [0, 1], "window_tokens": 5, "bytes_per_token": 3}
STATE = {"kind": "state", "layers": [3], "state_bytes": 1000}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_layout_as_lines_is_the_same_layout_with_the_s_kv_of_its_model(tmp_path, path):
    model = read_model(path)
    layout = kv_groups(model.layers, 64, "bfloat16")
    file = tmp_path / "p.toml"
    file.write_text("\n".join(["[kv]", *layout_lines(layout)]))
    again = read_layout(read_toml(file).table("kv"), 64)
    curve = layout_kv_curve(again)
    assert [spec.layers for spec in again.groups] == [spec.layers for spec in layout.groups]
    for length in (1, 2, 127, 128, 129, 512, 4096, 1_000_003):
        expected = layers_kv_bytes(model.layers, length, "bfloat16")
        assert layout_kv_bytes(again, length) == expected
        assert curve(length) == pytest.approx(expected, rel=1e-12)
        assert again.bytes_needed(length) == layout.bytes_needed(length)
        assert again.bytes_needed(length) >= expected


def groups(*tables: dict[str, Any]) -> Table:
    return Table({"groups": list(tables)}, Path("p.toml"), "kv")


def test_full_window_and_state_add_up():
    layout = read_layout(groups(FULL, WINDOW, STATE), 64)
    assert [layout_kv_bytes(layout, n) for n in (1, 4, 5, 100)] == [1016, 1064, 1074, 2024]


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ([], r"kv\.groups: expected tables"),
        ([changed(FULL, "kind", "half")], "expected one of full, window, state, not 'half'"),
        ([changed(FULL, "layers", UNSET)], r"kv\.groups\[0\]\.layers: is not set"),
        ([changed(FULL, "layers", [])], "layers: expected a list of numbers"),
        ([changed(FULL, "layers", [0.5])], "layers: 0.5 is no layer"),
        ([changed(FULL, "layers", [-1])], "layers.*-1 is below the minimum of 0"),
        ([changed(FULL, "bytes_per_token", 0)], "bytes_per_token: 0 is below the minimum of 1"),
        ([changed(FULL, "state_bytes", 4)], r"unknown key kv\.groups\[0\]\.state_bytes"),
        ([changed(WINDOW, "window_tokens", 0)], "window_tokens: 0 is below the minimum of 1"),
        ([changed(STATE, "state_bytes", UNSET)], "state_bytes: is not set"),
        ([FULL, FULL], r"kv\.groups: layer 2 is twice in the layout"),
    ],
)
def test_groups_that_make_no_sense_are_refused(tables, says):
    with pytest.raises(ConfigError, match=says):
        read_layout(groups(*tables), 64)


def test_a_profile_may_have_groups_but_not_of_nothing(tmp_path):
    path = tmp_path / "p.toml"
    bare = toml(changed(PROFILE, "kv", {}))
    path.write_text(f'{bare}\n[[kv.groups]]\nkind = "full"\nlayers = [0, 1]\nbytes_per_token = 8\n')
    assert read_profile(path).kv_bytes(100) == 1600
    window = 'kind = "window"\nwindow_tokens = 1\nlayers = [0]\nbytes_per_token = 8'
    path.write_text(f"{bare}\n[[kv.groups]]\n{window}\n")
    with pytest.raises(ConfigError, match=r"kv\.groups: a value of 0 is not above 0"):
        read_profile(path)
