"""What of one prompt is in RAM and on disk: many blocks at a time, each asked about once."""

from collections.abc import Sequence
from typing import Protocol

from prfaas.cache.pool import Entry, PageKey, PagePool


class Known(Protocol):
    """What is asked of a store."""

    def known(self, key: PageKey) -> bool:
        """Return whether a record is likely to be found. No lock, no disk."""
        ...

    def num_known(self, group: int, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a group are `known` before the first that is not."""
        ...


def absent_blocks(blocks: range, entries: Sequence[Entry | None]) -> Sequence[int]:
    """Return those of `blocks` that have no entry; mostly all or none."""
    if all(entries):
        return ()
    if not any(entries):
        return blocks
    return [block for block, entry in zip(blocks, entries, strict=True) if entry is None]


class InRam:
    """Blocks in the pool, as they are while its lock is held."""

    def __init__(self, pool: PagePool, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self._pool = pool
        self._entries: dict[int, list[Entry | None]] = {}

    def leading(self, group: int) -> int:
        """Return how many blocks of a group are there before the first that is not."""
        entries = self.entries(group)
        return len(entries) if all(entries) else entries.index(None)

    def has(self, group: int, block: int) -> bool:
        """Return whether that block of that group is there."""
        return self.keys[block] in self._pool.published(group)

    def entries(self, group: int) -> list[Entry | None]:
        """Return the entry of each block of a group, None for what is not there."""
        entries = self._entries.get(group)
        if entries is None:
            entries = list(map(self._pool.published(group).get, self.keys))
            self._entries[group] = entries
        return entries

    def some(self, group: int, blocks: range) -> list[Entry | None]:
        """Return the entries of some blocks of a group."""
        if group in self._entries:
            return self._entries[group][blocks.start : blocks.stop]
        return list(map(self._pool.published(group).get, self.keys[blocks.start : blocks.stop]))


class InRamOrOnDisk:
    """Blocks in the pool, or known to the store."""

    def __init__(self, ram: InRam, store: Known) -> None:
        self._ram = ram
        self._store = store
        self._leading: dict[int, int] = {}

    def leading(self, group: int) -> int:
        """Return how many blocks of a group are there before the first that is not."""
        if group not in self._leading:
            self._leading[group] = self._count(group)
        return self._leading[group]

    def _count(self, group: int) -> int:
        entries, keys = self._ram.entries(group), self._ram.keys
        absent = absent_blocks(range(len(entries)), entries)
        num_known = self._store.num_known(group, [keys[block] for block in absent])
        return len(entries) if num_known == len(absent) else absent[num_known]

    def has(self, group: int, block: int) -> bool:
        """Return whether that block of that group is there."""
        return self._ram.has(group, block) or self._store.known((group, self._ram.keys[block]))
