"""The Kimi Delta Attention mixer: transformers' modules on copied weights, and bits over cuts.

Shapes: D model dim.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.layers.kda import KdaMixer
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import pack
from prfaas.engine.mixer_spec import KdaSpec
from tests.engine.layers import mixing

MODEL_DIM = 40
KIMI = KdaSpec(num_heads=3, head_dim=16, conv_width=4, gate_rank=16)
LING = replace(KIMI, gate_rank=None, decay="bounded", decay_bound=-5.0)
INNER_DIM = 48
EACH_SPEC = pytest.mark.parametrize("spec", [KIMI, LING], ids=["kimi", "ling"])


def new_mixer(spec: KdaSpec) -> KdaMixer:
    generator = torch.Generator().manual_seed(0)
    rank = spec.gate_rank
    return KdaMixer(
        spec,
        in_proj=mixing.linear(3 * INNER_DIM + 3 + 2 * (rank or INNER_DIM), MODEL_DIM, generator),
        f_b=None if rank is None else mixing.linear(INNER_DIM, rank, generator),
        g_b=None if rank is None else mixing.linear(INNER_DIM, rank, generator),
        conv_weight_WC=torch.randn(spec.conv_width, 3 * INNER_DIM, generator=generator),
        A_log_H=torch.randn(spec.num_heads, generator=generator),
        dt_bias_HD=torch.randn(INNER_DIM, generator=generator),
        norm=RmsNorm(torch.rand(spec.head_dim), 1e-6, has_unit_offset=False),
        out_proj=mixing.linear(MODEL_DIM, INNER_DIM, generator),
    )


def inputs(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, MODEL_DIM, generator=torch.Generator().manual_seed(seed))


@EACH_SPEC
@given(at=mixing.cuts(max_tokens=150), seed=st.integers(0, 9))
@settings(max_examples=10)
def test_any_cut_keeps_the_bits_of_rows_and_states(spec: KdaSpec, at: list[int], seed: int) -> None:
    mixing.check_mixer_cuts(new_mixer(spec), spec, inputs(at[-1], seed), at)


@EACH_SPEC
def test_single_tokens_have_the_bits_of_the_whole(spec: KdaSpec) -> None:
    mixing.check_mixer_cuts(new_mixer(spec), spec, inputs(70), range(71))


def test_the_number_of_threads_changes_no_bit() -> None:
    mixing.check_mixer_threads(new_mixer(KIMI), KIMI, inputs(100))


@EACH_SPEC
def test_neighbours_in_a_batch_keep_the_bits(spec: KdaSpec) -> None:
    mixing.check_mixer_neighbours(new_mixer(spec), spec, inputs(150))


def check_against(theirs: Any, mixer: KdaMixer) -> None:
    x_TD = inputs(150)
    at = [0, 128, 140, 141, 150]
    rows = torch.cat(list(mixing.mixed(mixer, mixing.new_kv(mixer.spec), x_TD, at)))
    assert mixing.relative_error(rows, theirs(x_TD[None])[0]) < 3e-6


def mixer_of(theirs: Any, spec: KdaSpec, names: tuple[str, ...], eps: float) -> KdaMixer:
    """Return the mixer of transformers' weights, after filling those that it leaves empty."""
    gate = theirs.forget_gate
    torch.nn.init.normal_(gate.A_log)
    torch.nn.init.normal_(gate.dt_bias)
    torch.nn.init.normal_(theirs.o_norm.weight, 1.0, 0.1)
    weights = [theirs.get_submodule(name).weight for name in names]
    wide = [gate.f_b_proj.weight, theirs.g_b_proj.weight] if spec.gate_rank else []
    f_b, g_b = [pack(weight, mixing.PACKING) for weight in wide] or (None, None)
    return KdaMixer(
        spec,
        in_proj=pack(torch.cat(weights), mixing.PACKING),
        f_b=f_b,
        g_b=g_b,
        conv_weight_WC=theirs.conv1d.weight[:, 0].T,
        A_log_H=gate.A_log.flatten(),
        dt_bias_HD=gate.dt_bias,
        norm=RmsNorm(theirs.o_norm.weight, eps, has_unit_offset=False),
        out_proj=pack(theirs.o_proj.weight, mixing.PACKING),
    )


@pytest.mark.slow
def test_it_equals_kimi_linear_of_transformers() -> None:
    kimi: Any = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = kimi.KimiLinearConfig(
        hidden_size=MODEL_DIM,
        num_hidden_layers=4,
        num_attention_heads=3,
        linear_num_heads=3,
        linear_head_dim=16,
        linear_conv_kernel_dim=4,
    )
    torch.manual_seed(0)
    theirs = kimi.KimiLinearDeltaAttention(config, 0).requires_grad_(False).eval()
    names = ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj")
    check_against(theirs, mixer_of(theirs, KIMI, names, config.rms_norm_eps))


@pytest.mark.slow
@pytest.mark.parametrize("is_bounded", [True, False])
def test_it_equals_ling_of_transformers(is_bounded: bool) -> None:
    ling: Any = pytest.importorskip("transformers.models.bailing_hybrid.modeling_bailing_hybrid")
    config = ling.BailingHybridConfig(
        hidden_size=MODEL_DIM,
        num_hidden_layers=4,
        num_attention_heads=3,
        linear_num_heads=3,
        linear_head_dim=16,
        linear_conv_kernel_dim=4,
        kda_safe_gate=is_bounded,
        kda_lower_bound=-5.0,
    )
    torch.manual_seed(0)
    theirs = ling.BailingHybridDeltaAttention(config, 0).requires_grad_(False).eval()
    names = ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_proj", "g_proj")
    spec = LING if is_bounded else replace(LING, decay="softplus", decay_bound=None)
    check_against(theirs, mixer_of(theirs, spec, names, config.rms_norm_eps))
