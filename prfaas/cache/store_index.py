"""The index on disk: where the bytes of each record lie. An LMDB file that holds nothing else.

A value carries its own checksum over the key and itself, so that a flipped byte of the index is
found before it is believed.
"""

import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import lmdb
import xxhash

from prfaas.cache.pool import PageKey
from prfaas.errors import StoreError

MAX_KEY_BYTES = 128

_GROUP_BYTES = 2
_VALUE = struct.Struct("<IQIQd17p")
"""`store_load` reads it, too."""
_CHECK_BYTES = 8
_VALUE_BYTES = _VALUE.size + _CHECK_BYTES
_BATCH = 1000
_MAP_BYTES = 1 << 36
"""Address space, not memory: growing the map under a reader would be fatal."""


class Record(NamedTuple):
    """Where a record's bytes lie, and what they must be. A tuple: an open makes a million."""

    segment: int
    offset: int
    length: int
    checksum: int
    """`segments.record_checksum` of the key and the bytes."""
    created_s: float
    """Since the epoch."""
    tenant: bytes


def encode_key(key: PageKey) -> bytes:
    """Return what names a record in the index."""
    group, block_key = key
    assert len(block_key) <= MAX_KEY_BYTES, "a block key is a hash"
    return group.to_bytes(_GROUP_BYTES, "big") + block_key


def decode_key(name: bytes) -> PageKey:
    """Return the key of a record's name."""
    return int.from_bytes(name[:_GROUP_BYTES], "big"), name[_GROUP_BYTES:]


def pack(name: bytes, record: Record) -> bytes:
    """Return the value that the index keeps under `name`."""
    body = _VALUE.pack(*record)
    return body + xxhash.xxh3_64_digest(name + body)


def is_sound(name: bytes, value: bytes) -> bool:
    """Return whether no byte of a name or its value was changed."""
    return (
        len(value) == _VALUE_BYTES
        and len(name) > _GROUP_BYTES
        and value[-_CHECK_BYTES:] == xxhash.xxh3_64_digest(name + value[:-_CHECK_BYTES])
    )


def unpack(name: bytes, value: bytes) -> Record | None:
    """Return the record of a name and its value, or None if a byte of either was changed."""
    return Record._make(_VALUE.unpack_from(value)) if is_sound(name, value) else None


def open_index(
    path: Path, *, readonly: bool = False, syncs_commits: bool = True
) -> lmdb.Environment:
    """Return the LMDB environment in the one file `path`; raises lmdb.Error.

    Commits are synced, all but their last page flip: a power cut may undo the last one, no more.
    """
    return lmdb.open(
        str(path),
        map_size=_MAP_BYTES,
        subdir=False,
        readonly=readonly,
        create=not readonly,
        mode=0o600,
        sync=syncs_commits,
        metasync=False,
        writemap=False,  # with it, a full disk kills the process
        lock=False,  # its file is a written map, with the same end; `Index` guards its readers
    )


class Index:
    """The index of one generation. One thread writes at a time; any may read. Raises StoreError.

    LMDB runs without its table of readers: a transaction may reuse the pages that the one before it
    freed. So a read holds `_reading` from begin to end, and a write passes through it first: then
    all who read have begun after the last commit, and none of their pages is freed yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reading = threading.Lock()
        self.is_usable = True
        """Whether another commit may succeed: not after one that failed half-way, or a cut file."""
        try:
            self._environment = open_index(path)
        except lmdb.Error as error:
            raise StoreError(f"cannot open the index {path}: {error}") from error
        self._least_bytes = self.num_bytes()
        """The file never shrinks by itself."""

    def num_bytes(self) -> int:
        """Return the size of the file."""
        try:
            return self._path.stat().st_size
        except OSError as error:
            self.is_usable = False
            raise StoreError(f"the index {self._path} is gone: {error.strerror}") from error

    def get(self, key: PageKey) -> Record | None:
        """Return the record of `key`, or None if there is none or its entry is damaged."""
        return self.get_many([encode_key(key)])[0]

    def get_many(self, names: Sequence[bytes]) -> list[Record | None]:
        """Return what `get` would for each encoded key, of one moment."""
        self._check_size()
        try:
            with self._reading, self._environment.begin() as transaction:
                values = [transaction.get(name) for name in names]
        except lmdb.Error as error:
            raise StoreError(f"cannot read the index {self._path}: {error}") from error
        return [
            None if value is None else unpack(name, value)
            for name, value in zip(names, values, strict=True)
        ]

    def apply(
        self, *, removals: Iterable[PageKey], additions: Iterable[tuple[PageKey, Record]]
    ) -> None:
        """Remove, then add, in one transaction that lasts when this returns, or change nothing."""
        self._check_size()
        with self._reading:
            pass
        try:
            with self._environment.begin(write=True) as transaction:
                for key in removals:
                    transaction.delete(encode_key(key))
                for key, record in additions:
                    name = encode_key(key)
                    transaction.put(name, pack(name, record))
            self._least_bytes = self.num_bytes()
        except lmdb.PanicError as error:
            self.is_usable = False
            raise StoreError(f"the index {self._path} failed: {error}") from error
        except lmdb.Error as error:
            raise StoreError(f"cannot write the index {self._path}: {error}") from error

    def records(self) -> Iterator[tuple[PageKey, Record]]:
        """Yield every whole entry in the order of keys; what changes meanwhile may be missed."""
        start = b""
        while batch := self._some_from(start):
            for name, value in batch:
                record = unpack(name, value)
                if record is not None:
                    yield decode_key(name), record
            start = batch[-1][0] + b"\0"

    def _some_from(self, start: bytes) -> list[tuple[bytes, bytes]]:
        self._check_size()
        try:
            with (
                self._reading,
                self._environment.begin() as transaction,
                transaction.cursor() as cursor,
            ):
                return list(islice(cursor, _BATCH)) if cursor.set_range(start) else []
        except lmdb.Error as error:
            raise StoreError(f"cannot read the index {self._path}: {error}") from error

    def _check_size(self) -> None:
        """Raise StoreError if the file was cut under its map: a read there would be a SIGBUS."""
        least_bytes = self._least_bytes  # first: a commit may grow both behind our back
        found_bytes = self.num_bytes()
        if found_bytes < least_bytes:
            self.is_usable = False
            raise StoreError(f"the index {self._path} was cut to {found_bytes} bytes")

    def close(self) -> None:
        """Close the file; nobody reads any more."""
        self._environment.close()
