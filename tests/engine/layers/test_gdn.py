"""The Gated DeltaNet mixer: transformers' module on copied weights, and bits over cuts.

Shapes: D model dim.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.layers.gdn import GdnMixer
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import pack
from prfaas.engine.mixer_spec import GdnSpec
from tests.engine.layers import mixing

MODEL_DIM = 40
SPEC = GdnSpec(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=24, conv_width=4)
NUM_IN_ROWS = SPEC.conv_channels + 4 * 24 + 2 * 4


def new_mixer(spec: GdnSpec = SPEC) -> GdnMixer:
    generator = torch.Generator().manual_seed(0)
    inner_dim = spec.num_value_heads * spec.value_dim
    return GdnMixer(
        spec,
        in_proj=mixing.linear(NUM_IN_ROWS, MODEL_DIM, generator),
        conv_weight_WC=torch.randn(spec.conv_width, spec.conv_channels, generator=generator),
        A_log_H=torch.randn(spec.num_value_heads, generator=generator),
        dt_bias_H=torch.randn(spec.num_value_heads, generator=generator),
        norm=RmsNorm(torch.rand(spec.value_dim), 1e-6, has_unit_offset=False),
        out_proj=mixing.linear(MODEL_DIM, inner_dim, generator),
    )


def inputs(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, MODEL_DIM, generator=torch.Generator().manual_seed(seed))


@given(at=mixing.cuts(max_tokens=150), seed=st.integers(0, 9))
@settings(max_examples=15)
def test_any_cut_keeps_the_bits_of_rows_and_states(at: list[int], seed: int) -> None:
    mixing.check_mixer_cuts(new_mixer(), SPEC, inputs(at[-1], seed), at)


def test_single_tokens_have_the_bits_of_the_whole() -> None:
    mixing.check_mixer_cuts(new_mixer(), SPEC, inputs(70), range(71))


def test_the_number_of_threads_changes_no_bit() -> None:
    mixing.check_mixer_threads(new_mixer(), SPEC, inputs(100))


def test_neighbours_in_a_batch_keep_the_bits() -> None:
    mixing.check_mixer_neighbours(new_mixer(), SPEC, inputs(150))


@pytest.mark.slow
def test_it_equals_qwen3_5_of_transformers() -> None:
    qwen3_5: Any = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    config = qwen3_5.Qwen3_5TextConfig(
        hidden_size=MODEL_DIM,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"] * 4,
    )
    torch.manual_seed(0)
    theirs = qwen3_5.Qwen3_5GatedDeltaNet(config, 0).requires_grad_(False).eval()
    torch.nn.init.normal_(theirs.norm.weight, 1.0, 0.1)
    projections = (theirs.in_proj_qkv, theirs.in_proj_z, theirs.in_proj_b, theirs.in_proj_a)
    mixer = GdnMixer(
        SPEC,
        in_proj=pack(torch.cat([linear.weight for linear in projections]), mixing.PACKING),
        conv_weight_WC=theirs.conv1d.weight[:, 0].T,
        A_log_H=theirs.A_log,
        dt_bias_H=theirs.dt_bias,
        norm=RmsNorm(theirs.norm.weight, config.rms_norm_eps, has_unit_offset=False),
        out_proj=pack(theirs.out_proj.weight, mixing.PACKING),
    )
    x_TD = inputs(150)
    at = [0, 128, 140, 141, 150]
    rows = torch.cat(list(mixing.mixed(mixer, mixing.new_kv(SPEC), x_TD, at)))
    assert mixing.relative_error(rows, theirs(x_TD[None])[0]) < 3e-6


@pytest.mark.slow
def test_betas_are_doubled_as_in_olmo_of_transformers() -> None:
    olmo: Any = pytest.importorskip("transformers.models.olmo_hybrid.modeling_olmo_hybrid")
    config = olmo.OlmoHybridConfig(
        hidden_size=MODEL_DIM,
        num_hidden_layers=4,
        num_attention_heads=4,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_conv_kernel_dim=4,
        linear_allow_neg_eigval=True,
    )
    torch.manual_seed(0)
    theirs = olmo.OlmoHybridGatedDeltaNet(config, 0).requires_grad_(False).eval()
    torch.nn.init.normal_(theirs.o_norm.weight, 1.0, 0.1)
    spec = GdnSpec(
        num_key_heads=4, num_value_heads=4, key_dim=16, value_dim=24, conv_width=4, beta_scale=2.0
    )
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
    mixer = GdnMixer(
        spec,
        in_proj=pack(torch.cat([getattr(theirs, n).weight for n in names]), mixing.PACKING),
        conv_weight_WC=theirs.conv1d.weight[:, 0].T,
        A_log_H=theirs.A_log,
        dt_bias_H=theirs.dt_bias,
        norm=RmsNorm(theirs.o_norm.weight, 1e-5, has_unit_offset=False),
        out_proj=pack(theirs.o_proj.weight, mixing.PACKING),
    )
    x_TD = inputs(150)
    at = [0, 128, 140, 141, 150]
    rows = torch.cat(list(mixing.mixed(mixer, mixing.new_kv(spec), x_TD, at)))
    assert mixing.relative_error(rows, theirs(x_TD[None])[0]) < 3e-6
