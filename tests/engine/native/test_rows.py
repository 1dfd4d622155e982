"""Norms and turns of rows: right, and the same bits whoever stands beside a row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.native.rows import SERIAL_ELEMENTS, RowNorm, rotate
from tests.engine.native.margins import guarded, inside

WIDTHS = [1, 2, 7, 8, 24, 33, 64, 256, 640, 2048]
EPS = 1e-6
ULP = 2.0**-23


def formula(x: Tensor, weight: Tensor) -> Tensor:
    rms = (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    return x.double() / rms * weight.double()


def turns_of(num_tokens: int, num_pairs: int) -> Tensor:
    return torch.polar(torch.ones(1), torch.randn(num_tokens, 1, num_pairs) * 3)


def product(x_THK: Tensor, turns_T1C: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x_THK.double().reshape(*x_THK.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns_T1C.to(torch.complex128)).flatten(-2)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_is_the_formulas_within_three_ulps(width: int) -> None:
    x, weight = torch.randn(40, width) * 10, torch.randn(width)
    ours, expected = RowNorm(weight, EPS)(x).double(), formula(x, weight)
    assert ((ours - expected).abs() <= 3 * ULP * expected.abs()).all()


@pytest.mark.parametrize("width", [2, 6, 8, 24, 64, 256])
def test_a_turn_is_the_complex_product(width: int) -> None:
    x, turns = torch.randn(40, 3, width), turns_of(40, width // 2)
    pairs = x.double().reshape(40, 3, -1, 2).norm(dim=-1).repeat_interleave(2, dim=-1)
    assert ((rotate(x, turns).double() - product(x, turns)).abs() <= ULP * pairs).all()


def test_a_turn_is_rounded_as_its_docstring_says() -> None:
    (a, b), (c, d) = torch.randn(2, 4096).unbind(), torch.randn(2, 4096).unbind()
    ours = rotate(torch.stack([a, b], dim=-1)[:, None], torch.complex(c, d)[:, None, None])
    minus, plus = (b * d).double(), (a * d).double()
    # A product of float32s is exact in float64; its sum is rounded there once more, which hits
    # a tie of float32 for about one in 2^29.
    expected = torch.stack(
        [a.double() * c.double() - minus, b.double() * c.double() + plus], dim=-1
    )
    assert torch.equal(ours[:, 0], expected.float())


@given(
    width=st.sampled_from([2, 8, 24, 40, 256]),
    num_heads=st.integers(1, 5),
    num_tokens=st.integers(1, 12),
    data=st.data(),
)
def test_a_row_has_its_own_bits_at_any_cut_and_stride(
    width: int, num_heads: int, num_tokens: int, data: st.DataObject
) -> None:
    row_dim = num_heads * width + data.draw(st.integers(0, 9))
    rows = torch.randn(num_tokens, row_dim)
    x_THK = rows[:, row_dim - num_heads * width :].view(num_tokens, num_heads, width)
    turns, norm = turns_of(num_tokens, width // 2), RowNorm(torch.randn(num_heads, width), EPS)
    start = data.draw(st.integers(0, num_tokens - 1))
    part = slice(start, data.draw(st.integers(start + 1, num_tokens)))
    piece, of_part = x_THK[part].clone(), turns[part].clone()
    assert torch.equal(norm(piece), norm(x_THK)[part])
    assert torch.equal(norm.turned(piece, of_part), norm.turned(x_THK, turns)[part])
    assert torch.equal(rotate(piece, of_part), rotate(x_THK, turns)[part])
    assert torch.equal(rotate(norm(x_THK), turns), norm.turned(x_THK, turns))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_rows_and_leave_their_bits(threads: int) -> None:
    width, num_heads = 24, 7
    num_tokens = 4 * SERIAL_ELEMENTS // (width * num_heads) + 1
    x, turns = torch.randn(num_tokens, num_heads, width), turns_of(num_tokens, width // 2)
    norm = RowNorm(torch.randn(num_heads, width), EPS)
    flat = RowNorm(torch.randn(num_heads * width), EPS)
    stream = torch.randn(num_tokens, num_heads * width)
    added, alone = stream.clone(), stream.clone()
    for row in range(num_tokens):
        flat.add_to(alone[row : row + 1], x[row : row + 1].flatten(1), 0.5)
    one_by_one = torch.cat(
        [norm.turned(x[row : row + 1], turns[row : row + 1]) for row in range(num_tokens)]
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(norm.turned(x, turns), one_by_one)
        flat.add_to(added, x.flatten(1), 0.5)
        assert torch.equal(added, alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_sum_is_the_stream_plus_the_scaled_norm(width: int, scale: float) -> None:
    rows, x, weight = torch.randn(6, width + 3), torch.randn(6, width), torch.randn(width)
    stream, norm = rows[:, :width], RowNorm(weight, EPS)
    expected = (stream.double() + norm(x).double() * torch.tensor(scale).double()).float()
    beyond = rows[:, width:].clone()
    norm.add_to(stream, x, scale)
    assert torch.equal(stream, expected)
    assert torch.equal(rows[:, width:], beyond)


def test_zeros_stay_and_what_is_no_number_stays_in_its_row() -> None:
    x = torch.randn(5, 24)
    x[0], x[1, 3], x[2, 5] = 0.0, math.nan, math.inf
    norm = RowNorm(torch.ones(24), EPS)
    normed = norm(x)
    assert torch.equal(normed[0], torch.zeros(24))
    assert normed[1].isnan().all()
    assert normed[2, 5].isnan()
    assert torch.equal(normed[3:], norm(x[3:]))


def test_rows_of_large_and_of_tiny_numbers() -> None:
    norm = RowNorm(torch.ones(64), EPS)
    for size in (1e-30, 1e-10, 1e15):
        x = torch.randn(3, 64) * size
        torch.testing.assert_close(norm(x).double(), formula(x, torch.ones(64)), rtol=1e-6, atol=0)


def test_no_rows_are_normed_and_turned_to_none() -> None:
    norm = RowNorm(torch.ones(2, 8), EPS)
    assert norm(torch.empty(0, 2, 8)).shape == (0, 2, 8)
    assert norm.turned(torch.empty(0, 2, 8), turns_of(0, 4)).shape == (0, 2, 8)
    assert rotate(torch.empty(0, 2, 8), turns_of(0, 4)).shape == (0, 2, 8)


@pytest.mark.parametrize("width", [2, 10, 24, 64, 70])
def test_nothing_is_touched_outside_of_the_rows(width: int) -> None:
    x, weight = torch.randn(3, 2, width), torch.randn(2, width)
    turns, stream = turns_of(3, width // 2), torch.randn(6, width)
    norm, row_norm = RowNorm(weight, EPS), RowNorm(weight[0], EPS)
    expected = stream.clone()
    row_norm.add_to(expected, x.flatten(0, 1), 1.0)
    with guarded(x, weight, torch.view_as_real(turns), stream) as (x_, weight_, turns_, stream_):
        its_turns = torch.view_as_complex(turns_)
        assert torch.equal(RowNorm(weight_, EPS).turned(x_, its_turns), norm.turned(x, turns))
        assert torch.equal(RowNorm(weight_, EPS)(x_), norm(x))
        assert torch.equal(rotate(x_, its_turns), rotate(x, turns))
        RowNorm(weight_[0], EPS).add_to(stream_, x_.flatten(0, 1), 1.0)
        assert torch.equal(stream_, expected)
    margin, inner = inside(stream)
    row_norm.add_to(inner, x.flatten(0, 1), 1.0)
    assert torch.equal(inner, expected)
    assert margin()
