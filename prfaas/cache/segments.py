"""Segment files: the bytes of many records, one after the other, in a few large files.

Every name is resolved below one open directory and no link is followed, so that nobody who can
rename a path makes us read or write elsewhere. A missing file, a pipe in its place or a short one
is an OSError or False, never other bytes.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EINVAL, ENOSPC
from pathlib import Path

import xxhash

_NAME = re.compile(r"(\d{8,10})\.seg", re.ASCII)
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not hold us up
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")
_MAX_CALL_BYTES = 1 << 30
"""Linux moves at most 2 GiB in one call."""
_ZEROS = bytes(1 << 20)


def record_checksum(name: bytes, parts: Sequence[memoryview]) -> int:
    """Return xxh3-64 over a record's key and bytes: bytes of another record do not match."""
    digest = xxhash.xxh3_64(name)
    for part in parts:
        digest.update(part)
    return digest.intdigest()


@contextmanager
def segment_files(directory: Path, *, zeroes: bool = False) -> Iterator["SegmentFiles"]:
    """Yield the segment files of a directory, closed when the block ends."""
    files = SegmentFiles(directory, zeroes=zeroes)
    try:
        yield files
    finally:
        files.close()


class SegmentFiles:
    """The segment files of one directory, named by number. Methods may raise OSError."""

    def __init__(self, directory: Path, *, zeroes: bool = False) -> None:
        self.zeroes = zeroes
        """Whether bytes are overwritten before they are given back to the file system."""
        self._dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)

    def sizes(self) -> dict[int, int]:
        """Return the bytes of every segment that is a plain file of this user, by number."""
        found = {}
        with os.scandir(self._dir_fd) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                status = entry.stat(follow_symlinks=False)
                if match and _is_ours(status):
                    found[int(match[1])] = status.st_size
        return found

    def written_s(self, number: int) -> float:
        """Return when the segment was last written."""
        return self._status(number).st_mtime

    def used_s(self, number: int) -> float:
        """Return when the segment was last written, or used as `set_used_s` kept it."""
        status = self._status(number)
        return max(status.st_mtime, status.st_atime)

    def _status(self, number: int) -> os.stat_result:
        return os.stat(_name(number), dir_fd=self._dir_fd, follow_symlinks=False)

    def set_used_s(self, number: int, used_s: float) -> None:
        """Keep when the segment was last used, as its time of access."""
        times = (used_s, self.written_s(number))
        os.utime(_name(number), times, dir_fd=self._dir_fd, follow_symlinks=False)

    def create(self, number: int) -> int:
        """Return a descriptor that writes a new, empty segment; the caller closes it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS
        return os.open(_name(number), flags, 0o600, dir_fd=self._dir_fd)

    @contextmanager
    def opened(self, number: int, *, flags: int = os.O_RDONLY) -> Iterator[int]:
        """Yield a descriptor of an existing segment."""
        descriptor = os.open(_name(number), flags | _FLAGS, dir_fd=self._dir_fd)
        try:
            if not _is_ours(os.fstat(descriptor)):
                raise OSError(EINVAL, "not a plain file of this user", _name(number))
            yield descriptor
        finally:
            os.close(descriptor)

    def truncate(self, number: int, num_bytes: int) -> None:
        """Cut what lies behind the first `num_bytes`; the segment's times stay."""
        with self.opened(number, flags=os.O_WRONLY) as descriptor:
            status = os.fstat(descriptor)
            self._free(descriptor, num_bytes, status.st_size)
            os.ftruncate(descriptor, num_bytes)
            os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))

    def remove(self, number: int) -> None:
        """Delete the segment; no such file is harmless. What took its place is not overwritten."""
        with suppress(FileNotFoundError):
            if self.zeroes and _is_ours(self._status(number)):
                with self.opened(number, flags=os.O_WRONLY) as descriptor:
                    self._free(descriptor, 0, os.fstat(descriptor).st_size)
            os.unlink(_name(number), dir_fd=self._dir_fd)

    def _free(self, descriptor: int, start: int, stop: int) -> None:
        if self.zeroes:
            for offset in range(start, stop, len(_ZEROS)):
                write_at(descriptor, [memoryview(_ZEROS)[: stop - offset]], offset)
            os.fsync(descriptor)

    def sync_names(self) -> None:
        """Make created and deleted names last through a power cut."""
        os.fsync(self._dir_fd)

    def free_bytes(self) -> int:
        """Return what the file system still has for this user."""
        status = os.fstatvfs(self._dir_fd)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Close the directory."""
        os.close(self._dir_fd)


def write_at(descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
    """Write the parts one after the other from `offset` on, all of them or OSError."""
    for batch, num_bytes in _batches(parts):
        if os.pwritev(descriptor, batch, offset) != num_bytes:
            raise OSError(ENOSPC, "short write")
        offset += num_bytes


def read_at(
    descriptor: int, parts: Sequence[memoryview], offset: int, *, is_waiting: bool = True
) -> bool:
    """Fill the parts from `offset` on; return False if the file ends before them.

    Without waiting also if the bytes are not all in memory; then the parts hold anything.
    """
    flags = 0 if is_waiting else os.RWF_NOWAIT
    try:
        for batch, num_bytes in _batches(parts):
            if os.preadv(descriptor, batch, offset, flags) != num_bytes:
                return False
            offset += num_bytes
    except OSError:
        if is_waiting:
            raise
        return False
    return True


def _batches(parts: Sequence[memoryview]) -> Iterable[tuple[Sequence[memoryview], int]]:
    """Return runs of buffers that one call takes, with their bytes."""
    num_bytes = sum([part.nbytes for part in parts])
    if num_bytes <= _MAX_CALL_BYTES and len(parts) <= _MAX_BUFFERS:
        return [(parts, num_bytes)]
    return _cut(parts)


def _cut(parts: Sequence[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    batch: list[memoryview] = []
    num_bytes = 0
    for whole in parts:
        flat = whole.cast("B")
        for start in range(0, len(flat), _MAX_CALL_BYTES):
            piece = flat[start : start + _MAX_CALL_BYTES]
            if batch and (len(batch) == _MAX_BUFFERS or num_bytes + len(piece) > _MAX_CALL_BYTES):
                yield batch, num_bytes
                batch, num_bytes = [], 0
            batch.append(piece)
            num_bytes += len(piece)
    if batch:
        yield batch, num_bytes


def _is_ours(status: os.stat_result) -> bool:
    """Return whether it is a plain file of this user."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _name(number: int) -> str:
    return f"{number:08d}.seg"
