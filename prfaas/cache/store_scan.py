"""A child process reads the index that was found and writes it anew.

LMDB maps its file: one that was cut or scrambled may kill whoever reads it. So a child goes first,
checks each entry, copies the good ones into a fresh file, which is the only one that this process
maps, and says on its standard output what they are. If the child fails or dies, the index is not
used.
"""

import os
import resource
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import lmdb

from prfaas.cache.store_directory import INDEX_NAME
from prfaas.cache.store_index import is_sound, open_index
from prfaas.errors import StoreError

_NEW_NAME = "index.new.mdb"
_SCAN_TIMEOUT_S = 900.0
_BATCH = 10_000
_LEAST_FREE_BYTES = 4 << 20
_DAMAGED, _NO_ROOM, _FAILED = 3, 4, 5
_HEADER = struct.Struct("<II")
"""Bytes of each name, and of all that follows: names, each with its value behind it."""

Entries = list[tuple[bytes, bytes]]
"""Names with their values, as the index has them."""

_FATAL_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
"""What reading a broken map ends with; any other signal came from outside and says nothing."""


class NoRoom(StoreError):
    """The disk is too full for a copy of the index."""


class DamagedIndex(StoreError):
    """The index cannot be read, however often one tries."""


_KINDS: dict[int, type[StoreError]] = {_DAMAGED: DamagedIndex, _NO_ROOM: NoRoom}


def renew_index(directory: Path) -> bytes:
    """Replace the index in `directory`, if there is one, by a whole copy of its good entries.

    Returns them as `tables` reads them.

    Raises:
        NoRoom, DamagedIndex: as they say.
        StoreError: something else that the message names.
    """
    source, target = directory / INDEX_NAME, directory / _NEW_NAME
    target.unlink(missing_ok=True)
    try:
        found = source.lstat()
    except FileNotFoundError:
        return b""
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise DamagedIndex(f"{source} is not a plain file of this user")
    entries = _run_child(source, target)
    target.replace(source)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return entries


def write_tables(batch: Entries, listing: BinaryIO) -> None:
    """Write entries as `tables` reads them."""
    by_length: dict[int, list[bytes]] = {}
    for name, value in batch:
        by_length.setdefault(len(name), []).append(name + value)
    for name_bytes, rows in by_length.items():
        table = b"".join(rows)
        listing.write(_HEADER.pack(name_bytes, len(table)) + table)


def tables(entries: bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield runs of entries whose names are equally long: bytes of a name, names with values."""
    rest = memoryview(entries)
    while rest:
        name_bytes, num_bytes = _HEADER.unpack_from(rest)
        stop = _HEADER.size + num_bytes
        yield name_bytes, rest[_HEADER.size : stop]
        rest = rest[stop:]


def _run_child(source: Path, target: Path) -> bytes:
    package_root = str(Path(__file__).parents[2])
    search_path = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        child = subprocess.run(  # noqa: S603 - our interpreter, our module
            [sys.executable, "-P", "-m", __spec__.name, str(source), str(target)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SCAN_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StoreError(f"reading the index took over {_SCAN_TIMEOUT_S:g} s") from error
    if child.returncode < 0:
        kind = DamagedIndex if -child.returncode in _FATAL_SIGNALS else StoreError
        raise kind(f"signal {-child.returncode} ended the reading of the index")
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        kind = _KINDS.get(child.returncode, StoreError)
        raise kind(f"the index was not renewed: {lines[-1]}")
    return child.stdout


def copy_index(source: Path, target: Path, listing: BinaryIO) -> None:
    """Write every good entry of one index into a new one, synced, and into a stream for `tables`.

    Raises:
        NoRoom: the disk is full.
        DamagedIndex: its tree is out of order.
        lmdb.Error: LMDB found other damage, or cannot do its work.
        StoreError: the copy cannot be written for another reason.
    """
    with (
        open_index(source, readonly=True) as old,
        open_index(target, syncs_commits=False) as new,
        old.begin() as reading,
        reading.cursor() as cursor,
    ):
        batch: Entries = []
        last = b""
        for name, value in cursor:
            if name <= last:  # a cycle would never end
                raise DamagedIndex("the keys are out of order")
            last = name
            if is_sound(name, value):
                batch.append((name, value))
            if len(batch) == _BATCH:
                _append(new, batch)
                write_tables(batch, listing)
                batch = []
        _append(new, batch)
        write_tables(batch, listing)
        with _written(new):
            new.sync(force=True)


def _append(environment: lmdb.Environment, batch: Entries) -> None:
    with (
        _written(environment),
        environment.begin(write=True) as transaction,
        transaction.cursor() as cursor,
    ):
        cursor.putmulti(batch, append=True)


@contextmanager
def _written(environment: lmdb.Environment) -> Iterator[None]:
    """Say why it could not be written to."""
    try:
        yield
    except lmdb.Error as error:
        # LMDB calls a write that was cut short by a full disk an input/output error.
        is_full = isinstance(error, lmdb.DiskError) or _free_bytes(environment) < _LEAST_FREE_BYTES
        raise (NoRoom if is_full else StoreError)(str(error)) from error


def _free_bytes(environment: lmdb.Environment) -> int:
    status = os.statvfs(Path(environment.path()).parent)
    return status.f_bavail * status.f_frsize


def main(argv: list[str]) -> int:
    """Copy the index named first to the second, write out its entries; return the exit status."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # dying here is part of the plan
    status: int
    reason: Exception
    try:
        copy_index(Path(argv[0]), Path(argv[1]), sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except (NoRoom, lmdb.DiskError) as error:
        status, reason = _NO_ROOM, error
    except DamagedIndex as error:
        status, reason = _DAMAGED, error
    except (StoreError, lmdb.MemoryError, OSError) as error:
        status, reason = _FAILED, error
    except lmdb.Error as error:
        status, reason = _DAMAGED, error
    else:
        return 0
    sys.stderr.write(f"{reason}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
