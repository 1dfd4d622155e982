"""Rotary embeddings against their formula in float64, and tables that never change a row."""

import math

import pytest
import torch
from torch import Tensor

from prfaas.engine.rope import (
    TABLE_STEP_TOKENS,
    RopeTable,
    attention_factor,
    inverse_frequencies,
    pair_order,
    rotate,
)
from prfaas.engine.rope_spec import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from prfaas.errors import ConfigError
from tests.engine.second_device import second_device

LLAMA3 = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192
)


def test_rotation_equals_complex_multiplication() -> None:
    head_dim, num_tokens = 32, 2100
    spec = RopeSpec(theta=1e4)
    positions = torch.arange(num_tokens)
    x = torch.randn(num_tokens, 3, head_dim)
    order = pair_order(head_dim, spec)
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


def turned(x: Tensor, spec: RopeSpec) -> Tensor:
    """The checkpoint's order in and out."""
    num_tokens, _, head_dim = x.shape
    order = pair_order(head_dim, spec)
    out = torch.empty_like(x)
    turns = RopeTable(spec, head_dim).at(torch.arange(num_tokens), num_tokens)
    out[..., order] = rotate(x[..., order], turns)
    return out


def test_a_part_of_the_head_turns_and_the_rest_stays() -> None:
    x = torch.randn(30, 2, 48)
    ours = turned(x, RopeSpec(theta=1e4, rotary_dim=16))
    assert torch.equal(ours[..., 16:], x[..., 16:])
    alone = turned(x[..., :16].contiguous(), RopeSpec(theta=1e4))
    torch.testing.assert_close(ours[..., :16], alone, rtol=0, atol=1e-6)
    assert not torch.equal(ours[1:, :, :16], x[1:, :, :16])


def test_neighbours_turn_as_halves_do_in_another_order() -> None:
    x = torch.randn(30, 2, 32)
    halves = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
    ours = turned(x, RopeSpec(theta=1e4, pairs="neighbours"))
    expected = turned(halves, RopeSpec(theta=1e4))
    torch.testing.assert_close(
        torch.cat([ours[..., ::2], ours[..., 1::2]], dim=-1), expected, rtol=0, atol=1e-6
    )
    assert torch.equal(pair_order(32, RopeSpec(theta=1e4, pairs="neighbours")), torch.arange(32))
    assert torch.equal(pair_order(32, None), torch.arange(32))


YARNS = [
    YarnScaling(factor=32.0, original_context_tokens=4096, is_truncated=False),
    YarnScaling(factor=40.0, original_context_tokens=4096, mscale=1.0, mscale_all_dim=0.7),
    YarnScaling(factor=4.0, original_context_tokens=32768, beta_fast=16.0, beta_slow=2.0),
    YarnScaling(factor=1.0, original_context_tokens=1 << 30),
    YarnScaling(
        factor=8.0,
        original_context_tokens=4096,
        attention_factor=0.75,
        mscale=1.0,
        mscale_all_dim=0.7,
    ),
]


@pytest.mark.parametrize("scaling", YARNS)
def test_yarn_is_transformers(scaling: YarnScaling) -> None:
    llama = pytest.importorskip("transformers").LlamaConfig(
        head_dim=64,
        max_position_embeddings=int(scaling.factor * scaling.original_context_tokens),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_context_tokens,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.is_truncated,
            "attention_factor": scaling.attention_factor,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        },
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](llama, device="cpu")
    spec = RopeSpec(theta=150_000.0, scaling=scaling)
    torch.testing.assert_close(inverse_frequencies(spec, 64), expected, rtol=2e-6, atol=0)
    assert attention_factor(spec) == pytest.approx(factor)
    turns = RopeTable(spec, 64).at(torch.arange(9), 9)
    torch.testing.assert_close(turns.abs(), torch.full((9, 1, 32), factor), rtol=1e-6, atol=0)


def test_yarn_needs_turns_of_different_lengths() -> None:
    with pytest.raises(ConfigError, match="rope_theta is 1:"):
        RopeSpec(theta=1.0, scaling=YARNS[0])


def test_yarns_factor_leaves_dimensions_that_do_not_turn() -> None:
    spec = RopeSpec(theta=1e4, scaling=YARNS[0], rotary_dim=8)
    x = torch.randn(5, 1, 24)
    assert torch.equal(turned(x, spec)[..., 8:], x[..., 8:])


def test_rows_shared_among_threads_keep_their_bits() -> None:
    head_dim, num_heads = 24, 60
    num_tokens = 137
    x = torch.randn(num_tokens, num_heads, head_dim)
    turns = RopeTable(RopeSpec(theta=1e4), head_dim).at(torch.arange(num_tokens), num_tokens)
    alone = torch.cat([rotate(x[row : row + 1], turns[row : row + 1]) for row in range(num_tokens)])
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, 7):
            torch.set_num_threads(count)
            assert torch.equal(rotate(x, turns), alone)
    finally:
        torch.set_num_threads(threads)


def test_a_slice_of_rows_turns_as_a_copy_does() -> None:
    rows, positions = torch.randn(20, 96), torch.arange(20)
    turns = RopeTable(RopeSpec(theta=1e4), 16).at(positions, 20)
    part = rows[:, 32:80].view(20, 3, 16)
    assert torch.equal(rotate(part, turns), rotate(part.contiguous(), turns))


def test_a_turn_is_right_to_the_last_bit() -> None:
    spec, positions = RopeSpec(theta=1e4), torch.arange(0, 5000, 7)
    turns = RopeTable(spec, 64).at(positions, 5000)[:, 0]
    angles = (positions.float()[:, None] * inverse_frequencies(spec, 64)).numpy()
    for row, col in ((0, 0), (1, 0), (3, 5), (100, 31), (700, 2), (714, 0)):
        angle = float(angles[row, col])
        expected = torch.tensor([math.cos(angle), math.sin(angle)])
        assert torch.equal(torch.view_as_real(turns[row, col]), expected)


def test_another_device_turns_as_this_one() -> None:
    spec, positions, x = RopeSpec(theta=1e4), torch.arange(9), torch.randn(9, 3, 24)
    ours = rotate(x, RopeTable(spec, 24).at(positions, 9))
    with second_device() as device:
        there = rotate(x.to(device), RopeTable(spec, 24, device).at(positions.to(device), 9)).cpu()
    torch.testing.assert_close(ours, there, rtol=1e-6, atol=1e-6)
