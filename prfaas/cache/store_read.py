"""Records of one segment read straight into pages, and compared with their checksums."""

import os
from collections.abc import Iterator, Sequence
from errno import EAGAIN, EMFILE, ENFILE, ENOMEM

from prfaas.cache.segments import SegmentFiles, read_at, record_checksum
from prfaas.cache.store_index import Record
from prfaas.cache.store_types import Wanted

Read = tuple[Record, int, bytes]
"""Where the bytes lie, position among the wanted, encoded key. They sort as they lie in files."""

_RUN_BYTES = 256 << 10
"""Of one read: little enough to be in the processor's cache still when checksums are taken."""

_TRANSIENT = {EMFILE, ENFILE, ENOMEM, EAGAIN}
"""What says nothing about the file: a miss this time."""


def read_segment(
    files: SegmentFiles, number: int, reads: Sequence[Read], wanted: Sequence[Wanted]
) -> tuple[list[Read], Sequence[Read]]:
    """Return those of the reads that gave the very bytes that were stored, and the damaged.

    `reads` are sorted. The first that would wait for the disk tells it of all that follow.
    """
    whole: list[Read] = []
    damaged: list[Read] = []
    is_told = False
    try:
        with files.opened(number) as descriptor:
            for start, run in _runs(reads):
                parts = [part for _, position, _ in run for part in wanted[position][1]]
                offset = run[0][0].offset
                is_read = not is_told and read_at(descriptor, parts, offset, is_waiting=False)
                if not is_read:
                    if not is_told:
                        _tell(descriptor, reads[start:])
                        is_told = True
                    is_read = _read(descriptor, parts, offset)
                for read in run:
                    is_whole = _is_whole(descriptor, read, wanted[read[1]][1], is_read=is_read)
                    (whole if is_whole else damaged).append(read)
    except OSError as error:
        if error.errno not in _TRANSIENT:
            return [], reads
    return whole, damaged


def _runs(reads: Sequence[Read]) -> Iterator[tuple[int, list[Read]]]:
    """Yield stretches without a gap, each with the position of its first read."""
    start = end_bytes = num_bytes = 0
    for index, (record, _, _) in enumerate(reads):
        num_bytes += record.length
        if record.offset != end_bytes or num_bytes > _RUN_BYTES:
            if index > start:
                yield start, list(reads[start:index])
            start, num_bytes = index, record.length
        end_bytes = record.offset + record.length
    yield start, list(reads[start:])


def _is_whole(descriptor: int, read: Read, parts: Sequence[memoryview], *, is_read: bool) -> bool:
    """Return whether the parts hold the record, after reading it alone if its run was not read."""
    record, _, name = read
    return (is_read or _read(descriptor, parts, record.offset)) and record_checksum(
        name, parts
    ) == record.checksum


def _tell(descriptor: int, reads: Sequence[Read]) -> None:
    """Have the disk read ahead, each stretch of the file without a gap at once."""
    start = stop = reads[0][0].offset
    for record, _, _ in reads:
        if record.offset != stop:
            os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)
            start = record.offset
        stop = record.offset + record.length
    os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)


def _read(descriptor: int, parts: Sequence[memoryview], offset: int) -> bool:
    try:
        return read_at(descriptor, parts, offset)
    except OSError:  # a disk that cannot read this record may well read the next
        return False
