"""Records of one segment read straight into pages, and compared with their checksums."""

import os
from collections.abc import Sequence
from errno import EAGAIN, EMFILE, ENFILE, ENOMEM

from prfaas.cache.segments import SegmentFiles, read_at, record_checksum
from prfaas.cache.store_index import Record
from prfaas.cache.store_types import Wanted

Read = tuple[Record, int, bytes]
"""Where the bytes lie, position among the wanted, encoded key. They sort as they lie in files."""

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
            for index, read in enumerate(reads):
                record, position, name = read
                parts = wanted[position][1]
                is_read = sum([part.nbytes for part in parts]) == record.length
                if is_read and (
                    is_told or not read_at(descriptor, parts, record.offset, is_waiting=False)
                ):
                    if not is_told:
                        _tell(descriptor, reads[index:])
                        is_told = True
                    is_read = _read(descriptor, parts, record.offset)
                is_whole = is_read and record_checksum(name, parts) == record.checksum
                (whole if is_whole else damaged).append(read)
    except OSError as error:
        if error.errno not in _TRANSIENT:
            return [], reads
    return whole, damaged


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
