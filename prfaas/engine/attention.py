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
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from prfaas.engine.native.attention import (
    KEY_BLOCK,
    MAX_POSITIONS,
    ROWS,
    attention_kernel,
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
    """Where the keys and values of a CPU lie, in float32: addresses, and strides in numbers.

    Attributes:
        keys, values: of position 0, which need not exist.
        shape: H, K, V.
        end: positions before it exist.
    """

    keys: int
    values: int
    key_head: int
    value_head: int
    key_stride: int
    value_stride: int
    shape: tuple[int, int, int]
    end: int


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
        keys=zero_keys,
        values=zero_values,
        key_head=keys.stride(0),
        value_head=values.stride(0),
        key_stride=keys.stride(1),
        value_stride=values.stride(1),
        shape=(num_heads, key_dim, values.shape[2]),
        end=first_key + num_keys,
    )


class Queries(NamedTuple):
    """Rows first_row, ... of a batch: tokens that follow each other in a sequence."""

    span: KeySpan
    first_position: int
    first_row: int
    num_tokens: int


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
    num_heads, num_groups, key_dim = q_THGK.shape[1:]
    value_dim = out_THGV.shape[3]
    assert out_THGV.shape[:3] == q_THGK.shape[:3]
    assert q_THGK.dtype == out_THGV.dtype == torch.float32
    assert q_THGK.stride(3) == out_THGV.stride(3) == 1
    if not queries:
        return
    window = window_tokens or MAX_POSITIONS
    shape = (num_heads, key_dim, value_dim)
    for part in queries:
        _check(part, shape, len(q_THGK), window)
    if sinks_HG is not None:
        assert sinks_HG.shape == (num_heads, num_groups)
        assert sinks_HG.is_contiguous()
        assert sinks_HG.dtype == torch.float32
    threads = torch.get_num_threads()
    most_rows = num_groups * max(part.num_tokens for part in queries)
    tile_rows = min(TILE_ROWS, -(-most_rows // ROWS) * ROWS)
    size = slot_floats(tile_rows, value_dim)
    work = _lay_out(queries, shape, num_groups, window, tile_rows, threads, size)
    scratch = threads * scratch_floats(tile_rows, key_dim, value_dim)
    room = _room.of(scratch + work.num_slots * size)
    sequences = work.sequences.buffer_info()[0]
    place = queries[0].span.place
    assert place is not None
    attention_kernel()(
        q_THGK.data_ptr(),
        *q_THGK.stride()[:3],
        out_THGV.data_ptr(),
        *out_THGV.stride()[:3],
        address(sinks_HG),
        sinks_HG is not None,
        sequences,
        len(queries),
        work.num_units,
        sequences + work.counters_at * INT_BYTES,
        room,
        room + scratch * FLOAT_BYTES,
        key_dim,
        value_dim,
        place.key_stride,
        place.value_stride,
        num_groups,
        window,
        tile_rows,
        scale,
        threads=min(threads, work.num_units),
    )


def _check(part: Queries, shape: tuple[int, int, int], num_rows: int, window: int) -> None:
    """The kernel reads and writes wherever it is told."""
    place, end = part.span.place, part.first_position + part.num_tokens
    assert place is not None, "keys and values are float32 on the CPU, without strides"
    assert place.shape == shape, f"keys of {place.shape}, queries of {shape}"
    assert part.num_tokens > 0 <= part.first_row <= num_rows - part.num_tokens
    first_seen = max(0, part.first_position - window + 1)
    assert part.span.first_key <= first_seen < end <= min(place.end, MAX_POSITIONS)


class _Work(NamedTuple):
    """What the kernel is told of its units.

    Attributes:
        sequences: native/attention.py's SEQUENCE of each, and then the counters.
        counters_at: where they begin.
    """

    sequences: "array[int]"
    counters_at: int
    num_units: int
    num_slots: int


def _lay_out(
    queries: Sequence[Queries],
    shape: tuple[int, int, int],
    num_groups: int,
    window: int,
    tile_rows: int,
    threads: int,
    slot_size: int,
) -> _Work:
    """Return the units: tiles, or blocks of tiles where there would be few and they are small."""
    num_heads = shape[0]
    tiles = [num_heads * -(-part.num_tokens * num_groups // tile_rows) for part in queries]
    blocks = [_num_blocks(part, window) for part in queries]
    num_split = sum(map(mul, tiles, blocks))
    is_split = threads > 1 and sum(tiles) < SPLIT_TILES_PER_THREAD * threads
    is_split = is_split and num_split * slot_size * FLOAT_BYTES <= MAX_SPLIT_BYTES
    fields: list[int] = []
    num_units, num_slots, num_counters = 0, threads, 0
    for part, num_tiles, num_blocks in zip(queries, tiles, blocks, strict=True):
        place = part.span.place
        assert place is not None
        fields += (
            *place[:4],
            part.first_position,
            part.num_tokens * num_groups,
            part.first_row,
            num_units,
            num_blocks if is_split else 0,
            num_slots,
            num_counters,
        )
        num_units += num_tiles * (num_blocks if is_split else 1)
        num_slots += num_tiles * num_blocks if is_split else 0
        num_counters += num_tiles
    return _Work(array("q", fields + [0] * num_counters), len(fields), num_units, num_slots)


def _num_blocks(part: Queries, window: int) -> int:
    """Return how many blocks hold what some of the queries see."""
    low = max(0, part.first_position - window + 1)
    return (part.first_position + part.num_tokens - 1) // KEY_BLOCK - low // KEY_BLOCK + 1


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
