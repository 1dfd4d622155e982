"""Activations and gates: right within a few ulps, and an element's bits are its own."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.native.activations import (
    ACTIVATIONS,
    SERIAL_ELEMENTS,
    Name,
    activated,
    gated,
    multiply_by_gate,
)
from tests.engine.native.margins import guarded, inside

NAMES = list(ACTIVATIONS)
ULP = 2.0**-23


def gelu(x: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * torch.sigmoid(2 * inner)


def clamped_silu(x: Tensor) -> Tensor:
    low = x.clamp(max=7.0)
    return low * torch.sigmoid(torch.tensor(1.702).double() * low)


REFERENCES: dict[Name, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu_tanh": gelu,
    "relu2": lambda x: x.clamp(min=0.0).square(),
    "clamped_silu": clamped_silu,
    "sigmoid": torch.sigmoid,
}
ULPS: dict[Name, float] = {
    "silu": 2.0,
    "gelu_tanh": 30.0,  # at -6: its exponent, 25, is rounded before it is one
    "relu2": 0.5,
    "clamped_silu": 10.0,
    "sigmoid": 2.0,
}


@pytest.mark.parametrize("name", NAMES)
def test_an_activation_is_its_formula_within_some_ulps(name: Name) -> None:
    x = torch.cat([torch.linspace(-6, 20, 40_001), torch.randn(1000) * 1e-3])
    expected = REFERENCES[name](x.double())
    assert ((activated(name, x) - expected).abs() <= ULPS[name] * ULP * expected.abs()).all()


@pytest.mark.parametrize("name", NAMES)
def test_far_from_zero_nothing_is_but_what_the_formula_says(name: Name) -> None:
    x = torch.tensor([-3e38, -1e4, -200.0, -100.0, -20.0, -0.0, 0.0, 1e-40, 20.0, 100.0, 1e4])
    expected = REFERENCES[name](x.double()).float()
    torch.testing.assert_close(activated(name, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_stays_one_alone_and_infinity_is_no_trap(name: Name) -> None:
    x = torch.randn(20)
    x[3], x[4] = math.nan, math.inf
    y = activated(name, x)
    assert y.isnan().tolist() == x.isnan().tolist()
    assert y[4] == REFERENCES[name](torch.tensor(math.inf).double()).float()
    assert activated("sigmoid", torch.tensor([-math.inf])) == 0.0


@given(
    name=st.sampled_from(NAMES),
    width=st.sampled_from([1, 7, 8, 24, 33, 256]),
    num_rows=st.integers(1, 9),
    data=st.data(),
)
def test_an_element_has_its_own_bits_at_any_place(
    name: Name, width: int, num_rows: int, data: st.DataObject
) -> None:
    gate_up = torch.randn(num_rows, 2 * width + data.draw(st.integers(0, 5)))[:, -2 * width :] * 3
    gate, up = gate_up[:, :width], gate_up[:, width:]
    first, start = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, num_rows - 1))
    columns = slice(first, data.draw(st.integers(first + 1, width)))
    rows = slice(start, data.draw(st.integers(start + 1, num_rows)))
    whole, piece = gated(name, gate_up, 0.7), gate[rows, columns].clone()
    both = torch.cat([piece, up[rows, columns]], dim=1)
    assert torch.equal(gated(name, both, 0.7), whole[rows, columns])
    assert torch.equal(activated(name, piece), activated(name, gate)[rows, columns])
    assert torch.equal(activated(name, piece.flatten()), activated(name, piece).flatten())
    assert torch.equal(activated(name, piece.T), activated(name, piece).T)


@pytest.mark.parametrize("name", NAMES)
def test_a_gate_is_the_activation_times_the_rest(name: Name) -> None:
    gate_up = torch.randn(5, 66) * 6
    gate, up = gate_up.chunk(2, dim=1)
    factor = up.clamp(-7.0, 7.0) + 1.0 if name == "clamped_silu" else up
    assert torch.equal(gated(name, gate_up), activated(name, gate) * factor)
    assert torch.equal(gated(name, gate_up, 0.3), activated(name, gate * 0.3) * factor)


def test_a_gate_is_applied_in_place() -> None:
    rows, gate = torch.randn(5, 40), torch.randn(5, 70)
    out, expected = rows[:, 3:36], rows.clone()
    expected[:, 3:36] *= activated("sigmoid", gate[:, 20:53])
    multiply_by_gate(out, gate[:, 20:53])
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [24, 3000, SERIAL_ELEMENTS + 5])
def test_threads_share_rows_and_leave_their_bits(width: int, threads: int) -> None:
    num_rows = 3 + 4 * SERIAL_ELEMENTS // width
    gate_up = torch.randn(num_rows, 2 * width)
    alone = torch.cat([gated("silu", gate_up[row, None]) for row in range(num_rows)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(gated("silu", gate_up), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)])
def test_nothing_is_activated_to_nothing(shape: tuple[int, ...]) -> None:
    assert activated("silu", torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("width", [1, 7, 24, 33])
def test_nothing_is_touched_outside_of_the_rows(width: int) -> None:
    gate, up = torch.randn(3, width), torch.randn(3, width)
    expected, both = activated("sigmoid", gate) * up, torch.cat([gate, up], dim=1)
    with guarded(gate, up, both) as (gate_, up_, both_):
        assert torch.equal(gated("sigmoid", both_), expected)
        multiply_by_gate(up_, gate_)
        assert torch.equal(up_, expected)
    stand, inner = inside(up)
    multiply_by_gate(inner, gate)
    assert torch.equal(inner, expected)
    assert stand()
