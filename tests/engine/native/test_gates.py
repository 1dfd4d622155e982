"""Gates and gated norms against float64, and rows that do not see each other.

Shapes: T tokens, G decays, H heads, h heads of q and k, K key dim, N groups of M numbers.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.native.gates import (
    Activation,
    DeltaGates,
    Order,
    delta_gates,
    gate_rows,
    step_sizes,
)
from tests.engine.native.margins import guarded, inside

EACH_BOUND = pytest.mark.parametrize("bound", [None, -5.0])
EACH_ACTIVATION = pytest.mark.parametrize("activation", ["silu", "sigmoid"])
EACH_ORDER = pytest.mark.parametrize("order", ["norm_first", "gate_first"])
NO_LIMIT = (0.0, math.inf)


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x.double(), torch.zeros(1, dtype=torch.float64))


def gates_of(
    f: Tensor, b: Tensor, qk: Tensor, A: Tensor, bias: Tensor, *, bound: float | None = None
) -> DeltaGates:
    return delta_gates(
        f, b, qk, A_G=A, bias_G=bias, decay_bound=bound, beta_scale=2.0, norm_eps=1e-6
    )


def random_gates(num_tokens: int, num_decays: int, num_heads: int, key_dim: int) -> list[Tensor]:
    return [
        torch.randn(num_tokens, num_decays) * 4,
        torch.randn(num_tokens, num_heads) * 4,
        torch.randn(num_tokens, 2 * num_heads, key_dim),
        torch.rand(num_decays) * 3,
        torch.randn(num_decays),
    ]


@EACH_BOUND
@given(
    num_decays=st.sampled_from([1, 4, 8, 40, 77]),
    num_heads=st.integers(1, 9),
    key_dim=st.sampled_from([1, 8, 13, 64]),
)
@settings(max_examples=20)
def test_delta_gates_are_their_formulas(
    bound: float | None, num_decays: int, num_heads: int, key_dim: int
) -> None:
    f, b, qk, A, bias = random_gates(11, num_decays, num_heads, key_dim)
    gates = gates_of(f, b, qk, A, bias, bound=bound)
    biased = (f + bias).double()
    if bound is None:
        logs = -A.double() * softplus(f + bias)
    else:
        logs = bound * torch.sigmoid(biased * A.double())
    # An error of the logarithm is one of the decay: a few 2^-24 of |log|.
    error = (gates.decay_TG.double() / logs.exp() - 1).abs()
    assert (error < 4e-7 * (1 + logs.abs())).all()
    beta = 2 * torch.sigmoid(b.double())
    assert ((gates.beta_TH.double() / beta - 1).abs() < 5e-7).all()
    scale = (qk.double().square().sum(2) + 1e-6).rsqrt()
    scale[:, :num_heads] *= key_dim**-0.5
    assert ((gates.scale_Th.double() / scale - 1).abs() < 5e-7).all()


def test_the_logarithm_of_a_small_gate_keeps_its_precision() -> None:
    dt = torch.linspace(-87, 90, 5001)[:, None].contiguous()
    _, size = step_sizes(dt, A_H=torch.ones(1), bias_H=torch.zeros(1), limit=NO_LIMIT)
    assert ((size.double() / softplus(dt) - 1).abs() < 4e-7).all()


@given(num_heads=st.integers(1, 40), num_tokens=st.integers(0, 9))
@settings(max_examples=20)
def test_step_sizes_are_their_formulas(num_heads: int, num_tokens: int) -> None:
    dt, A, bias = torch.randn(num_tokens, num_heads + 3), torch.rand(num_heads) * 9, torch.randn(1)
    bias = bias.repeat(num_heads)
    decay, size = step_sizes(dt[:, 1:-2], A_H=A, bias_H=bias, limit=(0.3, 1.1))
    wanted = softplus(dt[:, 1:-2] + bias).clamp(0.3, 1.1)
    torch.testing.assert_close(size.double(), wanted, rtol=5e-7, atol=0.0)
    torch.testing.assert_close(decay.double(), (-A * wanted).exp(), rtol=1e-5, atol=0.0)


@EACH_ACTIVATION
@EACH_ORDER
@given(num_groups=st.integers(1, 5), size=st.sampled_from([1, 7, 8, 24, 128]))
@settings(max_examples=20)
def test_gated_norms_are_their_formulas(
    activation: Activation, order: Order, num_groups: int, size: int
) -> None:
    weight, width = torch.randn(num_groups, size), num_groups * size
    y, gate = torch.randn(9, width), torch.randn(9, width + 7)[:, 3:-4]

    def normed(x: Tensor) -> Tensor:
        groups = x.reshape(9, num_groups, size)
        scale = (groups.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (groups * scale * weight.double()).flatten(1)

    gated = torch.sigmoid(gate.double()) * (gate.double() if activation == "silu" else 1.0)
    wanted = normed(y.double()) * gated if order == "norm_first" else normed(y.double() * gated)
    gate_rows(y, gate, activation=activation, order=order, weight_NM=weight, eps=1e-5)
    torch.testing.assert_close(y.double(), wanted, rtol=3e-6, atol=1e-7)


@EACH_BOUND
def test_a_row_of_delta_gates_has_its_bits_alone_and_on_any_threads(bound: float | None) -> None:
    f, b, qk, A, bias = random_gates(300, 37, 6, 24)
    whole = gates_of(f, b, qk, A, bias, bound=bound)
    before = torch.get_num_threads()
    try:
        for num_threads, rows in ((3, slice(0, 300)), (2, slice(7, 200)), (1, slice(5, 6))):
            torch.set_num_threads(num_threads)
            gates = gates_of(f[rows], b[rows], qk[rows], A, bias, bound=bound)
            assert torch.equal(gates.decay_TG, whole.decay_TG[rows])
            assert torch.equal(gates.beta_TH, whole.beta_TH[rows])
            assert torch.equal(gates.scale_Th, whole.scale_Th[rows])
    finally:
        torch.set_num_threads(before)


@EACH_ORDER
def test_a_gated_row_has_its_bits_alone_and_on_any_threads(order: Order) -> None:
    weight, y, gate = torch.randn(4, 50), torch.randn(100, 200), torch.randn(100, 200)
    whole = y.clone()
    gate_rows(whole, gate, activation="silu", order=order, weight_NM=weight, eps=1e-6)
    before = torch.get_num_threads()
    try:
        for num_threads, rows in ((3, slice(0, 100)), (2, slice(7, 60)), (1, slice(5, 6))):
            torch.set_num_threads(num_threads)
            own = y[rows].clone()
            gate_rows(own, gate[rows], activation="silu", order=order, weight_NM=weight, eps=1e-6)
            assert torch.equal(own, whole[rows])
    finally:
        torch.set_num_threads(before)


def test_nothing_is_read_or_written_past_an_end() -> None:
    tensors = random_gates(5, 13, 3, 7)
    wanted = gates_of(*tensors)
    with guarded(*tensors) as fenced:
        assert torch.equal(gates_of(*fenced).decay_TG, wanted.decay_TG)
    y, gate, weight = torch.randn(5, 26), torch.randn(5, 26), torch.randn(2, 13)
    stands, written = inside(y)
    with guarded(gate, weight) as (fenced_gate, fenced_weight):
        gate_rows(
            written,
            fenced_gate,
            activation="silu",
            order="norm_first",
            weight_NM=fenced_weight,
            eps=1e-6,
        )
    gate_rows(y, gate, activation="silu", order="norm_first", weight_NM=weight, eps=1e-6)
    assert stands()
    assert torch.equal(written, y)


def test_gates_far_from_0_end_where_they_should_and_a_nan_stays() -> None:
    dt = torch.tensor([[torch.nan], [torch.inf], [-torch.inf], [-1e30], [1e30]])
    decay, size = step_sizes(dt, A_H=torch.ones(1), bias_H=torch.zeros(1), limit=NO_LIMIT)
    assert size[0].isnan()
    assert decay[0].isnan()
    assert size[1:, 0].tolist() == [torch.inf, 0.0, 0.0, pytest.approx(1e30)]
    assert decay[1:, 0].tolist() == [0.0, 1.0, 1.0, 0.0]
