"""Between the pool and the disk: published pages go down behind the engine's back, hits come up.

Going down: a page is held until it is written, and nothing waits for that. Coming up: pages are taken
under the pool's lock, read outside it, and published like any other, so that what a read gives
becomes an ordinary hit, and a read that fails only makes the hit shorter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from prfaas.cache.policy import dense_worth, is_worth_disk, worth_of
from prfaas.cache.spec import CacheLayout, bytes_of_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prfaas.cache.pool import Entry, PageKey, PagePool
    from prfaas.cache.store import StoreStats

TOUCH_STRIDE = 8
"""A use is noted by segment of the disk, which holds many blocks in a row: every eighth tells."""


class PageStore(Protocol):
    """What the tiers need of `store.Store`."""

    def put(
        self,
        key: PageKey,
        parts: Sequence[memoryview],
        *,
        tenant: bytes = b"",
        done: Callable[[bool], None] | None = None,
    ) -> bool:
        """Queue a record; True: `done` will be called, from another thread."""
        ...

    def known(self, key: PageKey) -> bool:
        """Return whether a record is likely to be found. No lock, no disk."""
        ...

    def get_many(self, wanted: Sequence[tuple[PageKey, Sequence[memoryview]]]) -> list[bool]:
        """Fill buffers from the disk; False for each miss."""
        ...

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Note that records are of use. No lock, no disk."""
        ...

    def stats(self) -> StoreStats:
        """Return figures of this moment."""
        ...

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Write what waits, within the time, and let the directory go."""
        ...


class DiskTier:
    """Moves entries of one pool to and from a store. Methods that say so need the pool's lock."""

    def __init__(self, layout: CacheLayout, pool: PagePool, store: PageStore) -> None:
        self.store = store
        self.writing: set[Entry] = set()
        """Held until they are written."""
        self.promotions: set[Promotion] = set()
        self._layout = layout
        self._pool = pool
        self._dense_worth = dense_worth(layout)

    def write_behind(self, entry: Entry, tenant: bytes) -> None:
        """Hold a published entry until it is stored, if it is worth that. Needs the lock."""
        assert entry.key is not None
        key = entry.key
        is_second_sight = entry.was_hit or entry.was_gone
        if entry.is_kept or not is_worth_disk(
            entry.worth, self._dense_worth, is_second_sight=is_second_sight
        ):
            return

        def done(is_stored: bool) -> None:
            with self._pool.lock:
                entry.is_kept = is_stored
                self.writing.remove(entry)
                self._pool.end_reading(entry)

        if self.store.known(key):
            entry.is_kept = True
        elif self.store.put(key, self.parts(key[0], entry), tenant=tenant, done=done):
            entry.is_kept = True
            entry.num_refs += 1
            self.writing.add(entry)

    def parts(self, group: int, entry: Entry) -> list[memoryview]:
        """Return the bytes of an entry's pages, in their order."""
        spec, block_tokens = self._layout.groups[group], self._layout.block_tokens
        return [
            self._pool.view(page)[: bytes_of_page(spec, index, block_tokens, block_tokens)]
            for index, page in enumerate(entry.pages)
        ]

    def try_promote(
        self, held: list[Entry], absent: list[tuple[PageKey, int]], *, ram_tokens: int
    ) -> Promotion | None:
        """Return what reads the absent (key, block), or None if there are not enough pages.

        It takes over the references of `held`, what is in RAM already; with None they are let go.
        Needs the lock.
        """
        sizes = [self._layout.groups[key[0]].pages_per_block for key, _ in absent]
        entries = self._pool.try_take(sizes, is_transfer=False)
        if entries is None:
            for entry in reversed(held):
                self._pool.end_reading(entry)
            return None
        for (key, block), entry in zip(absent, entries, strict=True):
            position_tokens = (block + 1) * self._layout.block_tokens
            entry.worth = worth_of(self._layout, key[0], position_tokens, ram_tokens)
            entry.is_kept = True
        promotion = Promotion(
            tier=self,
            pool=self._pool,
            held=held,
            wanted=[(key, entry) for (key, _), entry in zip(absent, entries, strict=True)],
            ram_tokens=ram_tokens,
        )
        self.promotions.add(promotion)
        return promotion

    def touch(self, keys: Sequence[bytes], num_blocks: int) -> None:
        """Tell the disk that RAM served these blocks. Takes no lock."""
        blocks = {*range(0, num_blocks, TOUCH_STRIDE), num_blocks - 1} - {-1}
        groups = range(len(self._layout.groups))
        self.store.touch((group, keys[block]) for block in blocks for group in groups)

    def check(self) -> None:
        """Assert that what is written or read is held. Needs the lock."""
        assert all(entry.key is not None for entry in self.writing), "a private page is written"
        assert all(entry.num_refs for entry in self.writing), "a page is written that may change"


class Promotion:
    """Records that would make a prompt's hit longer, and the pages to read them into.

    `read` is for a thread that may wait; `release` ends it, on any thread, once. A release during
    a read takes effect when the read ends.
    """

    def __init__(
        self,
        *,
        tier: DiskTier,
        pool: PagePool,
        held: list[Entry],
        wanted: list[tuple[PageKey, Entry]],
        ram_tokens: int,
    ) -> None:
        self.ram_tokens = ram_tokens
        """The hit without the disk."""
        self.num_records = len(wanted)
        """Records to read."""
        self._tier = tier
        self._pool = pool
        self._held = held
        self._wanted = wanted
        self._is_reading = False
        self._is_released = False

    def entries(self) -> list[Entry]:
        """Return what it holds. Needs the lock."""
        return [*self._held, *(entry for _, entry in self._wanted)]

    def read(self) -> int:
        """Read everything and publish what is whole; return the number of records that were not."""
        if not self._try_begin():
            return self.num_records
        found = [False] * len(self._wanted)
        try:
            wanted = [(key, self._tier.parts(key[0], entry)) for key, entry in self._wanted]
            found = self._tier.store.get_many(wanted)
        finally:
            with self._pool.lock:
                self._publish(found)
                self._is_reading = False
                if self._is_released:
                    self._let_go()
        return found.count(False)

    def _try_begin(self) -> bool:
        with self._pool.lock:
            self._is_reading = not self._is_released
            return self._is_reading

    def _publish(self, found: Sequence[bool]) -> None:
        wanted, self._wanted = self._wanted, []
        for is_found, (key, entry) in zip(found, wanted, strict=True):
            if not is_found:
                self._pool.end_reading(entry)
                continue
            current = self._pool.publish(entry, key, worth=entry.worth)
            if current is not entry:  # another request was faster
                self._pool.end_reading(entry)
            self._held.append(current)

    def release(self) -> None:
        """Let all go; what a lookup holds meanwhile stays."""
        with self._pool.lock:
            self._is_released = True
            if not self._is_reading:
                self._let_go()

    def _let_go(self) -> None:
        for entry in reversed(self.entries()):
            self._pool.end_reading(entry)
        self._tier.promotions.remove(self)
