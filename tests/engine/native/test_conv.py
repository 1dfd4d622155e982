"""The convolution against torch's in float64, and the bits of every cut."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.native.conv import UNIT_ROWS, ConvPiece, convolve
from tests.engine.native.margins import guarded, inside


def convolved(rows: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    piece = ConvPiece(start=0, stop=len(rows), before_WC=before)
    return convolve(rows, [piece], weight, bias, has_silu=True)


@given(
    width=st.integers(2, 5),
    num_channels=st.sampled_from([1, 7, 8, 37, 520, 1030]),
    num_rows=st.sampled_from([1, 2, 3, UNIT_ROWS, UNIT_ROWS + 1, 80]),
    has_bias=st.booleans(),
    has_silu=st.booleans(),
)
@settings(max_examples=40)
def test_it_is_a_depthwise_convolution_over_the_past(
    width: int, num_channels: int, num_rows: int, has_bias: bool, has_silu: bool
) -> None:
    weight, rows = torch.randn(width, num_channels), torch.randn(num_rows, num_channels)
    before = torch.randn(width - 1, num_channels)
    bias = torch.randn(num_channels) if has_bias else None
    piece = ConvPiece(start=0, stop=num_rows, before_WC=before)
    out = convolve(rows, [piece], weight, bias, has_silu=has_silu)
    seen, kernel = torch.cat([before, rows]).double().T[None], weight.double().T.unsqueeze(1)
    wide_bias = None if bias is None else bias.double()
    wanted = torch.conv1d(seen, kernel, wide_bias, groups=num_channels)[0].T
    if has_silu:
        wanted = torch.nn.functional.silu(wanted)
    torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=2e-6)


@given(at=st.sets(st.integers(1, 99), max_size=5))
@settings(max_examples=30)
def test_any_cut_keeps_the_bits(at: set[int]) -> None:
    weight, before, rows = torch.randn(4, 37), torch.randn(3, 37), torch.randn(100, 37)
    whole = convolved(rows, before, weight)
    seen = torch.cat([before, rows])
    for start, stop in pairwise([0, *sorted(at), 100]):
        piece = convolved(rows[start:stop], seen[start : start + 3].clone(), weight)
        assert torch.equal(piece, whole[start:stop])


def test_pieces_beside_each_other_see_their_own_rows_alone() -> None:
    weight, rows = torch.randn(4, 50), torch.randn(60, 50)
    befores = torch.randn(3, 3, 50).unbind()
    cuts = [(2, 3), (3, 40), (41, 60)]
    pieces = [
        ConvPiece(start=start, stop=stop, before_WC=before)
        for (start, stop), before in zip(cuts, befores, strict=True)
    ]
    out = convolve(rows, pieces, weight, None, has_silu=True)
    for (start, stop), before in zip(cuts, befores, strict=True):
        assert torch.equal(out[start:stop], convolved(rows[start:stop], before, weight))


def test_threads_and_strides_change_no_bit() -> None:
    weight, bias, before = torch.randn(4, 600), torch.randn(600), torch.randn(3, 600)
    rows = torch.randn(90, 611)[:, 5:605]
    num_threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(convolved(rows, before, weight, bias))
    finally:
        torch.set_num_threads(num_threads)
    results.append(convolved(rows.contiguous(), before, weight, bias))
    for out in results[1:]:
        assert torch.equal(out, results[0])


@pytest.mark.parametrize("num_channels", [5, 8, 513])
def test_nothing_is_read_past_an_end(num_channels: int) -> None:
    tensors = (
        torch.randn(9, num_channels),
        torch.randn(3, num_channels),
        torch.randn(4, num_channels),
        torch.randn(num_channels),
    )
    wanted = convolved(*tensors)
    with guarded(*tensors) as fenced:
        assert torch.equal(convolved(*fenced), wanted)


def test_what_is_not_a_number_stays_in_its_channel_and_window() -> None:
    weight, before = torch.rand(4, 20), torch.randn(3, 20)
    for number in (torch.nan, torch.inf):
        _, rows = inside(torch.randn(30, 20))
        rows[10, 7] = number
        out = convolved(rows, before, weight)
        assert not out[10:14, 7].isfinite().any()
        out[10:14, 7] = 0.0
        assert out.isfinite().all()


def test_no_rows_give_none() -> None:
    assert convolved(torch.empty(0, 8), torch.zeros(3, 8), torch.ones(4, 8)).shape == (0, 8)
