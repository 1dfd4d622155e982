"""Stores, records and clocks for the tests of the disk tier."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from prfaas.cache.options import StoreOptions
from prfaas.cache.pool import PageKey
from prfaas.cache.store import MIN_QUOTA_BYTES, Store

IDENTITY = "model a, float32"
EPOCH_S = 1_800_000_000.0


@dataclass
class Hand:
    """A clock that moves when told to."""

    now_s: float = EPOCH_S

    def __call__(self) -> float:
        return self.now_s


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def key_of(number: int, group: int = 0) -> PageKey:
    return group, number.to_bytes(32, "big")


def bytes_of(seed: object, length: int) -> bytes:
    return random.Random(repr(seed)).randbytes(length)


def open_store(directory: Path, *, identity: str = IDENTITY, **changes: Any) -> Store:
    clocks = {name: changes.pop(name) for name in ("clock", "wall") if name in changes}
    options = StoreOptions(**({"quota_bytes": 16 * MIN_QUOTA_BYTES} | changes))
    return Store.open(directory, identity=identity, options=options, **clocks)


@contextmanager
def opened(directory: Path, **changes: Any) -> Iterator[Store]:
    """A store that is checked and closed at the end."""
    store = open_store(directory, **changes)
    try:
        yield store
        store.flush()
        store.check()
    finally:
        store.close()


def put(store: Store, key: PageKey, content: bytes, **how: Any) -> bool:
    """Put in three parts, as pages are."""
    view = memoryview(content)
    cuts = [0, len(view) // 3, len(view) // 2, len(view)]
    return store.put(key, [view[a:b] for a, b in pairwise(cuts)], **how)


def get(store: Store, key: PageKey, length: int) -> bytes | None:
    """What the store finds, read into parts that are cut elsewhere than they were put."""
    buffer = memoryview(bytearray(length))
    cut = length // 4
    return bytes(buffer) if store.get(key, [buffer[:cut], buffer[cut:]]) else None


def fill(store: Store, numbers: range, length: int = 10_000, **how: Any) -> None:
    """Store records whose bytes follow from their number."""
    for number in numbers:
        assert put(store, key_of(number), bytes_of(number, length), **how)
    store.flush()


def whole(store: Store, numbers: range, length: int = 10_000) -> list[int]:
    """The numbers whose record is found; each must have its very bytes."""
    found = []
    for number in numbers:
        content = get(store, key_of(number), length)
        if content is not None:
            assert content == bytes_of(number, length)
            found.append(number)
    return found


def deleted_segments(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What lies in each segment file when it is deleted, from now on."""
    deleted: list[bytes] = []
    real = os.unlink

    def unlink(name: Any, *, dir_fd: int | None = None) -> None:
        if str(name).endswith(".seg"):
            descriptor = os.open(name, os.O_RDONLY, dir_fd=dir_fd)
            deleted.append(os.pread(descriptor, 1 << 20, 0))
            os.close(descriptor)
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    return deleted


def generation_of(directory: Path) -> Path:
    (path,) = directory.glob("v*-*")
    return path


def segments_of(directory: Path) -> list[Path]:
    return sorted(generation_of(directory).glob("*.seg"))


def index_of(directory: Path) -> Path:
    return generation_of(directory) / "index.mdb"
