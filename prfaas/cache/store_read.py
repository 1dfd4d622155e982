"""Records of one segment read straight into pages, and compared with their checksums."""

import os
from collections.abc import Iterable, Iterator, Sequence
from errno import EAGAIN, EMFILE, ENFILE, ENOMEM

from prfaas.cache.pool import PageKey
from prfaas.cache.segments import SegmentFiles, read_at, record_checksum
from prfaas.cache.store_index import Record, encode_key
from prfaas.cache.store_types import Wanted

Read = tuple[int, Record]
"""Position among the wanted, and where the bytes lie."""

_TRANSIENT = {EMFILE, ENFILE, ENOMEM, EAGAIN}
"""What says nothing about the file: a miss this time."""


def read_segment(
    files: SegmentFiles, number: int, reads: Sequence[Read], wanted: Sequence[Wanted]
) -> tuple[list[Read], Sequence[Read]]:
    """Return those of the reads that gave the very bytes that were stored, and the damaged.

    `reads` are in the order of the file; the disk is told of all before the first.
    """
    whole: list[Read] = []
    damaged: list[Read] = []
    try:
        with files.opened(number) as descriptor:
            for start, num_bytes in _stretches(record for _, record in reads):
                os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_WILLNEED)
            for read in reads:
                key, parts = wanted[read[0]]
                is_whole = _read_whole(descriptor, key, read[1], parts)
                (whole if is_whole else damaged).append(read)
    except OSError as error:
        if error.errno not in _TRANSIENT:
            return [], reads
    return whole, damaged


def _stretches(records: Iterable[Record]) -> Iterator[tuple[int, int]]:
    """Yield offset and bytes of each stretch of a file without a gap."""
    start = stop = 0
    for record in records:
        if record.offset != stop:
            if stop > start:
                yield start, stop - start
            start = record.offset
        stop = record.offset + record.length
    yield start, stop - start


def _read_whole(descriptor: int, key: PageKey, record: Record, parts: Sequence[memoryview]) -> bool:
    if sum([part.nbytes for part in parts]) != record.length:
        return False
    try:
        return (
            read_at(descriptor, parts, record.offset)
            and record_checksum(encode_key(key), parts) == record.checksum
        )
    except OSError:  # a disk that cannot read this record may well read the next
        return False
