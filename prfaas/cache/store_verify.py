"""Every record read and compared with its checksum."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prfaas.cache.store_records import Records
from prfaas.cache.store_types import Listed

_STRETCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProgress:
    """How far a check is."""

    num_done: int
    num_records: int
    done_bytes: int
    total_bytes: int
    num_damaged: int


def verify_records(records: Records) -> Iterator[VerifyProgress]:
    """Read every record and make the damaged ones misses, yielding after each stretch.

    It reads in the order of the files, and counts nothing as use.
    """
    listed = sorted(records.listing(), key=lambda found: (found[1].segment, found[1].offset))
    total_bytes = sum(record.length for _, record in listed)
    num_done = done_bytes = 0
    damaged_before = records.stats().counts.num_damaged
    for stretch in _stretches(listed):
        buffers = [memoryview(bytearray(record.length)) for _, record in stretch]
        records.get_many(
            [(key, [buffer]) for (key, _), buffer in zip(stretch, buffers, strict=True)],
            is_use=False,
        )
        num_done += len(stretch)
        done_bytes += sum(record.length for _, record in stretch)
        yield VerifyProgress(
            num_done=num_done,
            num_records=len(listed),
            done_bytes=done_bytes,
            total_bytes=total_bytes,
            num_damaged=records.stats().counts.num_damaged - damaged_before,
        )


def _stretches(listed: Sequence[Listed]) -> Iterator[list[Listed]]:
    """Yield the records in runs that fit memory."""
    stretch: list[Listed] = []
    num_bytes = 0
    for found in listed:
        if stretch and num_bytes + found[1].length > _STRETCH_BYTES:
            yield stretch
            stretch, num_bytes = [], 0
        stretch.append(found)
        num_bytes += found[1].length
    if stretch:
        yield stretch
