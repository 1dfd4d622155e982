"""What of one prompt is in RAM and on disk: many blocks at a time, each asked about once."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from prfaas.cache.pool import Entry, PageKey, PagePool

STRETCH = 256
"""Blocks are asked about so many at a time: most prompts that nobody knows part at the beginning."""


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


def walk_back(entry: Entry | None) -> list[Entry | None]:
    """Return the published entries from a prompt's beginning to this one, as far as they are known."""
    chain: list[Entry | None] = []
    append = chain.append
    while entry is not None and entry.key is not None:
        append(entry)
        entry = entry.before
    chain.reverse()
    return chain


class InRam:
    """Blocks in the pool, as they are while its lock is held."""

    def __init__(self, pool: PagePool, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self._pool = pool
        self._entries: dict[int, list[Entry | None]] = {}
        """Of each group the first blocks', as far as was asked."""
        self._leading: dict[int, int] = {}

    def leading(self, group: int) -> int:
        """Return how many blocks of a group are there before the first that is not.

        A prompt's blocks leave from the end, so that the last one that is there is found by halving,
        and the others by walking back: a lookup in a large index waits for memory at each key.
        Where that does not lead through all of them, each is looked up.
        """
        if group not in self._leading:
            self._leading[group] = self._count(group)
        return self._leading[group]

    def _count(self, group: int) -> int:
        published = self._pool.published(group)
        num_blocks = bisect_left(self.keys, True, key=lambda key: key not in published)
        chain = walk_back(published[self.keys[num_blocks - 1]]) if num_blocks else []
        if len(chain) == num_blocks:
            self._entries[group] = chain
            return num_blocks
        for start in range(0, len(self.keys), STRETCH):
            entries = self.first(group, start + STRETCH)[start : start + STRETCH]
            if not all(entries):
                return start + entries.index(None)
        return len(self.keys)

    def has(self, group: int, block: int) -> bool:
        """Return whether that block of that group is there."""
        return self.keys[block] in self._pool.published(group)

    def first(self, group: int, num_blocks: int) -> list[Entry | None]:
        """Return at least so many entries of a group, if there are, None for what is not there."""
        entries = self._entries.setdefault(group, [])
        if len(entries) < num_blocks:
            keys = self.keys[len(entries) : num_blocks]
            entries += map(self._pool.published(group).get, keys)
        return entries

    def some(self, group: int, blocks: range) -> list[Entry | None]:
        """Return the entries of some blocks of a group."""
        entries = self._entries.get(group, [])
        if len(entries) >= blocks.stop:
            return entries[blocks.start : blocks.stop]
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
        keys = self._ram.keys
        for start in range(self._ram.leading(group), len(keys), STRETCH):
            blocks = range(start, min(start + STRETCH, len(keys)))
            entries = self._ram.first(group, blocks.stop)[blocks.start : blocks.stop]
            absent = absent_blocks(blocks, entries)
            if absent:
                num_known = self._store.num_known(group, [keys[block] for block in absent])
                if num_known < len(absent):
                    return absent[num_known]
        return len(keys)

    def has(self, group: int, block: int) -> bool:
        """Return whether that block of that group is there."""
        return self._ram.has(group, block) or self._store.known((group, self._ram.keys[block]))
