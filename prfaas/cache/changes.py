"""What a cache tells others about the blocks that it can serve.

A *key* says that the full-attention KV of that block is here, in RAM or on disk. A *place* says that
the windows and states to go on behind that block are here, too. Both are the block's key.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from prfaas.cache.chains import MAX_BLOCKS, Chains
from prfaas.cache.pool import PageKey
from prfaas.cache.spec import CacheLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What became of the cache since the changes before these; nothing is in two of the lists."""

    epoch: int
    """Of the cache's life: one that began later has a greater one."""
    sequence: int
    """1 is the first of an epoch; each one after it is one more."""
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    places_added: tuple[bytes, ...] = ()
    places_removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """All that the cache had after the changes of that sequence."""

    epoch: int
    sequence: int
    """0: before the first."""
    keys: tuple[bytes, ...] = ()
    places: tuple[bytes, ...] = ()


class Removals(Protocol):
    """What is asked of a store: which records left it, and whether one is there."""

    def known(self, key: PageKey) -> bool:
        """Return whether a record is likely to be found. No lock, no disk."""
        ...

    def take_removed(self) -> Sequence[PageKey] | None:
        """Return the records that left since the last call, or None: any may have left."""
        ...


class ChangeLog:
    """Which blocks a cache can serve, and what of that others were not told yet.

    What is told is a subset of what there is at that moment: a hit expected from it is there. Blocks
    on disk of which nothing came by since the start are not told of: their prompts are not known.
    Methods that say so need the pool's lock; others take it, for as long as it takes to list what
    they return.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        epoch: int,
        lock: AbstractContextManager[object],
        store: Removals | None = None,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        self.epoch = epoch
        self._lock = lock
        self._store = store
        self._chains = Chains(layout, max_blocks=max_blocks)
        self._sequence = 0

    def published(self, group: int, keys: Sequence[bytes], block: int) -> None:
        """Note that a group's block of the prompt with these keys can be hit. Needs the lock."""
        self._chains.came(group, keys, block)

    def evicted(self, key: PageKey) -> None:
        """Note that RAM has an entry no more. Needs the lock."""
        is_on_disk = self._store is not None and self._store.known(key)
        self._chains.left(*key, is_on_disk=is_on_disk)

    def take(self, max_keys: int) -> Changes | None:
        """Return what changed since it was told last, of at most so many keys; None: nothing did.

        What left comes first. What is beyond `max_keys`, at least 1, is for the next call; until all
        that left is told, others expect too much.
        """
        left_disk = self._removed()
        with self._lock:
            self._note(left_disk)
            keys, places = self._chains.keys, self._chains.places
            taken: list[tuple[bytes, ...]] = []
            for take in (
                keys.take_removed,
                places.take_removed,
                keys.take_added,
                places.take_added,
            ):
                taken.append(take(max_keys))
                max_keys -= len(taken[-1])
            if not any(taken):
                return None
            self._sequence += 1
            removed, places_removed, added, places_added = taken
            return Changes(
                epoch=self.epoch,
                sequence=self._sequence,
                added=added,
                removed=removed,
                places_added=places_added,
                places_removed=places_removed,
            )

    def snapshot(self) -> CacheSnapshot:
        """Return all there is; no changes that it holds are told again.

        It has a sequence of its own if there were any: who does not get it finds one missing.
        """
        left_disk = self._removed()
        with self._lock:
            self._note(left_disk)
            keys, places = self._chains.keys, self._chains.places
            if keys.added or keys.removed or places.added or places.removed:
                self._sequence += 1
            return CacheSnapshot(
                epoch=self.epoch,
                sequence=self._sequence,
                keys=keys.take_all(),
                places=places.take_all(),
            )

    def _removed(self) -> Sequence[PageKey] | None:
        """Ask the store, without the pool's lock: it may be busy."""
        return () if self._store is None else self._store.take_removed()

    def _note(self, left_disk: Sequence[PageKey] | None) -> None:
        if self._store is None:
            return
        for key in self._chains.on_disk() if left_disk is None else left_disk:
            if not self._store.known(key):
                self._chains.left_disk(*key)

    def check(self) -> None:
        """Re-derive what is told from what each block has. Needs the lock."""
        self._chains.check()
