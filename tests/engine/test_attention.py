"""Attention against torch's own with an explicit mask, and bits that no cut changes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from prfaas.engine.attention import KEY_BLOCK, attend

SHAPES = [(1, 4, 64), (3, 3, 32), (2, 1, 16)]  # KV heads, query heads of each, head dim
WINDOWS = [None, 1, 16, 128, 200]


class Sequence:
    """Random q, k, v of one sequence; keys past the end are garbage that a mask must hide."""

    def __init__(self, num_tokens: int, shape: tuple[int, int, int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_kv_heads, num_groups, head_dim = shape
        self.num_groups, self.num_tokens = num_groups, num_tokens
        padded = -(-num_tokens // KEY_BLOCK) * KEY_BLOCK
        self.q_HTGK = torch.randn(
            num_kv_heads, num_tokens, num_groups, head_dim, generator=generator
        )
        self.k_HCK = torch.randn(num_kv_heads, padded, head_dim, generator=generator)
        self.v_HCK = torch.randn(num_kv_heads, padded, head_dim, generator=generator)
        self.v_HCK[:, num_tokens:] = 1e30

    def attend(self, start: int, stop: int, window: int | None, first_key: int = 0) -> Tensor:
        out_HRK = attend(
            self.q_HTGK[:, start:stop].flatten(1, 2),
            self.k_HCK[:, first_key:],
            self.v_HCK[:, first_key:],
            num_groups=self.num_groups,
            first_position=start,
            first_key=first_key,
            scale=0.3,
            window_tokens=window,
        )
        return out_HRK.view(len(out_HRK), stop - start, self.num_groups, -1)


def reference(sequence: Sequence, window: int | None) -> Tensor:
    num_tokens = sequence.num_tokens
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    if window is not None:
        mask &= ~torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(-window)
    return F.scaled_dot_product_attention(
        sequence.q_HTGK.transpose(1, 2).double(),
        sequence.k_HCK[:, None, :num_tokens].double(),
        sequence.v_HCK[:, None, :num_tokens].double(),
        attn_mask=mask,
        scale=0.3,
    ).transpose(1, 2)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_torchs(shape: tuple[int, int, int], window: int | None) -> None:
    sequence = Sequence(400, shape, seed=0)
    ours = sequence.attend(0, 400, window)
    torch.testing.assert_close(ours.double(), reference(sequence, window), rtol=1e-5, atol=1e-5)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_cut_changes_a_bit(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(2, 700), label="tokens")
    window = data.draw(st.sampled_from(WINDOWS), label="window")
    shape = data.draw(st.sampled_from(SHAPES), label="shape")
    cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens - 1), max_size=5), label="cuts"))
    sequence = Sequence(num_tokens, shape, seed=data.draw(st.integers(0, 3)))
    whole = sequence.attend(0, num_tokens, window)
    pieces = [
        sequence.attend(start, stop, window) for start, stop in pairwise([0, *cuts, num_tokens])
    ]
    assert torch.equal(torch.cat(pieces, dim=1), whole)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_single_steps_over_a_window_that_moved_give_the_same_bits(data: st.DataObject) -> None:
    window = data.draw(st.sampled_from([1, 16, 128, 200]))
    shape = data.draw(st.sampled_from(SHAPES))
    sequence = Sequence(900, shape, seed=1)
    whole = sequence.attend(0, 900, window)
    for position in data.draw(st.lists(st.integers(0, 899), min_size=1, max_size=6)):
        first_seen = max(0, position - window + 1) // KEY_BLOCK * KEY_BLOCK
        first_key = data.draw(st.sampled_from(range(0, first_seen + 1, KEY_BLOCK)))
        step = sequence.attend(position, position + 1, window, first_key)
        assert torch.equal(step, whole[:, position : position + 1])
