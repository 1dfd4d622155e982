"""Softmax attention whose rows do not depend on how a sequence was cut, on a CPU.

A query's result is the same bits in a whole prefill, in any chunk, as a single decode step, beside
any neighbours and on imported keys: `native/attention.py` says why. Here its work is laid out: tiles
of query rows, and blocks of keys where tiles are few.

A sink is a score without a value: it takes its share of a row's softmax and adds nothing.

Shapes: T query tokens, G query heads of one KV head, H KV heads, C keys, K key dim, V value dim.
"""

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from prfaas.engine.native.attention import attention_kernel
from prfaas.engine.native.attention_unit import (
    KEY_BLOCK,
    MAX_POSITIONS,
    ROWS,
    scratch_floats,
    slot_floats,
)
from prfaas.engine.native.kernel import address

TILE_ROWS = 48
"""Query rows that share a reading of keys and values; with their scores they fit the second cache."""
SPLIT_TILES_PER_THREAD = 8
"""Where there are fewer tiles, threads share the blocks of each."""
MAX_SPLIT_BYTES = 32 << 20
"""Results of blocks that wait for being joined."""
FLOAT_BYTES, INT_BYTES = 4, 8


class Place(NamedTuple):
    """Where the keys and values of a CPU lie, in float32.

    Attributes:
        numbers: native/attention_unit.py's PLACE; position 0 need not exist.
        shape: H, K, V, and the strides of keys and of values between positions.
        first, end: the positions from the one to before the other exist.
    """

    numbers: tuple[int, int, int, int]
    shape: tuple[int, int, int, int, int]
    first: int
    end: int


Parts = tuple[tuple[int, int, int], ...]
"""Position and row of the first query, and the number of queries, of each sequence."""


@dataclass(frozen=True, slots=True)
class KeySpan:
    """The keys and values of one sequence in one layer, from `first_key` on.

    For TorchAttention `first_key` is a multiple of KEY_BLOCK, and the buffers reach to the end of the
    last query's block: what lies past a query is masked, but must be finite.
    """

    keys: Tensor
    """[H, C, K]"""
    values: Tensor
    """[H, C, V]; may be columns of the keys."""
    first_key: int
    place: Place | None = field(init=False)
    """For a CPU's own kernel."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", _place(self.keys, self.values, self.first_key))

    def blocks(self, first_query: int, end: int, window_tokens: int | None) -> "KeySpan":
        """Return the blocks that queries first_query, ..., end - 1 look at; views."""
        low = 0 if window_tokens is None else max(0, first_query - window_tokens + 1)
        low = low // KEY_BLOCK * KEY_BLOCK
        length = -(-end // KEY_BLOCK) * KEY_BLOCK - low
        return KeySpan(
            self.keys.narrow(1, low - self.first_key, length),
            self.values.narrow(1, low - self.first_key, length),
            low,
        )


def _place(keys: Tensor, values: Tensor, first_key: int) -> Place | None:
    tensors = (keys, values)
    if not all(x.is_cpu and x.dtype == torch.float32 and x.stride(2) == 1 for x in tensors):
        return None
    zero_keys, zero_values = (x.data_ptr() - first_key * x.stride(1) * FLOAT_BYTES for x in tensors)
    num_heads, num_keys, key_dim = keys.shape
    assert values.shape[:2] == (num_heads, num_keys)
    return Place(
        (zero_keys, zero_values, keys.stride(0), values.stride(0)),
        (num_heads, key_dim, values.shape[2], keys.stride(1), values.stride(1)),
        first_key,
        first_key + num_keys,
    )


class Queries(NamedTuple):
    """Rows first_row, ... of a batch: tokens that follow each other in a sequence."""

    span: KeySpan
    first_position: int
    first_row: int
    num_tokens: int


class Attending:
    """softmax(scale * q k) v of rows that lie where they lie, whatever the keys.

    What can be checked once is; a call takes no more than a small kernel does.
    """

    def __init__(
        self,
        q_THGK: Tensor,
        out_THGV: Tensor,
        *,
        scale: float,
        window_tokens: int | None,
        sinks_HG: Tensor | None = None,
    ) -> None:
        """Take the queries and where the results go, as `attend` does."""
        num_heads, num_groups, key_dim = q_THGK.shape[1:]
        value_dim = out_THGV.shape[3]
        assert out_THGV.shape[:3] == q_THGK.shape[:3]
        assert q_THGK.dtype == out_THGV.dtype == torch.float32
        assert q_THGK.stride(3) == out_THGV.stride(3) == 1
        if sinks_HG is not None:
            assert sinks_HG.shape == (num_heads, num_groups)
            assert sinks_HG.is_contiguous()
            assert sinks_HG.dtype == torch.float32
        self._tensors = (q_THGK, out_THGV, sinks_HG)  # their memory stays
        self._num_rows = len(q_THGK)
        self._window = window_tokens or MAX_POSITIONS
        self._scale = scale
        self._shape = (num_heads, key_dim, value_dim)
        self._num_groups = num_groups
        self._rows = (
            q_THGK.data_ptr(),
            *q_THGK.stride()[:3],
            out_THGV.data_ptr(),
            *out_THGV.stride()[:3],
            address(sinks_HG),
            sinks_HG is not None,
        )

    def layout(self, parts: Parts) -> "Layout":
        """Return how the work is shared out for these parts, for rows and keys of this shape."""
        num_heads, _, value_dim = self._shape
        threads = torch.get_num_threads()
        return _lay_out(parts, num_heads, self._num_groups, value_dim, self._window, threads)

    @property
    def kind(self) -> tuple[int, ...]:
        """What a layout follows from besides the parts."""
        return (*self._shape, self._num_groups, self._window)

    def __call__(self, places: Sequence[Place], layout: "Layout") -> None:
        """Write the results of the parts that `layout` is of, whose keys lie at `places`."""
        assert layout.num_rows <= self._num_rows
        numbers = _numbers(places, layout, self._shape)
        _, key_dim, value_dim = self._shape
        *_, key_stride, value_stride = places[0].shape
        num_places = len(numbers)
        table = array("q", numbers + [0] * layout.num_counters)
        table_address = table.buffer_info()[0]
        threads = layout.threads
        scratch = threads * scratch_floats(layout.tile_rows, key_dim, value_dim)
        room = _room.of(scratch + layout.num_slots * slot_floats(layout.tile_rows, value_dim))
        attention_kernel()(
            *self._rows,
            table_address,
            layout.sequences.buffer_info()[0],
            len(places),
            layout.num_units,
            table_address + num_places * INT_BYTES,
            room,
            room + scratch * FLOAT_BYTES,
            key_dim,
            value_dim,
            key_stride,
            value_stride,
            self._num_groups,
            self._window,
            layout.tile_rows,
            self._scale,
            threads=min(threads, layout.num_units),
        )


def attend(
    q_THGK: Tensor,
    queries: Sequence[Queries],
    *,
    scale: float,
    window_tokens: int | None,
    out_THGV: Tensor,
    sinks_HG: Tensor | None = None,
) -> None:
    """Write softmax(scale * q k) v of the queries to their rows of `out_THGV`.

    Args:
        q_THGK: float32 with unit stride in K, as is `out_THGV` in V.
        queries: which rows; each sees its own sequence's keys up to itself.
        scale: multiplies q.k.
        window_tokens: how many keys a query sees, itself included; None: all before it.
        out_THGV: where the results go; other rows stay as they are.
        sinks_HG: scores that join the softmax without a value.
    """
    attending = Attending(
        q_THGK, out_THGV, scale=scale, window_tokens=window_tokens, sinks_HG=sinks_HG
    )
    if queries:
        layout = attending.layout(tuple([part[1:] for part in queries]))
        attending([placed(part.span) for part in queries], layout)


def placed(span: KeySpan) -> Place:
    """Return where the keys and values of a span lie."""
    assert span.place is not None, "keys and values are float32 on the CPU, with unit strides"
    return span.place


def _numbers(places: Sequence[Place], layout: "Layout", shape: tuple[int, int, int]) -> list[int]:
    """Return where keys and values lie; the kernel reads wherever it is told."""
    numbers: list[int] = []
    first = places[0].shape
    for place, (low, high) in zip(places, layout.seen, strict=True):
        assert place.shape == first
        assert place.first <= low < high <= place.end, "a key that a query sees is not held"
        numbers += place.numbers
    assert first[:3] == shape, f"keys and values of {first}, queries of {shape}"
    return numbers


class Layout(NamedTuple):
    """The units of work: tiles, or blocks of tiles where there would be few and they are small.

    Attributes:
        sequences: native/attention_unit.py's SEQUENCE of each.
        seen: the positions from the first to the end that some query of each sees.
        num_rows: the batch's, at least.
    """

    sequences: "array[int]"
    seen: list[tuple[int, int]]
    num_rows: int
    tile_rows: int
    num_units: int
    num_slots: int
    num_counters: int
    threads: int


@lru_cache(maxsize=64)
def _lay_out(
    parts: Parts,
    num_heads: int,
    num_groups: int,
    value_dim: int,
    window: int,
    threads: int,
) -> Layout:
    """Return the layout for Queries' positions, rows and tokens; layers of a kind share it."""
    for position, first_row, num_tokens in parts:
        assert position >= 0
        assert first_row >= 0
        assert num_tokens > 0
        assert position + num_tokens <= MAX_POSITIONS
    most_rows = num_groups * max(num_tokens for _, _, num_tokens in parts)
    tile_rows = min(TILE_ROWS, -(-most_rows // ROWS) * ROWS)
    tiles = [num_heads * -(-num_tokens * num_groups // tile_rows) for _, _, num_tokens in parts]
    seen = [(max(0, first - window + 1), first + count) for first, _, count in parts]
    blocks = [(high - 1) // KEY_BLOCK - low // KEY_BLOCK + 1 for low, high in seen]
    split_floats = sum(map(mul, tiles, blocks)) * slot_floats(tile_rows, value_dim)
    is_split = threads > 1 and sum(tiles) < SPLIT_TILES_PER_THREAD * threads
    is_split = is_split and split_floats * FLOAT_BYTES <= MAX_SPLIT_BYTES
    sequences = array("q")
    num_units, num_slots, num_counters = 0, threads, 0
    for part, num_tiles, num_blocks in zip(parts, tiles, blocks, strict=True):
        position, first_row, num_tokens = part
        splits = num_blocks if is_split else 0
        sequences.extend((position, num_tokens * num_groups, first_row))
        sequences.extend((num_units, splits, num_slots, num_counters))
        num_units += num_tiles * max(1, splits)
        num_slots += num_tiles * splits
        num_counters += num_tiles
    num_rows = max(first_row + num_tokens for _, first_row, num_tokens in parts)
    return Layout(sequences, seen, num_rows, tile_rows, num_units, num_slots, num_counters, threads)


class _Room(threading.local):
    """A thread's scratch memory, kept for the next call."""

    def __init__(self) -> None:
        self._floats = torch.empty(0)

    def of(self, num_floats: int) -> int:
        """Return the address of at least so many float32s."""
        if len(self._floats) < num_floats:
            self._floats = torch.empty(num_floats)
        return self._floats.data_ptr()


_room = _Room()
