"""What a generation holds when it is opened: what is whole is taken over, the rest reclaimed."""

from dataclasses import dataclass, field
from operator import itemgetter

from prfaas.cache.pool import PageKey
from prfaas.cache.segment_account import Segment, SegmentAccount
from prfaas.cache.segments import SegmentFiles
from prfaas.cache.store_index import Index, decode_key


@dataclass(slots=True, kw_only=True)
class Loaded:
    """The state of a generation, its segments and its index in step."""

    where: dict[PageKey, Segment] = field(default_factory=dict)
    account: SegmentAccount = field(default_factory=SegmentAccount)
    stale: set[PageKey] = field(default_factory=set)
    """Keys whose index entry names bytes that are not there."""
    next_number: int = 1
    """The first segment number that nobody ever used."""


def load(files: SegmentFiles, index: Index, now_s: float, *, zero: bool) -> Loaded:
    """Return what is there, after cutting tails and deleting segments that no record names.

    `zero` overwrites the deleted ones first. Raises OSError and StoreError.
    """
    sizes = files.sizes()
    loaded = Loaded(next_number=max(sizes, default=0) + 1)
    found: dict[int, Segment] = {}
    # In the order of the files, which is that of prompts: so the keys of neighbouring blocks lie
    # side by side in memory, and asking for all blocks of a prompt is five times as fast.
    for name, record in sorted(index.entries(), key=itemgetter(1)):
        key = decode_key(name)
        number, end_bytes = record.segment, record.offset + record.length
        loaded.next_number = max(loaded.next_number, number + 1)
        if end_bytes > sizes.get(number, 0):
            loaded.stale.add(key)
            continue
        segment = found.get(number)
        if segment is None:
            segment = found[number] = Segment(
                number=number,
                tenant=record.tenant,
                created_s=now_s,
                used_s=min(now_s, files.used_s(number)),
            )
        segment.created_s = min(segment.created_s, record.created_s)
        segment.size_bytes = max(segment.size_bytes, end_bytes)
        segment.live_bytes += record.length
        segment.keys.append(key)
        loaded.where[key] = segment
    for number, size_bytes in sizes.items():
        if number not in found:
            files.remove(number, zero=zero)
        elif size_bytes > found[number].size_bytes:
            files.truncate(number, found[number].size_bytes)
    for segment in found.values():
        loaded.account.add(segment)
    return loaded
