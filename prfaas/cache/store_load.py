"""What a generation holds when it is opened: what is whole is taken over, the rest reclaimed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
import numpy.typing as npt

from prfaas.cache.pool import PageKey
from prfaas.cache.segment_account import Segment, SegmentAccount
from prfaas.cache.segments import SegmentFiles
from prfaas.cache.store_scan import tables

Rows = npt.NDArray[np.void]
"""Entries of the index, by the names that `_row_type` gives their fields."""


@dataclass(slots=True, kw_only=True)
class Loaded:
    """The state of a generation, its segments and its index in step."""

    where: dict[PageKey, Segment] = field(default_factory=dict)
    account: SegmentAccount = field(default_factory=SegmentAccount)
    stale: set[PageKey] = field(default_factory=set)
    """Keys whose index entry names bytes that are not there."""
    next_number: int = 1
    """The first segment number that nobody ever used."""


def load(files: SegmentFiles, entries: bytes, now_s: float) -> Loaded:
    """Return what is there, after cutting tails and deleting segments that no record names.

    `entries` is what `renew_index` returned. Raises OSError.
    """
    sizes = files.sizes()
    loaded = Loaded(next_number=max(sizes, default=0) + 1)
    found: dict[int, Segment] = {}
    for rows in _in_order_of_files(entries):
        loaded.next_number = max(loaded.next_number, int(rows["segment"][-1]) + 1)
        for number, named in _by_segment(rows):
            is_whole = named["offset"] + named["length"] <= sizes.get(number, 0)
            loaded.stale.update(_keys(named[~is_whole]))
            part = named[is_whole]
            if not len(part):
                continue
            segment = found.get(number)
            if segment is None:
                segment = found[number] = Segment(
                    number=number,
                    tenant=part["tenant"][0].tobytes()[: part["tenant_bytes"][0]],
                    created_s=now_s,
                    used_s=min(now_s, files.used_s(number)),
                )
            segment.created_s = min(segment.created_s, float(part["created_s"].min()))
            segment.size_bytes = max(
                segment.size_bytes, int((part["offset"] + part["length"]).max())
            )
            segment.live_bytes += int(part["length"].sum(dtype=np.int64))
            keys = _keys(part)
            segment.keys += keys
            loaded.where.update(zip(keys, repeat(segment)))
    for number, size_bytes in sizes.items():
        if number not in found:
            files.remove(number)
        elif size_bytes > found[number].size_bytes:
            files.truncate(number, found[number].size_bytes)
    for segment in found.values():
        loaded.account.add(segment)
    return loaded


def _in_order_of_files(entries: bytes) -> list[Rows]:
    """Return the entries, one table for each length of names.

    The order of the files is that of prompts: so the keys of neighbouring blocks will lie side by
    side in memory, and asking for all blocks of a prompt is five times as fast.
    """
    parts: dict[int, list[memoryview]] = {}
    for name_bytes, table in tables(entries):
        parts.setdefault(name_bytes, []).append(table)
    ordered = []
    for name_bytes, found in parts.items():
        rows = np.frombuffer(b"".join(found), dtype=_row_type(name_bytes))
        ordered.append(rows[np.lexsort((rows["offset"], rows["segment"]))])
    return ordered


def _row_type(name_bytes: int) -> np.dtype[np.void]:
    """Return how a name of that length and its value lie in memory; see `store_index.pack`."""
    return np.dtype(
        [
            ("group", ">u2"),
            ("block_key", f"V{name_bytes - 2}"),
            ("segment", "<u4"),
            ("offset", "<u8"),
            ("length", "<u4"),
            ("checksum", "<u8"),
            ("created_s", "<f8"),
            ("tenant_bytes", "u1"),
            ("tenant", "V16"),
            ("check", "V8"),
        ]
    )


def _by_segment(rows: Rows) -> Iterator[tuple[int, Rows]]:
    """Yield the number of each segment with its rows, which lie side by side."""
    numbers, starts = np.unique(rows["segment"], return_index=True)
    return zip(numbers.tolist(), np.split(rows, starts)[1:], strict=True)


def _keys(rows: Rows) -> list[PageKey]:
    return list(zip(rows["group"].tolist(), rows["block_key"].tolist(), strict=True))
