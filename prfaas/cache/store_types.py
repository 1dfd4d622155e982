"""What goes in and out of the disk tier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.cache.pool import PageKey
from prfaas.cache.store_index import Record

Wanted = tuple[PageKey, Sequence[memoryview]]
"""A record's key, and the buffers that together have its length."""

Listed = tuple[PageKey, Record]


class Write(NamedTuple):
    """A record to be written; its parts do not change until it is. A tuple: it is made in 1 us."""

    key: PageKey
    parts: Sequence[memoryview]
    length: int
    tenant: bytes
    done: Callable[[bool], None] | None


@dataclass(slots=True, kw_only=True)
class RecordCounts:
    """Totals since the store was opened."""

    num_stored: int = 0
    stored_bytes: int = 0
    num_hits: int = 0
    hit_bytes: int = 0
    num_misses: int = 0
    num_damaged: int = 0
    num_evicted: int = 0
    num_expired: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStats:
    """What a generation holds at one moment."""

    num_records: int
    live_bytes: int
    segment_bytes: int
    """Of the files: what is dead and not yet evicted included."""
    other_bytes: int
    """What other generations in the directory take."""
    num_segments: int
    tenant_bytes: dict[bytes, int]
    oldest_s: float | None
    is_broken: bool
    """The index failed: everything is a miss until the next open."""
    counts: RecordCounts
