"""Attention against torch's own with an explicit mask, and bits that no cut changes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from prfaas.engine.attention import KEY_BLOCK, KeySpan, attend, attend_steps

SHAPES = [(1, 4, 64), (3, 3, 32), (2, 1, 16)]  # KV heads, query heads of each, head dim
WINDOWS = [None, 1, 16, 128, 200]


class Sequence:
    """Random q, k, v of one sequence; keys past the end are garbage that a mask must hide."""

    def __init__(self, num_tokens: int, shape: tuple[int, int, int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_kv_heads, num_groups, head_dim = shape
        padded = -(-num_tokens // KEY_BLOCK) * KEY_BLOCK
        self.num_tokens = num_tokens
        self.q_THGK = torch.randn(
            num_tokens, num_kv_heads, num_groups, head_dim, generator=generator
        )
        self.k_HCK = torch.randn(num_kv_heads, padded, head_dim, generator=generator)
        self.v_HCK = torch.randn(num_kv_heads, padded, head_dim, generator=generator)
        self.v_HCK[:, num_tokens:] = 1e30

    def span(self, first_key: int) -> KeySpan:
        return KeySpan(self.k_HCK[:, first_key:], self.v_HCK[:, first_key:], first_key)

    def attend(self, start: int, stop: int, window: int | None, first_key: int = 0) -> Tensor:
        out_THGK = torch.empty_like(self.q_THGK[start:stop])
        attend(
            self.q_THGK[start:stop],
            self.span(first_key),
            first_position=start,
            scale=0.3,
            window_tokens=window,
            out_THGK=out_THGK,
        )
        return out_THGK


def reference(sequence: Sequence, window: int | None) -> Tensor:
    num_tokens = sequence.num_tokens
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    if window is not None:
        mask &= ~torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(-window)
    return F.scaled_dot_product_attention(
        sequence.q_THGK.permute(1, 2, 0, 3).double(),
        sequence.k_HCK[:, None, :num_tokens].double(),
        sequence.v_HCK[:, None, :num_tokens].double(),
        attn_mask=mask,
        scale=0.3,
    ).permute(2, 0, 1, 3)


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
    assert torch.equal(torch.cat(pieces), whole)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_steps_have_the_bits_of_a_prefill(data: st.DataObject) -> None:
    window = data.draw(st.sampled_from(WINDOWS), label="window")
    shape = data.draw(st.sampled_from(SHAPES), label="shape")
    lengths = data.draw(st.lists(st.integers(1, 900), min_size=1, max_size=5), label="lengths")
    sequences = [Sequence(length, shape, seed) for seed, length in enumerate(lengths)]
    spans = []
    for sequence in sequences:
        # The buffer of a window layer starts at any block up to the first one still seen.
        seen = 0 if window is None else max(0, sequence.num_tokens - window) // KEY_BLOCK
        spans.append(sequence.span(data.draw(st.integers(0, seen)) * KEY_BLOCK))
    steps_SHGK = attend_steps(
        torch.cat([sequence.q_THGK[-1:] for sequence in sequences]),
        spans,
        [length - 1 for length in lengths],
        scale=0.3,
        window_tokens=window,
    )
    for step_HGK, sequence in zip(steps_SHGK, sequences, strict=True):
        whole_THGK = sequence.attend(0, sequence.num_tokens, window)
        assert torch.equal(step_HGK, whole_THGK[-1])


@pytest.mark.parametrize("window", [16, 200])
def test_a_tile_on_a_cut_buffer_has_the_same_bits(window: int) -> None:
    sequence = Sequence(900, SHAPES[0], seed=1)
    whole = sequence.attend(0, 900, window)
    for start, stop in ((600, 700), (899, 900), (768, 800)):
        first_key = (start - window + 1) // KEY_BLOCK * KEY_BLOCK
        assert torch.equal(sequence.attend(start, stop, window, first_key), whole[start:stop])
