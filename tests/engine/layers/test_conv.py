"""The short convolution against torch's, whole and in pieces."""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prfaas.engine.layers import conv as conv_module
from prfaas.engine.layers.conv import CausalConv
from tests.engine.layers.mixing import cuts

CHANNELS = 37


@pytest.fixture(autouse=True)
def _many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_module, "BLOCK_VALUES", 7 * CHANNELS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=st.integers(2, 5), has_bias=st.booleans(), has_silu=st.booleans())
def test_it_is_a_depthwise_convolution_over_the_past(
    width: int, has_bias: bool, has_silu: bool
) -> None:
    weight, rows = torch.randn(width, CHANNELS), torch.randn(20, CHANNELS)
    before = torch.randn(width - 1, CHANNELS)
    bias = torch.randn(CHANNELS) if has_bias else None
    out, _ = CausalConv(weight, bias, has_silu=has_silu).scan(rows, before)
    kernel = weight.T.unsqueeze(1)
    expected = torch.conv1d(torch.cat([before, rows]).T[None], kernel, bias, groups=CHANNELS)
    if has_silu:
        expected = torch.nn.functional.silu(expected)
    torch.testing.assert_close(out, expected[0].T, atol=2e-6, rtol=2e-6)


@given(at=cuts(max_tokens=70))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cut_gives_the_bits_of_the_whole(at: list[int]) -> None:
    conv = CausalConv(torch.randn(4, CHANNELS), torch.randn(CHANNELS), has_silu=True)
    rows, state = torch.randn(at[-1], CHANNELS), torch.zeros(3, CHANNELS)
    whole, end = conv.scan(rows, state)
    for start, stop in pairwise(at):
        piece, state = conv.scan(rows[start:stop], state)
        assert torch.equal(piece, whole[start:stop])
    assert torch.equal(state, end)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_sequences=st.integers(1, 5))
def test_a_step_of_many_sequences_has_the_bits_of_a_scan_of_each(num_sequences: int) -> None:
    conv = CausalConv(torch.randn(4, CHANNELS), has_silu=True)
    rows = torch.randn(num_sequences, CHANNELS)
    states = [torch.randn(3, CHANNELS) for _ in range(num_sequences)]
    together, after = conv.step(rows, states)
    for index, state in enumerate(states):
        alone, expected = conv.scan(rows[index : index + 1], state)
        assert torch.equal(together[index], alone[0])
        assert torch.equal(after[index], expected)


def test_the_state_is_the_last_rows_as_they_went_in() -> None:
    conv = CausalConv(torch.randn(4, CHANNELS))
    rows = torch.randn(10, CHANNELS)
    zeros = torch.zeros(3, CHANNELS)
    assert torch.equal(conv.scan(rows[:2], zeros)[1], torch.cat([zeros[:1], rows[:2]]))
    assert torch.equal(conv.scan(rows, zeros)[1], rows[7:])


def test_a_state_does_not_keep_the_rows_before_it_in_memory() -> None:
    conv = CausalConv(torch.randn(4, CHANNELS))
    _, state = conv.scan(torch.randn(100, CHANNELS), torch.zeros(3, CHANNELS))
    _, [stepped] = conv.step(torch.randn(1, CHANNELS), [state])
    for tensor in (state, stepped):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
