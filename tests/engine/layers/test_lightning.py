"""Lightning attention: the chunked form against the recurrence in float64, bits, transformers.

Shapes: T rows, H heads, K head dim, D model dim.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.layers.lightning import LightningCore, LightningMixer, recur, slopes
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import pack
from prfaas.engine.mixer_spec import LightningSpec
from prfaas.engine.rope import RopeTable
from prfaas.engine.rope_spec import RopeSpec
from tests.engine.layers import mixing

SPEC = LightningSpec(num_heads=4, head_dim=32, scale=32**-0.5, slope_scale=0.9)
MODEL_DIM = 48


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_rows(spec: LightningSpec, num_rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, 3 * spec.num_heads * spec.head_dim, generator=generator)


def random_state(spec: LightningSpec, seed: int = 0) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(spec.num_heads, spec.head_dim, spec.head_dim, generator=generator),)


def exact(spec: LightningSpec, rows_TR: Tensor, state: tuple[Tensor]) -> tuple[Tensor, Tensor]:
    """The recurrence of models.md in float64, written again."""
    num_rows, heads, dim = len(rows_TR), spec.num_heads, spec.head_dim
    q, k, v = rows_TR.double().view(num_rows, 3, heads, dim).unbind(1)
    S = state[0].double()
    out = torch.empty(num_rows, heads, dim, dtype=torch.float64)
    for t in range(num_rows):
        for h in range(heads):
            decay = math.exp(-spec.slope_scale * 2 ** (-8 * (h + 1) / heads))
            S[h] = decay * S[h] + torch.outer(k[t, h], v[t, h])
            out[t, h] = spec.scale * (q[t, h] @ S[h])
    return out.flatten(1), S


@pytest.mark.parametrize("slope_scale", [1e-5, 0.9, 40.0])
@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 150])
def test_chunks_and_steps_are_close_to_the_exact_recurrence(
    num_rows: int, slope_scale: float
) -> None:
    spec = replace(SPEC, slope_scale=slope_scale)
    core, rows, state = LightningCore(spec), random_rows(spec, num_rows), random_state(spec)
    expected, expected_state = exact(spec, rows, state)
    for out, end in (mixing.steps(core, rows, state), mixing.scan(core, rows, state)):
        assert mixing.relative_error(out, expected) < 2e-6
        assert mixing.relative_error(end[0], expected_state) < 2e-6


def test_the_plain_recurrence_is_the_exact_one() -> None:
    rows, state = random_rows(SPEC, 20).double(), random_state(SPEC)
    q, k, v = rows.view(20, 3, SPEC.num_heads, SPEC.head_dim).unbind(1)
    out, end = recur(q * SPEC.scale, k, v, slopes(SPEC), state[0].double())
    expected, expected_end = exact(SPEC, rows, state)
    torch.testing.assert_close(out.flatten(1), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(end, expected_end, rtol=1e-12, atol=1e-12)


def new_mixer(spec: LightningSpec, seed: int = 0) -> LightningMixer:
    generator = torch.Generator().manual_seed(seed)
    inner = spec.num_heads * spec.head_dim
    qk_weight = 1 + 0.1 * torch.randn(2 * spec.num_heads, spec.head_dim, generator=generator)
    norm_weight = 1 + 0.1 * torch.randn(
        spec.norm_groups, inner // spec.norm_groups, generator=generator
    )
    return LightningMixer(
        spec,
        in_proj=mixing.linear(4 * inner, MODEL_DIM, generator),
        qk_norm=RmsNorm(qk_weight, 1e-6, has_unit_offset=False) if spec.has_qk_norm else None,
        rope=None if spec.rope is None else RopeTable(spec.rope, spec.head_dim),
        norm=RmsNorm(norm_weight, 1e-6, has_unit_offset=False),
        out_proj=mixing.linear(MODEL_DIM, inner, generator),
    )


RING = replace(
    SPEC, rope=RopeSpec(theta=1e4, rotary_dim=16), has_silu=False, has_qk_norm=True, norm_groups=2
)


@given(at=mixing.cuts(), seed=st.integers(0, 99))
@settings(max_examples=10)
@pytest.mark.parametrize("spec", [SPEC, RING], ids=["minimax", "ring"])
def test_any_cut_keeps_the_bits_of_rows_and_states(
    spec: LightningSpec, at: list[int], seed: int
) -> None:
    x_TD = torch.randn(at[-1], MODEL_DIM, generator=torch.Generator().manual_seed(seed))
    mixing.check_mixer_cuts(new_mixer(spec), spec, x_TD, at)


@pytest.mark.parametrize("head_dim", [6, 8, 100])
def test_single_tokens_have_the_bits_of_the_whole(head_dim: int) -> None:
    spec = replace(SPEC, head_dim=head_dim)
    x_TD = torch.randn(70, MODEL_DIM, generator=torch.Generator().manual_seed(1))
    mixing.check_mixer_cuts(new_mixer(spec), spec, x_TD, range(71))


def test_the_number_of_threads_changes_no_bit() -> None:
    spec = replace(SPEC, num_heads=7, head_dim=100)
    x_TD = torch.randn(100, MODEL_DIM, generator=torch.Generator().manual_seed(1))
    mixing.check_mixer_threads(new_mixer(spec), spec, x_TD)


@pytest.mark.parametrize("spec", [SPEC, RING], ids=["minimax", "ring"])
def test_neighbours_in_a_batch_do_not_change_a_bit(spec: LightningSpec) -> None:
    x_TD = torch.randn(140, MODEL_DIM, generator=torch.Generator().manual_seed(1))
    mixing.check_mixer_neighbours(new_mixer(spec), spec, x_TD)


def ring_reference(spec: LightningSpec, mixer: LightningMixer, x_TD: Tensor) -> Tensor:
    """Ring's layer from its formulas: per-head norms, partial rotation, groups, gate."""
    assert spec.rope is not None
    num_rows, rotary = len(x_TD), spec.rope.rotary_dim or spec.head_dim
    rows = mixer.in_proj(x_TD).double().view(num_rows, 4, spec.num_heads, spec.head_dim)
    q, k, v, gate = rows.unbind(1)
    assert mixer.qk_norm is not None
    weight_qk = mixer.qk_norm.weight.double().view(2, spec.num_heads, spec.head_dim)
    turned = []
    for part, weight in zip((q, k), weight_qk, strict=True):
        normed = part * (part.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
        frequency = spec.rope.theta ** (-torch.arange(0, rotary, 2).double() / rotary)
        angle = torch.arange(num_rows).double()[:, None, None] * frequency
        even, odd = normed[..., 0:rotary:2], normed[..., 1:rotary:2]
        pairs = [even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()]
        turned.append(torch.cat([torch.stack(pairs, -1).flatten(-2), normed[..., rotary:]], -1))
    qkv = torch.stack([*turned, v], 1).flatten(1)
    out = exact(spec, qkv, (torch.zeros(spec.num_heads, spec.head_dim, spec.head_dim),))[0]
    groups = out.view(num_rows, spec.norm_groups, -1)
    groups = groups * (groups.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    out = groups * mixer.norm.weight.double()
    return mixer.out_proj((out.flatten(1) * gate.flatten(1).sigmoid()).float())


def test_ring_norms_rotates_and_gates_as_its_formulas_say() -> None:
    mixer = new_mixer(RING)
    x_TD = torch.randn(90, MODEL_DIM, generator=torch.Generator().manual_seed(2))
    [out] = mixing.mix(mixer, [(mixing.new_kv(RING), x_TD)])
    torch.testing.assert_close(out, ring_reference(RING, mixer, x_TD), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_minimax_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = transformers.MiniMaxConfig(
        hidden_size=MODEL_DIM,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        block_size=32,
    )
    torch.manual_seed(3)
    theirs = transformers.MiniMaxLightningAttention(config, 1).eval()
    torch.nn.init.normal_(theirs.norm.weight, 1.0, 0.1)
    by_head = theirs.qkv_proj.weight.detach().view(4, 3, 32, MODEL_DIM).transpose(0, 1)
    in_weight = torch.cat([by_head.flatten(0, 2), theirs.output_gate.weight.detach()])
    spec = LightningSpec(num_heads=4, head_dim=32, scale=1.0, slope_scale=1 - 1 / (2 + 1e-5) + 1e-5)
    mixer = LightningMixer(
        spec,
        in_proj=pack(in_weight, mixing.PACKING),
        qk_norm=None,
        rope=None,
        norm=RmsNorm(theirs.norm.weight.detach().view(1, -1), 1e-6, has_unit_offset=False),
        out_proj=pack(theirs.out_proj.weight.detach(), mixing.PACKING),
    )
    x_TD = torch.randn(150, MODEL_DIM)
    with torch.no_grad():
        expected = theirs(x_TD[None], (x_TD, x_TD), None)[0][0]
    kv = mixing.new_kv(spec)
    rows = torch.cat(list(mixing.mixed(mixer, kv, x_TD, [0, 128, 148, 149, 150])))
    assert mixing.relative_error(rows, expected) < 3e-6
