"""Falcon-H1's layer: both mixers on one input, their scales, and transformers' layer.

Shapes: T rows, D model dim.
"""

import pytest
import torch
from torch import Tensor

from prfaas.engine.batch import Batch, Rows, Segment
from prfaas.engine.layers.gqa import GqaMixer
from prfaas.engine.layers.mamba2 import Mamba2Mixer
from prfaas.engine.layers.parallel import ParallelMixer
from prfaas.engine.linear import pack
from prfaas.engine.mixer_spec import GqaSpec, Mamba2Spec, ParallelSpec
from prfaas.engine.rope import RopeTable, pair_order
from prfaas.engine.rope_spec import RopeSpec
from tests.engine.layers import mixing

MODEL_DIM, HEAD_DIM, HEADS, KV_HEADS = 64, 16, 4, 2
ROPE = RopeSpec(theta=1e4)
SPEC = ParallelSpec(
    attention=GqaSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        rope=ROPE,
    ),
    mamba=Mamba2Spec(
        num_heads=6,
        head_dim=16,
        state_dim=24,
        num_groups=2,
        conv_width=4,
        gated_norm=None,
    ),
    attention_in_scale=1.3,
    attention_out_scale=0.7,
    key_scale=0.9,
    mamba_in_scale=1.7,
    mamba_out_scale=0.4,
    mamba_scales=(1.1, 0.8, 1.2, 0.6, 1.4),
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def new_mixer(weights: dict[str, Tensor]) -> ParallelMixer:
    """Return the mixer of a layer's weights, with the scales of projected rows folded in."""
    mamba, order = SPEC.mamba, pair_order(HEAD_DIM, ROPE)
    shared = mamba.num_groups * mamba.state_dim
    widths = [mamba.inner_dim, mamba.inner_dim, shared, shared, mamba.num_heads]
    row_scales = torch.tensor(SPEC.mamba_scales).repeat_interleave(torch.tensor(widths))

    def by_pairs(name: str) -> Tensor:
        return weights[name].view(-1, HEAD_DIM, MODEL_DIM)[:, order].flatten(0, 1)

    qkv = [
        by_pairs("self_attn.q_proj.weight"),
        by_pairs("self_attn.k_proj.weight") * SPEC.key_scale,
        weights["self_attn.v_proj.weight"],
    ]
    return ParallelMixer(
        SPEC,
        attention=GqaMixer(
            SPEC.attention,
            qkv_proj=pack(torch.cat(qkv), mixing.PACKING),
            o_proj=pack(weights["self_attn.o_proj.weight"], mixing.PACKING),
            qk_norm=None,
            rope=RopeTable(ROPE, HEAD_DIM),
        ),
        mamba=Mamba2Mixer(
            mamba,
            in_proj=pack(weights["mamba.in_proj.weight"] * row_scales[:, None], mixing.PACKING),
            conv_weight_WC=weights["mamba.conv1d.weight"][:, 0].T,
            conv_bias_C=weights["mamba.conv1d.bias"],
            A_log_H=weights["mamba.A_log"],
            D_H=weights["mamba.D"],
            dt_bias_H=weights["mamba.dt_bias"],
            norm=None,
            out_proj=pack(weights["mamba.out_proj.weight"], mixing.PACKING),
        ),
    )


def random_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mamba = SPEC.mamba
    num_rows = mamba.inner_dim + mamba.conv_channels + mamba.num_heads
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, MODEL_DIM),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, MODEL_DIM),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, MODEL_DIM),
        "self_attn.o_proj.weight": (MODEL_DIM, HEADS * HEAD_DIM),
        "mamba.in_proj.weight": (num_rows, MODEL_DIM),
        "mamba.conv1d.weight": (mamba.conv_channels, 1, mamba.conv_width),
        "mamba.conv1d.bias": (mamba.conv_channels,),
        "mamba.A_log": (mamba.num_heads,),
        "mamba.D": (mamba.num_heads,),
        "mamba.dt_bias": (mamba.num_heads,),
        "mamba.out_proj.weight": (MODEL_DIM, mamba.inner_dim),
    }
    return {
        name: torch.randn(shape, generator=generator) * (0.1 if "proj" in name else 0.5)
        for name, shape in shapes.items()
    }


def random_rows(num_rows: int, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, MODEL_DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("at", [[0, 64, 128, 150], [0, 1, 70, 128, 147, 148, 149, 150]])
def test_any_cut_keeps_the_bits_of_rows_and_states(at: list[int]) -> None:
    mixing.check_mixer_cuts(new_mixer(random_weights()), SPEC, random_rows(150), at)


def test_neighbours_in_a_batch_do_not_change_a_bit() -> None:
    mixing.check_mixer_neighbours(new_mixer(random_weights()), SPEC, random_rows(140))


def test_states_and_keys_are_in_place_when_it_says_so() -> None:
    mixer, kv = new_mixer(random_weights()), mixing.new_kv(SPEC)
    seen: list[tuple[bool, bytes]] = []

    def kv_bytes() -> bytes:
        page = bytearray(20 * SPEC.values_per_token * 4)
        kv.kv_of(0).write_to(0, 20, memoryview(page))
        return bytes(page)

    kv.begin_forward(())
    batch = Batch([Segment(kv=kv, tokens=[0] * 20, num_logits=0)])

    def on_written(_: Batch) -> None:
        seen.append((kv.state_of(0).holds(20), kv_bytes()))

    mixer(random_rows(20), Rows(batch), 0, on_written)
    assert seen == [(True, kv_bytes())]


@pytest.mark.slow
def test_the_layer_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers.models.falcon_h1.modeling_falcon_h1")
    config = transformers.FalconH1Config(
        hidden_size=MODEL_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE.theta},
        mamba_d_ssm=SPEC.mamba.inner_dim,
        mamba_n_heads=SPEC.mamba.num_heads,
        mamba_d_head=SPEC.mamba.head_dim,
        mamba_d_state=SPEC.mamba.state_dim,
        mamba_n_groups=SPEC.mamba.num_groups,
        mamba_chunk_size=32,
        mamba_rms_norm=False,
        attention_in_multiplier=SPEC.attention_in_scale,
        attention_out_multiplier=SPEC.attention_out_scale,
        key_multiplier=SPEC.key_scale,
        ssm_in_multiplier=SPEC.mamba_in_scale,
        ssm_out_multiplier=SPEC.mamba_out_scale,
        ssm_multipliers=list(SPEC.mamba_scales),
        attn_implementation="eager",
    )
    layer = transformers.FalconH1DecoderLayer(config, 0).eval()
    layer.mamba.register_buffer("mup_vector", transformers.compute_mup_vector(config), False)
    weights = random_weights()
    missing, unexpected = layer.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("norm" in name or "feed_forward" in name for name in missing)
    torch.nn.init.zeros_(layer.feed_forward.down_proj.weight)
    x_TD = random_rows(150)
    positions = torch.arange(150)[None]
    turns = transformers.FalconH1RotaryEmbedding(config)(x_TD[None], positions)
    mask = torch.full((1, 1, 150, 150), float("-inf")).triu(1)
    with torch.no_grad():
        out = layer(x_TD[None], attention_mask=mask, position_embeddings=turns)
        normed_TD = layer.input_layernorm(x_TD)
    expected = (out[0] if isinstance(out, tuple) else out).view_as(x_TD) - x_TD
    rows = mixing.mixed(new_mixer(weights), mixing.new_kv(SPEC), normed_TD, [0, 128, 149, 150])
    torch.testing.assert_close(torch.cat(list(rows)), expected, rtol=1e-5, atol=5e-6)
