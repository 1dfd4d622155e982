"""A scaled layout holds the part of the bytes that was asked for, in as few pages as it can."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.spec import CacheLayout, StateSpec
from prfaas.config.model_file import read_model
from prfaas.engine.kv_groups import kv_groups
from prfaas.engine.model_spec import layers_kv_bytes
from prfaas.engine.replay_layout import LEAST_LAYERS, plain_layout, replay_layout

MODELS = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.json"))
LAYOUTS = [kv_groups(read_model(path).layers, 64, "bfloat16") for path in MODELS]


def kv_bytes(layout: CacheLayout, num_tokens: int) -> int:
    """Return the bytes of one continuation at a length that ends a block; of one snapshot."""
    states = sum(
        len(spec.layers) * spec.state_bytes for spec in layout.groups if isinstance(spec, StateSpec)
    )
    blocks = num_tokens // layout.block_tokens
    full = sum(
        len(spec.layers) * spec.page_bytes * blocks
        for spec in layout.groups
        if not isinstance(spec, StateSpec) and spec.name.startswith("full")
    )
    return states + full


@pytest.mark.parametrize("layout", LAYOUTS, ids=[path.stem for path in MODELS])
def test_a_whole_layout_keeps_every_page(layout):
    whole = replay_layout(layout, 1.0)
    assert [spec.layers for spec in whole.groups] == [spec.layers for spec in layout.groups]
    for num_tokens in (1, 64, 1_000, 100_000):
        assert whole.bytes_needed(num_tokens) == layout.bytes_needed(num_tokens)
        assert whole.pages_needed(num_tokens) == layout.pages_needed(num_tokens)
    assert whole.layout_version != layout.layout_version


@given(st.sampled_from(LAYOUTS), st.floats(0.01, 1.0))
def test_a_scaled_layout_has_its_part_of_the_bytes(layout, scale):
    scaled = replay_layout(layout, scale)
    for num_tokens in (64, 8_192, 131_072):
        part = scaled.bytes_needed(num_tokens) / layout.bytes_needed(num_tokens)
        assert part == pytest.approx(scale, rel=0.06)


@given(st.sampled_from(LAYOUTS), st.floats(1e-6, 1.0))
def test_a_scaled_layout_keeps_groups_and_layers_to_stream_by(layout, scale):
    scaled = replay_layout(layout, scale)
    layers = [layer for spec in scaled.groups for layer in spec.layers]
    assert sorted(layers) == list(range(len(layers)))
    for spec, whole in zip(scaled.groups, layout.groups, strict=True):
        assert type(spec) is type(whole)
        assert min(LEAST_LAYERS, len(whole.layers)) <= len(spec.layers) <= len(whole.layers)
        assert list(spec.layers) == sorted(spec.layers)
    assert scaled.pages_needed(65_536) <= 1.25 * layout.pages_needed(65_536)  # slices round up


def test_groups_alternate_as_the_real_layers_do():
    layout = replay_layout(LAYOUTS[0], 0.01)
    full, states = (spec.layers for spec in layout.groups)
    assert full[0] < states[-1]
    assert states[0] < full[-1]


@given(st.floats(100, 1e6), st.floats(0, 1e9))
def test_a_straight_line_is_kept_as_full_attention_and_a_state(bytes_per_token, state_bytes):
    layout = plain_layout(bytes_per_token=bytes_per_token, state_bytes=state_bytes, block_tokens=64)
    assert layout.has_states == (state_bytes >= LEAST_LAYERS)
    for num_tokens in (64, 6_400):
        expected = bytes_per_token * num_tokens + state_bytes
        slack = 3 * num_tokens + 2 * LEAST_LAYERS
        assert kv_bytes(layout, num_tokens) == pytest.approx(expected, abs=slack)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_pages_of_a_whole_model_hold_its_s_kv(path):
    model = read_model(path)
    layout = replay_layout(kv_groups(model.layers, 64, "bfloat16"), 1.0)
    windows = any(not isinstance(s, StateSpec) and "window" in s.name for s in layout.groups)
    if not windows:
        assert kv_bytes(layout, 65_536) == layers_kv_bytes(model.layers, 65_536, "bfloat16")
