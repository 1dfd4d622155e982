"""Attention against its formula in float64, and bits that no cut changes."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.attention import KEY_BLOCK, KeySpan, attend, attend_steps


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_kv_heads: int
    num_groups: int
    head_dim: int
    value_dim: int
    is_latent: bool = False
    """Values are the first columns of the keys."""
    has_sinks: bool = False


SHAPES = [
    Shape(num_kv_heads=1, num_groups=4, head_dim=64, value_dim=64),
    Shape(num_kv_heads=3, num_groups=3, head_dim=32, value_dim=32),
    Shape(num_kv_heads=2, num_groups=1, head_dim=16, value_dim=16),
    Shape(num_kv_heads=2, num_groups=4, head_dim=192, value_dim=128, has_sinks=True),
    Shape(num_kv_heads=1, num_groups=8, head_dim=64, value_dim=64, has_sinks=True),
    Shape(num_kv_heads=1, num_groups=32, head_dim=576, value_dim=512, is_latent=True),
    Shape(num_kv_heads=1, num_groups=3, head_dim=24, value_dim=16, is_latent=True),
]
WINDOWS = [None, 1, 16, 128, 200]


class Sequence:
    """Random q, k, v of one sequence; keys past the end are garbage that a mask must hide."""

    def __init__(self, num_tokens: int, shape: Shape, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        heads, groups = shape.num_kv_heads, shape.num_groups
        padded = -(-num_tokens // KEY_BLOCK) * KEY_BLOCK
        self.num_tokens = num_tokens
        self.scale = 2.4 / shape.head_dim**0.5
        self.q_THGK = torch.randn(num_tokens, heads, groups, shape.head_dim, generator=generator)
        self.k_HCK = torch.randn(heads, padded, shape.head_dim, generator=generator)
        if shape.is_latent:
            self.v_HCV = self.k_HCK[..., : shape.value_dim]
        else:
            self.v_HCV = torch.randn(heads, padded, shape.value_dim, generator=generator)
        self.v_HCV[:, num_tokens:] = 1e10
        # The same in all sequences of a test: a layer has one.
        sinks_HG = 4.0 * torch.arange(heads * groups).sin().view(heads, groups)
        self.sinks_HG = sinks_HG if shape.has_sinks else None

    def span(self, first_key: int) -> KeySpan:
        return KeySpan(self.k_HCK[:, first_key:], self.v_HCV[:, first_key:], first_key)

    def attend(self, start: int, stop: int, window: int | None, first_key: int = 0) -> Tensor:
        out_THGV = self.q_THGK.new_empty(stop - start, *self.q_THGK.shape[1:3], self.v_HCV.shape[2])
        attend(
            self.q_THGK[start:stop],
            self.span(first_key),
            first_position=start,
            scale=self.scale,
            window_tokens=window,
            out_THGV=out_THGV,
            sinks_HG=self.sinks_HG,
        )
        return out_THGV


def reference(sequence: Sequence, window: int | None) -> Tensor:
    """Softmax attention in float64; a sink is one more key, whose value is 0."""
    num_tokens = sequence.num_tokens
    positions = torch.arange(num_tokens)
    unseen = positions > positions[:, None]
    if window is not None:
        unseen |= positions <= positions[:, None] - window
    q, k, v = (x.double() for x in (sequence.q_THGK, sequence.k_HCK, sequence.v_HCV))
    scores = torch.einsum("thgk,hck->hgtc", q, k[:, :num_tokens]) * sequence.scale
    scores.masked_fill_(unseen, float("-inf"))
    if sequence.sinks_HG is not None:
        sinks = sequence.sinks_HG.double()[..., None, None].expand(-1, -1, num_tokens, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., :num_tokens]
    return torch.einsum("hgtc,hcv->thgv", weights, v[:, :num_tokens])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_its_formula(shape: Shape, window: int | None) -> None:
    sequence = Sequence(300, shape, seed=0)
    ours = sequence.attend(0, 300, window)
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
    steps_SHGV = attend_steps(
        torch.cat([sequence.q_THGK[-1:] for sequence in sequences]),
        spans,
        [length - 1 for length in lengths],
        scale=sequences[0].scale,
        window_tokens=window,
        sinks_HG=sequences[0].sinks_HG,
    )
    for step_HGV, sequence in zip(steps_SHGV, sequences, strict=True):
        whole_THGV = sequence.attend(0, sequence.num_tokens, window)
        assert torch.equal(step_HGV, whole_THGV[-1])


@pytest.mark.parametrize("window", [16, 200])
def test_a_tile_on_a_cut_buffer_has_the_same_bits(window: int) -> None:
    sequence = Sequence(900, SHAPES[0], seed=1)
    whole = sequence.attend(0, 900, window)
    for start, stop in ((600, 700), (899, 900), (768, 800)):
        first_key = (start - window + 1) // KEY_BLOCK * KEY_BLOCK
        assert torch.equal(sequence.attend(start, stop, window, first_key), whole[start:stop])


@pytest.mark.parametrize("sink", [-1e30, -300.0, 300.0])
def test_a_sink_takes_nothing_or_all(sink: float) -> None:
    plain, other = (Sequence(200, SHAPES[0], seed=2) for _ in range(2))
    other.sinks_HG = torch.full((1, 4), sink)
    expected = plain.attend(0, 200, None) * float(sink < 0)
    assert torch.equal(other.attend(0, 200, None), expected)


def test_a_tile_of_few_tokens_has_the_bits_of_a_large_one() -> None:
    shape = Shape(num_kv_heads=1, num_groups=2, head_dim=32, value_dim=32)
    many = Shape(num_kv_heads=1, num_groups=400, head_dim=32, value_dim=32)
    few, wide = Sequence(300, shape, seed=0), Sequence(300, many, seed=0)
    wide.k_HCK, wide.v_HCV = few.k_HCK, few.v_HCV
    wide.q_THGK[:, :, :2], wide.scale = few.q_THGK, few.scale
    assert torch.equal(wide.attend(0, 300, None)[:, :, :2], few.attend(0, 300, None))
