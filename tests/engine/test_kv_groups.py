"""The cache layout of a model: what is kept together, in pages of which size."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.spec import FullSpec, StateSpec, WindowSpec
from prfaas.engine.families.registry import describe
from prfaas.engine.kv_groups import STATE_PAGE_BYTES, kv_groups
from prfaas.engine.mixer_spec import (
    GqaSpec,
    LightningSpec,
    MixerSpec,
    MlaSpec,
    NoMixerSpec,
    ShortConvSpec,
    bytes_per_token,
)
from prfaas.engine.model_spec import layers_kv_bytes

MODELS = Path(__file__).parents[2] / "configs" / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
FULL = GqaSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=None)
WINDOW = GqaSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=None, window_tokens=9)
LATENT = MlaSpec(
    num_heads=4, latent_dim=48, rope_dim=16, nope_dim=8, value_dim=8, scale=0.2, rope=None
)
LIGHTNING = LightningSpec(num_heads=2, head_dim=16, scale=1.0, slope_scale=1.0)
CONV = ShortConvSpec(channels=32, conv_width=3)


def layers_of(name: str) -> tuple[MixerSpec, ...]:
    return describe(json.loads((MODELS / f"{name}.json").read_text())).layers


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_of_a_shipped_model_stands_where_its_bytes_are(name):
    layers = layers_of(name)
    layout = kv_groups(layers, 64)
    for index, layer in enumerate(layers):
        kinds = [type(layout.groups[group]) for group, _ in layout.groups_of_layer(index)]
        expected: list[type] = []
        if layer.values_per_token:
            expected.append(FullSpec if layer.window_tokens is None else WindowSpec)
        if layer.states:
            expected.append(StateSpec)
        assert kinds == expected
    for spec in layout.groups:
        for index in spec.layers:
            if not isinstance(spec, StateSpec):
                assert spec.page_bytes == 64 * bytes_per_token(layers[index], "float32")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_tokens", [640, 8192])
def test_what_travels_is_the_kv_of_the_tokens_and_two_states_at_most(name, num_tokens):
    """S_kv, the windows' share of a block that they do not need, and the boundary's state."""
    layers = layers_of(name)
    layout = kv_groups(layers, 64)
    least = layers_kv_bytes(layers, num_tokens, "float32")
    windows = [spec for spec in layout.groups if isinstance(spec, WindowSpec)]
    states = [spec for spec in layout.groups if isinstance(spec, StateSpec)]
    most = least + sum(len(spec.layers) * 3 * spec.page_bytes for spec in windows)
    most += sum(len(spec.layers) * spec.state_bytes for spec in states)
    assert least <= layout.bytes_needed(num_tokens) <= most


def test_full_attention_stands_first_then_windows_then_states():
    layout = kv_groups([LIGHTNING, WINDOW, CONV, FULL, NoMixerSpec(), LIGHTNING], 64)
    assert [(type(spec), spec.layers) for spec in layout.groups] == [
        (FullSpec, (3,)),
        (WindowSpec, (1,)),
        (StateSpec, (0, 5)),
        (StateSpec, (2,)),
    ]
    assert layout.groups_of_layer(4) == ()


def test_equal_sizes_that_lie_differently_are_two_groups():
    """A latent and keys with values of as many bytes: the layout names both."""
    assert bytes_per_token(LATENT, "float32") == bytes_per_token(FULL, "float32")
    layout = kv_groups([FULL, LATENT], 64)
    assert [spec.layers for spec in layout.groups] == [(0,), (1,)]
    assert layout.layout_version.endswith("kv-htd latent-rope-t")


@given(block_tokens=st.integers(1, 200))
def test_blocks_have_any_size_and_states_are_as_large_in_all(block_tokens):
    layout, usual = (kv_groups([FULL, LIGHTNING, CONV], size) for size in (block_tokens, 64))
    assert layout.block_tokens == block_tokens
    sizes = [
        [spec.state_bytes for spec in each.groups if isinstance(spec, StateSpec)]
        for each in (layout, usual)
    ]
    assert sizes[0] == sizes[1]


def test_slices_are_as_large_as_the_pages_of_kv_or_as_the_state():
    state_bytes = 2 * 16 * 16 * 4
    (_, state) = kv_groups([FULL, LIGHTNING], 64).groups
    assert isinstance(state, StateSpec)
    assert (state.page_bytes, state.state_bytes) == (state_bytes, state_bytes)
    large = LightningSpec(num_heads=64, head_dim=128, scale=1.0, slope_scale=1.0)
    hybrid: tuple[MixerSpec, ...] = (FULL, large)
    for layers, page_bytes in ((hybrid, 64 * 256), (hybrid[1:], STATE_PAGE_BYTES)):
        state = kv_groups(layers, 64).groups[-1]
        assert isinstance(state, StateSpec)
        assert state.page_bytes == page_bytes
        assert state.slices_per_layer == -(-64 * 128 * 128 * 4 // page_bytes)


def test_layouts_load_without_torch():
    code = "import sys, prfaas.engine.kv_groups; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_row_is_one_head_of_one_token_or_the_largest_part_that_k_and_v_share():
    unequal = replace(FULL, head_dim=192, value_head_dim=128)
    wide = replace(WINDOW, head_dim=32, num_kv_heads=1)
    layout = kv_groups([FULL, unequal, WINDOW, wide, LATENT, LIGHTNING], 64)
    rows = {
        spec.layers: None if isinstance(spec, StateSpec) else spec.row_items
        for spec in layout.groups
    }
    # Layers 2 and 3 keep as many bytes in other heads: their group's rows fit both.
    assert rows == {(0,): 16, (1,): 64, (2, 3): 16, (4,): 16, (5,): None}


@pytest.mark.parametrize("name", NAMES)
def test_rows_fill_what_a_token_adds_and_are_wide_enough_for_a_scale(name):
    layers = layers_of(name)
    for spec in kv_groups(layers, 64).groups:
        if not isinstance(spec, StateSpec):
            assert spec.row_items is not None
            assert spec.page_bytes // 64 // 4 % spec.row_items == 0
            assert spec.row_items >= 64
