"""What each mixer keeps, by models.md's formulas worked out by hand."""

import pytest

from prfaas.engine.mixer_spec import (
    GdnSpec,
    GqaSpec,
    KdaSpec,
    KvDtype,
    LightningSpec,
    Mamba2Spec,
    MixerSpec,
    MlaSpec,
    NoMixerSpec,
    ParallelSpec,
    ShortConvSpec,
    StateTensor,
    bytes_per_token,
    state_bytes,
)

GQA = GqaSpec(num_heads=8, num_kv_heads=2, head_dim=192, value_head_dim=128, scale=1.0, rope=None)
MAMBA = Mamba2Spec(num_heads=24, head_dim=64, state_dim=128, num_groups=2, conv_width=4)
LAYERS: dict[str, tuple[MixerSpec, int, int, int]] = {
    # a layer; values a token adds; numbers of its float32 state; numbers of its convolution's rows
    "gqa": (GQA, 2 * (192 + 128), 0, 0),
    "mla": (
        MlaSpec(
            num_heads=64,
            latent_dim=512,
            rope_dim=64,
            nope_dim=128,
            value_dim=128,
            scale=1.0,
            rope=None,
        ),
        576,
        0,
        0,
    ),
    "gdn": (
        GdnSpec(num_key_heads=16, num_value_heads=64, key_dim=128, value_dim=96, conv_width=4),
        0,
        64 * 128 * 96,
        3 * (2 * 16 * 128 + 64 * 96),
    ),
    "kda": (
        KdaSpec(num_heads=32, head_dim=128, conv_width=4),
        0,
        32 * 128 * 128,
        3 * 3 * 32 * 128,
    ),
    "lightning": (
        LightningSpec(num_heads=64, head_dim=128, scale=1.0, slope_scale=1.0),
        0,
        64 * 128 * 128,
        0,
    ),
    "mamba2": (MAMBA, 0, 24 * 64 * 128, 3 * (24 * 64 + 2 * 2 * 128)),
    "shortconv": (ShortConvSpec(channels=1024, conv_width=3), 0, 0, 2 * 1024),
    "parallel": (
        ParallelSpec(attention=GQA, mamba=MAMBA),
        2 * (192 + 128),
        24 * 64 * 128,
        3 * (24 * 64 + 2 * 2 * 128),
    ),
    "none": (NoMixerSpec(), 0, 0, 0),
}
DTYPES: tuple[tuple[KvDtype, int], ...] = (("bfloat16", 2), ("float16", 2), ("float32", 4))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("kv_dtype", "value_bytes"), DTYPES)
def test_recurrent_state_alone_stays_float32(
    name: str, kv_dtype: KvDtype, value_bytes: int
) -> None:
    layer, per_token, recurrent, conv = LAYERS[name]
    assert bytes_per_token(layer, kv_dtype) == per_token * value_bytes
    assert state_bytes(layer, kv_dtype) == recurrent * 4 + conv * value_bytes


@pytest.mark.parametrize("name", LAYERS)
def test_a_layout_is_named_exactly_where_something_is_kept(name: str) -> None:
    layer, per_token, recurrent, conv = LAYERS[name]
    assert bool(layer.kv_layout) == bool(per_token)
    assert bool(layer.state_layout) == bool(recurrent + conv)
    assert [state.name for state in layer.states] == ["conv"] * bool(conv) + ["recurrent"] * bool(
        recurrent
    )


def test_a_window_keeps_one_token_less_than_it_sees() -> None:
    window = GqaSpec(
        num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0, rope=None, window_tokens=129
    )
    assert [window.kept_tokens(n) for n in (0, 127, 128, 129, 5000)] == [0, 127, 128, 128, 128]
    side_by_side = ParallelSpec(attention=window, mamba=MAMBA)
    assert side_by_side.kept_tokens(5000) == 128
    assert side_by_side.window_tokens == 129


def test_a_convolution_keeps_its_rows_in_the_activations_dtype() -> None:
    conv, recurrent = MAMBA.states
    assert conv == StateTensor(name="conv", shape=(3, 2048), dtype="activation")
    assert recurrent == StateTensor(name="recurrent", shape=(24, 128, 64), dtype="float32")
