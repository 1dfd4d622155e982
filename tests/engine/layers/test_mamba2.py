"""Mamba-2: the chunked form against the recurrence in float64, bits, and transformers' layers.

Shapes: T rows, H heads, P head dim, N state dim, G groups, D model dim.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.layers.mamba2 import Mamba2Core, Mamba2Mixer, recur
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear, pack
from prfaas.engine.mixer_spec import Mamba2Spec
from prfaas.engine.states import State
from tests.engine.layers import mixing

SPEC = Mamba2Spec(num_heads=6, head_dim=16, state_dim=24, num_groups=2, conv_width=4)
ONE_GROUP = replace(SPEC, num_groups=1, gated_norm="norm_first")
ODD = replace(
    SPEC, num_heads=3, head_dim=5, state_dim=7, num_groups=3, gated_norm=None, has_conv_bias=False
)
SPECS = pytest.mark.parametrize("spec", [SPEC, ONE_GROUP, ODD], ids=["groups", "one", "odd"])
MODEL_DIM = 48


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Weights:
    """Random weights; `strength` multiplies the decays."""

    def __init__(self, spec: Mamba2Spec, *, strength: float = 1.0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.generator = generator
        channels = (spec.conv_channels,)
        self.conv = torch.randn(spec.conv_width, *channels, generator=generator) * 0.5
        bias = torch.randn(channels, generator=generator) * 0.5
        self.bias = bias if spec.has_conv_bias else None
        self.A_log = torch.log(strength * (0.5 + torch.rand(spec.num_heads, generator=generator)))
        self.D = torch.randn(spec.num_heads, generator=generator)

    def core(self, spec: Mamba2Spec) -> Mamba2Core:
        return Mamba2Core(
            spec,
            conv_weight_WC=self.conv,
            conv_bias_C=self.bias,
            A_log_H=self.A_log,
            D_H=self.D,
        )


def random_rows(spec: Mamba2Spec, num_rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    xbc = torch.randn(num_rows, spec.conv_channels, generator=generator)
    dt = torch.rand(num_rows, spec.num_heads, generator=generator)
    return torch.cat([xbc, dt], dim=1)


def random_state(spec: Mamba2Spec, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(state.shape, generator=generator) for state in spec.states)


def exact(
    spec: Mamba2Spec, weights: Weights, rows_TR: Tensor, state: State
) -> tuple[Tensor, Tensor]:
    """The layer of models.md in float64, head by head and token by token."""
    u = torch.cat([state[0], rows_TR[:, : spec.conv_channels]]).double()
    dt = rows_TR[:, spec.conv_channels :].double()
    S = state[1].double().clone()
    inner, shared = spec.inner_dim, spec.num_groups * spec.state_dim
    out = torch.empty(len(rows_TR), spec.num_heads, spec.head_dim, dtype=torch.float64)
    for t in range(len(rows_TR)):
        y = (weights.conv.double() * u[t : t + spec.conv_width]).sum(0)
        y = y if weights.bias is None else y + weights.bias.double()
        y = y * torch.sigmoid(y)
        x = y[:inner].view(spec.num_heads, spec.head_dim)
        B = y[inner : inner + shared].view(spec.num_groups, spec.state_dim)
        C = y[inner + shared :].view(spec.num_groups, spec.state_dim)
        for h in range(spec.num_heads):
            g = h // (spec.num_heads // spec.num_groups)
            a = math.exp(-math.exp(float(weights.A_log[h])) * float(dt[t, h]))
            S[h] = a * S[h] + torch.outer(B[g], dt[t, h] * x[h])
            out[t, h] = C[g] @ S[h] + float(weights.D[h]) * x[h]
    return out.flatten(1), S


@SPECS
@pytest.mark.parametrize("strength", [0.01, 1.0, 145.0])
@pytest.mark.parametrize("num_rows", [1, 64, 65, 150])
def test_chunks_and_steps_are_close_to_the_exact_recurrence(
    spec: Mamba2Spec, num_rows: int, strength: float
) -> None:
    weights = Weights(spec, strength=strength)
    core, rows, state = weights.core(spec), random_rows(spec, num_rows), random_state(spec)
    expected, expected_state = exact(spec, weights, rows, state)
    for out, end in (mixing.steps(core, rows, state), mixing.scan(core, rows, state)):
        assert mixing.relative_error(out, expected) < 2e-6
        assert mixing.relative_error(end[1], expected_state) < 2e-6
        kept = torch.cat([state[0], rows[:, : spec.conv_channels]])[num_rows:]
        assert torch.equal(end[0], kept)


def test_weak_decays_behind_a_strong_one_keep_their_precision() -> None:
    weights = Weights(SPEC)
    rows, state = random_rows(SPEC, 64), random_state(SPEC)
    rows[:, SPEC.conv_channels :] *= 0.01
    rows[3, SPEC.conv_channels :] = 1e5  # in float32 sums past 1e5 are 1/128 apart
    core = weights.core(SPEC)
    expected, _ = exact(SPEC, weights, rows, state)
    out, _ = mixing.scan(core, rows, state)
    behind = slice(4, None)
    assert mixing.relative_error(out[behind], expected[behind]) < 2e-6


def test_the_plain_recurrence_is_the_exact_one() -> None:
    weights = Weights(ODD)
    weights.conv[:-1] = 0  # the convolution sees the token alone
    rows, state = random_rows(ODD, 20), random_state(ODD)
    u = rows[:, : ODD.conv_channels].double() * weights.conv[-1].double()
    u = u * torch.sigmoid(u)
    x = u[:, : ODD.inner_dim].view(20, ODD.num_heads, -1)
    B, C = u[:, ODD.inner_dim :].view(20, 2, ODD.num_heads, -1).unbind(1)
    dt, A = rows[:, ODD.conv_channels :].double(), -weights.A_log.double().exp()
    out, end = recur(x, B, C, dt, A, state[1].double())
    expected, expected_end = exact(ODD, weights, rows, state)
    out = out + weights.D.double()[:, None] * x
    torch.testing.assert_close(out.flatten(1), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(end, expected_end, rtol=1e-12, atol=1e-12)


def new_mixer(
    spec: Mamba2Spec,
    *,
    dt_limit: tuple[float, float] = (0.1, 1.5),
    dt_bias: float | None = None,
) -> Mamba2Mixer:
    weights = Weights(spec)
    dt_bias_H = torch.randn(spec.num_heads, generator=weights.generator)
    num_rows = spec.inner_dim + spec.conv_channels + spec.num_heads
    norm_shape = (spec.num_groups, spec.inner_dim // spec.num_groups)
    norm_weight = 1 + 0.1 * torch.randn(norm_shape, generator=weights.generator)
    return Mamba2Mixer(
        spec,
        in_proj=mixing.linear(num_rows, MODEL_DIM, weights.generator),
        conv_weight_WC=weights.conv,
        conv_bias_C=weights.bias,
        A_log_H=weights.A_log,
        D_H=weights.D,
        dt_bias_H=dt_bias_H if dt_bias is None else torch.full_like(dt_bias_H, dt_bias),
        dt_limit=dt_limit,
        norm=None if spec.gated_norm is None else RmsNorm(norm_weight, 1e-5, has_unit_offset=False),
        out_proj=mixing.linear(MODEL_DIM, spec.inner_dim, weights.generator),
    )


@given(at=mixing.cuts(), seed=st.integers(0, 99))
@settings(max_examples=10)
@SPECS
def test_any_cut_keeps_the_bits_of_rows_and_states(
    spec: Mamba2Spec, at: list[int], seed: int
) -> None:
    x_TD = torch.randn(at[-1], MODEL_DIM, generator=torch.Generator().manual_seed(seed))
    mixing.check_mixer_cuts(new_mixer(spec), spec, x_TD, at)


@SPECS
def test_single_tokens_have_the_bits_of_the_whole(spec: Mamba2Spec) -> None:
    x_TD = torch.randn(70, MODEL_DIM, generator=torch.Generator().manual_seed(1))
    mixing.check_mixer_cuts(new_mixer(spec), spec, x_TD, range(71))


def test_the_number_of_threads_changes_no_bit() -> None:
    spec = replace(SPEC, num_heads=21, head_dim=50, state_dim=90, num_groups=3)
    x_TD = torch.randn(100, MODEL_DIM, generator=torch.Generator().manual_seed(1))
    mixing.check_mixer_threads(new_mixer(spec), spec, x_TD)


@SPECS
def test_neighbours_in_a_batch_do_not_change_a_bit(spec: Mamba2Spec) -> None:
    x_TD = torch.randn(140, MODEL_DIM, generator=torch.Generator().manual_seed(1))
    mixing.check_mixer_neighbours(new_mixer(spec), spec, x_TD)


def test_dt_is_held_in_its_limits() -> None:
    spec = replace(SPEC, gated_norm=None)
    x_TD = torch.randn(30, MODEL_DIM, generator=torch.Generator().manual_seed(1))
    outs = []
    for weight, limit in ((1.0, (0.5, 0.5)), (0.0, (0.0, math.inf))):
        # Held at 0.5, dt is as if nothing but its bias were projected: log(1 + exp(bias)) = 0.5.
        mixer = new_mixer(spec, dt_limit=limit, dt_bias=math.log(math.exp(0.5) - 1))
        mixer.in_proj = scaled_tail(mixer.in_proj, spec.num_heads, weight)
        [out] = mixing.mix(mixer, [(mixing.new_kv(spec), x_TD)])
        outs.append(out)
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


def scaled_tail(linear: Linear, num_columns: int, scale: float) -> Linear:
    def scaled(x_MK: Tensor) -> Tensor:
        y_MN = linear(x_MK)
        y_MN[:, -num_columns:] *= scale
        return y_MN

    return scaled


def their_granite() -> tuple[Any, Mamba2Spec]:
    theirs = pytest.importorskip("transformers.models.granitemoehybrid.modeling_granitemoehybrid")
    config = theirs.GraniteMoeHybridConfig(
        hidden_size=MODEL_DIM,
        num_attention_heads=4,
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=32,
    )
    return theirs.GraniteMoeHybridMambaLayer(config, 0), replace(SPEC, num_groups=1)


def their_bamba() -> tuple[Any, Mamba2Spec]:
    theirs = pytest.importorskip("transformers.models.bamba.modeling_bamba")
    config = theirs.BambaConfig(
        hidden_size=MODEL_DIM,
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_n_groups=1,
        mamba_chunk_size=32,
    )
    return theirs.BambaMixer(config, 0), replace(SPEC, num_groups=1)


def their_nemotron() -> tuple[Any, Mamba2Spec]:
    theirs = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    config = theirs.NemotronHConfig(
        hidden_size=MODEL_DIM,
        mamba_num_heads=6,
        mamba_head_dim=16,
        ssm_state_size=24,
        n_groups=2,
        conv_kernel=4,
        chunk_size=32,
        layers_block_type=["mamba", "attention"],
    )
    return theirs.NemotronHMamba2Mixer(config, 0), SPEC


def their_falcon(*, is_normed: bool) -> tuple[Any, Mamba2Spec]:
    theirs = pytest.importorskip("transformers.models.falcon_h1.modeling_falcon_h1")
    config = theirs.FalconH1Config(
        hidden_size=MODEL_DIM,
        num_attention_heads=4,
        num_hidden_layers=1,
        mamba_d_ssm=96,
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_n_groups=2,
        mamba_chunk_size=32,
        mamba_rms_norm=is_normed,
        mamba_norm_before_gate=True,
    )
    layer = theirs.FalconH1Mixer(config, 0)
    layer.register_buffer("mup_vector", theirs.compute_mup_vector(config))
    return layer, replace(SPEC, gated_norm="norm_first" if is_normed else None)


def ours_of(theirs: Any, spec: Mamba2Spec) -> Mamba2Mixer:
    weights = {name: value.detach() for name, value in theirs.state_dict().items()}
    in_weight = weights["in_proj.weight"]
    if "mup_vector" in dict(theirs.named_buffers()):
        in_weight = in_weight * theirs.mup_vector.view(-1, 1)
    norm = None
    if spec.gated_norm is not None:
        norm_weight = weights["norm.weight"].view(spec.num_groups, -1)
        norm = RmsNorm(norm_weight, theirs.norm.variance_epsilon, has_unit_offset=False)
    return Mamba2Mixer(
        spec,
        in_proj=pack(in_weight, mixing.PACKING),
        conv_weight_WC=weights["conv1d.weight"][:, 0].T,
        conv_bias_C=weights["conv1d.bias"],
        A_log_H=weights["A_log"],
        D_H=weights["D"],
        dt_bias_H=weights["dt_bias"],
        norm=norm,
        out_proj=pack(weights["out_proj.weight"], mixing.PACKING),
    )


THEIRS: dict[str, Callable[[], tuple[Any, Mamba2Spec]]] = {
    "granite": their_granite,
    "bamba": their_bamba,
    "nemotron": their_nemotron,
    "falcon": partial(their_falcon, is_normed=False),
    "falcon-normed": partial(their_falcon, is_normed=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", THEIRS)
def test_layers_equal_transformers(family: str) -> None:
    torch.manual_seed(3)
    theirs, spec = THEIRS[family]()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "proj" not in name and name != "A_log":
                parameter.copy_(1 + torch.randn_like(parameter) * 0.3)
        x_TD = torch.randn(150, MODEL_DIM)
        expected = theirs.eval()(x_TD[None])[0]
    mixer = ours_of(theirs, spec)
    kv = mixing.new_kv(spec)
    rows = torch.cat(list(mixing.mixed(mixer, kv, x_TD, [0, 128, 148, 149, 150])))
    assert mixing.relative_error(rows, expected) < 3e-6
