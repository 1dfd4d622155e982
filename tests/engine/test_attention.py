"""Attention against its formula in float64, and bits that no cut changes."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine import attention
from prfaas.engine.attention import KeySpan, Queries, attend
from prfaas.engine.native.attention_unit import KEY_BLOCK

NAN, INF = float("nan"), float("inf")


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
    Shape(num_kv_heads=3, num_groups=3, head_dim=32, value_dim=40),
    Shape(num_kv_heads=2, num_groups=1, head_dim=16, value_dim=16),
    Shape(num_kv_heads=2, num_groups=5, head_dim=8, value_dim=72),
    Shape(num_kv_heads=1, num_groups=2, head_dim=6, value_dim=3, has_sinks=True),
    Shape(num_kv_heads=2, num_groups=4, head_dim=192, value_dim=128, has_sinks=True),
    Shape(num_kv_heads=1, num_groups=8, head_dim=72, value_dim=64, has_sinks=True),
    Shape(num_kv_heads=1, num_groups=50, head_dim=576, value_dim=512, is_latent=True),
    Shape(num_kv_heads=1, num_groups=3, head_dim=24, value_dim=16, is_latent=True),
]
WINDOWS = [None, 1, 16, 128, 200]


class Sequence:
    """Random q, k, v of one sequence."""

    def __init__(self, num_tokens: int, shape: Shape, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        heads, groups = shape.num_kv_heads, shape.num_groups
        self.num_tokens = num_tokens
        self.scale = 2.4 / shape.head_dim**0.5
        self.q_THGK = torch.randn(num_tokens, heads, groups, shape.head_dim, generator=generator)
        self.k_HCK = torch.randn(heads, num_tokens, shape.head_dim, generator=generator)
        self.v_HCV = self.k_HCK[..., : shape.value_dim]
        if not shape.is_latent:
            self.v_HCV = torch.randn(heads, num_tokens, shape.value_dim, generator=generator)
        # The same in all sequences of a test: a layer has one.
        sinks_HG = 4.0 * torch.arange(heads * groups).sin().view(heads, groups)
        self.sinks_HG = sinks_HG if shape.has_sinks else None

    def span(self, first_key: int = 0, end: int | None = None) -> KeySpan:
        """What a query needs, and not a key more; the others are NaN here."""
        end = self.num_tokens if end is None else end
        k_HCK, v_HCV = self.k_HCK.clone(), self.v_HCV.clone()
        if self.v_HCV.data_ptr() == self.k_HCK.data_ptr():
            v_HCV = k_HCK[..., : v_HCV.shape[2]]
        for x in (k_HCK, v_HCV):
            x[:, :first_key] = NAN
            x[:, end:] = NAN
        return KeySpan(k_HCK[:, first_key:end], v_HCV[:, first_key:end], first_key)

    def attend(
        self, cuts: list[tuple[int, int]], window: int | None, span: KeySpan | None = None
    ) -> Tensor:
        """The rows of these queries, all in one call; NaN in those of others."""
        span = span or self.span()
        out_THGV = torch.full((*self.q_THGK.shape[:3], self.v_HCV.shape[2]), NAN)
        attend(
            self.q_THGK,
            [Queries(span, start, start, stop - start) for start, stop in cuts],
            scale=self.scale,
            window_tokens=window,
            out_THGV=out_THGV,
            sinks_HG=self.sinks_HG,
        )
        return out_THGV

    def whole(self, window: int | None) -> Tensor:
        return self.attend([(0, self.num_tokens)], window)


def reference(sequence: Sequence, window: int | None) -> Tensor:
    """Softmax attention in float64; a sink is one more key, whose value is 0."""
    num_tokens = sequence.num_tokens
    positions = torch.arange(num_tokens)
    unseen = positions > positions[:, None]
    if window is not None:
        unseen |= positions <= positions[:, None] - window
    q, k, v = (x.double() for x in (sequence.q_THGK, sequence.k_HCK, sequence.v_HCV))
    scores = torch.einsum("thgk,hck->hgtc", q, k) * sequence.scale
    scores.masked_fill_(unseen, -INF)
    if sequence.sinks_HG is not None:
        sinks = sequence.sinks_HG.double()[..., None, None].expand(-1, -1, num_tokens, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., :num_tokens]
    return torch.einsum("hgtc,hcv->thgv", weights, v)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_its_formula(shape: Shape, window: int | None) -> None:
    sequence = Sequence(280, shape, seed=0)
    ours = sequence.whole(window)
    torch.testing.assert_close(ours.double(), reference(sequence, window), rtol=1e-5, atol=1e-5)


def test_a_long_sequence_is_as_exact() -> None:
    sequence = Sequence(3000, SHAPES[2], seed=0)
    ours = sequence.attend([(2990, 3000)], None)[2990:]
    expected = reference(sequence, None)[2990:]
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_cut_and_no_thread_changes_a_bit(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(2, 500), label="tokens")
    window = data.draw(st.sampled_from(WINDOWS), label="window")
    shape = data.draw(st.sampled_from(SHAPES), label="shape")
    cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens - 1), max_size=5), label="cuts"))
    pieces = list(pairwise([0, *cuts, num_tokens]))
    sequence = Sequence(num_tokens, shape, seed=data.draw(st.integers(0, 3)))
    with threads(1):
        whole = sequence.whole(window)
    with threads(data.draw(st.integers(1, 3), label="threads")):
        assert torch.equal(sequence.attend(pieces, window), whole)
        for start, stop in pieces:
            piece = sequence.attend([(start, stop)], window)[start:stop]
            assert torch.equal(piece, whole[start:stop])


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_steps_have_the_bits_of_a_prefill_beside_any_others(data: st.DataObject) -> None:
    """Each on buffers that begin and end anywhere around what it sees."""
    window = data.draw(st.sampled_from(WINDOWS), label="window")
    shape = data.draw(st.sampled_from(SHAPES), label="shape")
    lengths = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=5), label="lengths")
    sequences = [Sequence(length, shape, seed) for seed, length in enumerate(lengths)]
    queries, rows, first_row = [], [], 0
    for sequence in sequences:
        last = sequence.num_tokens
        num_tokens = data.draw(st.sampled_from([1, 1, min(2, last), min(70, last)]))
        seen = 0 if window is None else max(0, last - num_tokens - window + 1)
        span = sequence.span(data.draw(st.integers(0, seen)), last)
        queries.append(Queries(span, last - num_tokens, first_row, num_tokens))
        rows.append(sequence.q_THGK[last - num_tokens :])
        first_row += num_tokens
    # As in a layer: a head's query is a slice of a wider row; another row is nobody's.
    wide = torch.cat([*rows, rows[0][:1]]).flatten(1)
    wide = torch.nn.functional.pad(wide, (7, 5), value=NAN)
    q_THGK = wide[:, 7:-5].view(-1, *rows[0].shape[1:])
    out_THVG = torch.zeros(first_row + 1, *rows[0].shape[1:3], shape.value_dim + 1)
    with threads(data.draw(st.integers(1, 3), label="threads")):
        attend(
            q_THGK,
            data.draw(st.permutations(queries)),
            scale=sequences[0].scale,
            window_tokens=window,
            out_THGV=out_THVG[..., :-1],
            sinks_HG=sequences[0].sinks_HG,
        )
    assert (out_THVG[..., -1] == 0).all()
    assert (out_THVG[-1] == 0).all()
    for part, sequence in zip(queries, sequences, strict=True):
        ours = out_THVG[part.first_row : part.first_row + part.num_tokens, ..., :-1]
        with threads(1):
            assert torch.equal(ours, sequence.whole(window)[part.first_position :])


@pytest.mark.parametrize("tile_rows", [4, 12, 96])
@pytest.mark.parametrize("split_tiles", [0, 1000])
def test_no_layout_changes_a_bit(
    monkeypatch: pytest.MonkeyPatch, tile_rows: int, split_tiles: int
) -> None:
    sequence = Sequence(400, SHAPES[1], seed=0)
    whole = sequence.whole(200)
    monkeypatch.setattr(attention, "TILE_ROWS", tile_rows)
    monkeypatch.setattr(attention, "SPLIT_TILES_PER_THREAD", split_tiles)
    monkeypatch.setattr(attention, "_lay_out", attention._lay_out.__wrapped__)
    with threads(2):
        assert torch.equal(sequence.whole(200), whole)


@pytest.mark.parametrize("sink", [-1e30, -300.0, 300.0])
def test_a_sink_takes_nothing_or_all(sink: float) -> None:
    plain, other = (Sequence(200, SHAPES[0], seed=2) for _ in range(2))
    other.sinks_HG = torch.full((1, 4), sink)
    expected = plain.whole(None) * float(sink < 0)
    assert torch.equal(other.whole(None), expected)


def test_scores_of_any_size_weigh() -> None:
    """Differences of hundreds between blocks neither overflow nor become a NaN."""
    sequence = Sequence(400, SHAPES[0], seed=0)
    sequence.k_HCK *= torch.linspace(0, 3000, 400).cos()[:, None] * 200
    torch.testing.assert_close(
        sequence.whole(None).double(), reference(sequence, None), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("part", ["q", "k"])
def test_what_is_not_finite_is_one_rows_own(part: str, bad: float) -> None:
    sequence = Sequence(300, SHAPES[0], seed=0)
    whole = sequence.whole(16)
    if part == "q":
        sequence.q_THGK[200, 0, 1, 3] = bad
    else:
        sequence.k_HCK[0, 200, 3] = bad
    spoilt = sequence.whole(16)
    same = (spoilt == whole).all(dim=3)[:, 0]
    expected = torch.ones(300, 4, dtype=torch.bool)
    if part == "q":
        expected[200, 1] = False
        assert spoilt[200, 0, 1].isnan().all()
    else:
        expected[200:216] = False
    assert torch.equal(same | ~expected, torch.ones_like(same))
    assert not same[200].all()


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_past_the_buffers_is_read(shape: Shape, window: int | None) -> None:
    """Each ends, or begins, where memory may not be touched."""
    sequence = Sequence(150, shape, seed=0)
    expected = sequence.whole(window)
    first_key = 0 if window is None else 150 - 20 - window + 1
    for is_end in (True, False):
        keys = guarded(sequence.k_HCK[:, first_key:], is_end)
        values = keys[..., : shape.value_dim]
        if not shape.is_latent:
            values = guarded(sequence.v_HCV[:, first_key:], is_end)
        other = Sequence(150, shape, seed=0)
        other.q_THGK = guarded(sequence.q_THGK, is_end)
        with threads(2):
            for cuts in ([(130, 150)], [(149, 150)]):
                rows = slice(*cuts[0])
                ours = other.attend(cuts, window, KeySpan(keys, values, first_key))
                assert torch.equal(ours[rows], expected[rows])


_guarded: list[mmap.mmap] = []


def guarded(x: Tensor, is_end: bool) -> Tensor:
    """A copy between two pages that may not be touched, close to one of them."""
    num_bytes = x.numel() * 4
    inner = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = mmap.mmap(-1, inner + 2 * mmap.PAGESIZE)
    _guarded.append(room)  # never given back: its ends stay guarded
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (start, start + mmap.PAGESIZE + inner):
        assert libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0
    offset = mmap.PAGESIZE + (inner - num_bytes if is_end else 0)
    copy = torch.frombuffer(room, dtype=torch.float32, offset=offset, count=x.numel()).view(x.shape)
    copy.copy_(x)
    return copy


def test_what_the_kernel_could_not_read_is_refused() -> None:
    sequence = Sequence(300, SHAPES[0], seed=0)
    for span in (
        sequence.span(0, 299),
        sequence.span(290, 300),
        KeySpan(sequence.k_HCK.double(), sequence.v_HCV.double(), 0),
        KeySpan(sequence.k_HCK[..., ::2], sequence.v_HCV[..., ::2], 0),
        KeySpan(sequence.k_HCK[..., 1:], sequence.v_HCV, 0),
    ):
        with pytest.raises(AssertionError):
            sequence.attend([(299, 300)], 16, span)
    with pytest.raises(AssertionError):
        sequence.attend([(0, 301)], 16)
    with pytest.raises(AssertionError):
        sequence.attend([(-1, 2)], 16)


def test_no_queries_are_no_work() -> None:
    assert Sequence(3, SHAPES[0], seed=0).attend([], None).isnan().all()


def test_blocks_are_those_of_the_grid() -> None:
    span = KeySpan(torch.zeros(1, 1024, 8), torch.zeros(1, 1024, 8), KEY_BLOCK)
    seen = span.blocks(600, 610, 200)
    assert (seen.first_key, seen.keys.shape[1]) == (384, 256)


def test_values_may_be_columns_of_wider_keys() -> None:
    shape = SHAPES[-1]
    sequence = Sequence(90, shape, seed=0)
    apart = Sequence(90, replace(shape, is_latent=False), seed=0)
    apart.v_HCV = sequence.v_HCV.clone()
    assert torch.equal(sequence.whole(None), apart.whole(None))
