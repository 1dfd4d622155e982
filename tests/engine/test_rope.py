"""Rotary embeddings against their formula in float64, and tables that never change a row."""

import math

import pytest
import torch

from prfaas.engine.rope import (
    TABLE_STEP_TOKENS,
    RopeTable,
    inverse_frequencies,
    pair_order,
    rotate,
)
from prfaas.engine.rope_spec import LinearScaling, Llama3Scaling, RopeSpec

LLAMA3 = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192
)


def test_rotation_equals_complex_multiplication() -> None:
    head_dim, num_tokens = 32, 2100
    spec = RopeSpec(theta=1e4)
    positions = torch.arange(num_tokens)
    x = torch.randn(num_tokens, 3, head_dim)
    order = pair_order(head_dim)
    rotated = torch.empty_like(x)
    rotated[..., order] = rotate(x[..., order], RopeTable(spec, head_dim).at(positions, num_tokens))
    frequencies = 1e4 ** (-torch.arange(head_dim // 2, dtype=torch.float64) * 2 / head_dim)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None] * frequencies)
    pairs = torch.complex(x[..., :16].double(), x[..., 16:].double()) * turn[:, None]
    expected = torch.cat([pairs.real, pairs.imag], dim=-1)
    torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(rotated[:64].double(), expected[:64], rtol=0, atol=2e-5)


def test_linear_scaling_divides_positions() -> None:
    plain, scaled = RopeSpec(theta=1e6), RopeSpec(theta=1e6, scaling=LinearScaling(factor=8.0))
    torch.testing.assert_close(
        inverse_frequencies(scaled, 64) * 8, inverse_frequencies(plain, 64), rtol=1e-6, atol=0
    )


def test_llama3_scaling_keeps_high_and_stretches_low_frequencies() -> None:
    plain = inverse_frequencies(RopeSpec(theta=5e5), 128)
    scaled = inverse_frequencies(RopeSpec(theta=5e5, scaling=LLAMA3), 128)
    ratio = plain / scaled
    wavelength = 2 * math.pi / plain
    assert torch.all(ratio[wavelength < 8192 / 4] == 1.0)
    torch.testing.assert_close(
        ratio[wavelength > 8192], torch.full_like(ratio[wavelength > 8192], 8.0)
    )
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert torch.all((between > 1.0) & (between < 8.0))
    assert torch.all(ratio.diff() >= -1e-5)


@pytest.mark.parametrize("grown_to", [1, TABLE_STEP_TOKENS + 5, 4 * TABLE_STEP_TOKENS])
def test_a_row_does_not_depend_on_when_the_table_grew(grown_to: int) -> None:
    spec, end = RopeSpec(theta=1e4), 3 * TABLE_STEP_TOKENS + 17
    table, fresh = RopeTable(spec, 32), RopeTable(spec, 32)
    table.at(torch.tensor([0]), grown_to)
    positions = torch.arange(0, end, 13)
    assert torch.equal(table.at(positions, end), fresh.at(positions, end))


def test_a_turned_row_does_not_depend_on_its_neighbours() -> None:
    x, positions = torch.randn(50, 3, 32), torch.arange(50)
    turns = RopeTable(RopeSpec(theta=1e4), 32).at(positions, 50)
    whole = rotate(x, turns)
    for start in range(0, 50, 7):
        for count in (1, 2, 3, 5):
            piece = slice(start, start + count)
            assert torch.equal(rotate(x[piece].clone(), turns[piece].clone()), whole[piece])
