"""Between the pool and the disk: published pages go down behind the engine's back, hits come up.

Going down: a page is held until it is written, and nothing waits for that. Coming up: pages are taken
under the pool's lock, read outside it, and published like any other, so that what a read gives
becomes an ordinary hit, and a read that fails only makes the hit shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from prfaas.cache.groups import pinned_blocks
from prfaas.cache.policy import dense_worth, is_worth_disk, worth_of
from prfaas.cache.pool import PageKey
from prfaas.cache.presence import absent_blocks
from prfaas.cache.spec import CacheLayout, FullSpec, bytes_of_page

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prfaas.cache.pool import Entry, PagePool
    from prfaas.cache.presence import InRam
    from prfaas.cache.store import StoreStats

TOUCH_STRIDE = 32
"""A use is noted by segment of the disk, which holds many blocks in a row: a few tell."""


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

    def num_known(self, group: int, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a group are `known` before the first that is not."""
        ...

    def get_many(self, wanted: Sequence[tuple[PageKey, Sequence[memoryview]]]) -> list[bool]:
        """Fill buffers from the disk; False for each miss."""
        ...

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Note that records are of use. No lock, no disk."""
        ...

    def take_removed(self) -> Sequence[PageKey] | None:
        """Return the records that left since the last call, or None: any may have left. No disk."""
        ...

    def stats(self) -> StoreStats:
        """Return figures of this moment."""
        ...

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Write what waits, within the time, and let the directory go."""
        ...


Wanted = tuple[PageKey, Sequence[memoryview]]
GetMany = Callable[[Sequence[Wanted]], list[bool]]
ReadShares = Callable[[GetMany, Sequence[Sequence[Wanted]]], list[list[bool]]]
"""(get_many, shares) -> what it returned for each."""


def read_in_turn(get_many: GetMany, shares: Sequence[Sequence[Wanted]]) -> list[list[bool]]:
    """Read one share after the other."""
    return [get_many(share) for share in shares]


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

    def try_promote(self, ram: InRam, num_blocks: int, *, ram_tokens: int) -> Promotion | None:
        """Return what makes a hit of so many blocks by reading what RAM lacks, if there is room.

        It holds what RAM has. Pages for the rest are taken when it is read. Needs the lock.
        """
        held: list[Entry] = []
        absent: list[Sequence[int]] = []
        num_pages = 0
        for group, blocks in enumerate(pinned_blocks(self._layout, num_blocks)):
            entries = ram.some(group, blocks)
            absent.append(absent_blocks(blocks, entries))
            num_pages += len(absent[-1]) * self._layout.groups[group].pages_per_block
            found = [entry for entry in entries if entry is not None]
            self._pool.hold(found)
            held += found
        if not self._pool.has_room(num_pages):
            for entry in reversed(held):
                self._pool.end_reading(entry)
            return None
        promotion = Promotion(
            tier=self,
            pool=self._pool,
            held=held,
            keys=ram.keys,
            absent=absent,
            ram_tokens=ram_tokens,
        )
        self.promotions.add(promotion)
        return promotion

    def take(
        self, keys: Sequence[bytes], absent: Sequence[Sequence[int]], ram_tokens: int
    ) -> list[tuple[PageKey, Entry]]:
        """Return pages for each group's absent blocks of a prompt, or none. Needs the lock."""
        places = [(group, block) for group, blocks in enumerate(absent) for block in blocks]
        sizes = [self._layout.groups[group].pages_per_block for group, _ in places]
        entries = self._pool.try_take(sizes, is_transfer=False)
        if entries is None:
            return []
        for (group, block), entry in zip(places, entries, strict=True):
            position_tokens = (block + 1) * self._layout.block_tokens
            entry.worth = worth_of(self._layout, group, position_tokens, ram_tokens)
            entry.is_kept = True
        return [((g, keys[b]), entry) for (g, b), entry in zip(places, entries, strict=True)]

    def touch(self, keys: Sequence[bytes], num_blocks: int) -> None:
        """Tell the disk that RAM served a hit of so many blocks. Takes no lock."""
        if not num_blocks:
            return
        for group, spec in enumerate(self._layout.groups):
            last = keys[num_blocks - 1]
            blocks = keys[: num_blocks - 1 : TOUCH_STRIDE] if isinstance(spec, FullSpec) else ()
            self.store.touch((group, key) for key in (*blocks, last))

    def check(self) -> None:
        """Assert that what is written or read is held. Needs the lock."""
        assert all(entry.key is not None for entry in self.writing), "a private page is written"
        assert all(entry.num_refs for entry in self.writing), "a page is written that may change"


class Promotion:
    """Records that would make a prompt's hit longer.

    `read` is for a thread that may wait; `release` ends it, on any thread, once. A release during
    a read takes effect when the read ends.
    """

    def __init__(
        self,
        *,
        tier: DiskTier,
        pool: PagePool,
        held: list[Entry],
        keys: Sequence[bytes],
        absent: Sequence[Sequence[int]],
        ram_tokens: int,
    ) -> None:
        self.ram_tokens = ram_tokens
        """The hit without the disk."""
        self.num_records = sum(map(len, absent))
        """Records to read."""
        self._tier = tier
        self._pool = pool
        self._held = held
        self._keys = keys
        self._absent = absent
        """For each group, the blocks to read."""
        self._wanted: list[tuple[PageKey, Entry]] = []
        """What is being read."""
        self._is_reading = False
        self._is_released = False

    def entries(self) -> list[Entry]:
        """Return what it holds. Needs the lock."""
        return [*self._held, *(entry for _, entry in self._wanted)]

    def read(self, *, num_shares: int = 1, read_shares: ReadShares = read_in_turn) -> int:
        """Read everything and publish what is whole; return the number of records that were not.

        Those are all of them if other requests have taken the room for it. `read_shares` may read
        the shares, of about equal bytes, side by side, and returns when none is read any more.
        """
        if not self._try_begin():
            return self.num_records
        found = [False] * len(self._wanted)
        try:
            wanted = [(key, self._tier.parts(key[0], entry)) for key, entry in self._wanted]
            shares = list(_shares(wanted, num_shares))
            found = [hit for hits in read_shares(self._tier.store.get_many, shares) for hit in hits]
        finally:
            with self._pool.lock:
                self._publish(found)
                self._is_reading = False
                if self._is_released:
                    self._let_go()
        return self.num_records - found.count(True)

    def _try_begin(self) -> bool:
        with self._pool.lock:
            if not self._is_released:
                self._wanted = self._tier.take(self._keys, self._absent, self.ram_tokens)
                self._is_reading = bool(self._wanted)
            return self._is_reading

    def _publish(self, found: Sequence[bool]) -> None:
        wanted, self._wanted = self._wanted, []
        block_of = {key: block for block, key in enumerate(self._keys)}
        for is_found, (key, entry) in zip(found, wanted, strict=True):
            if not is_found:
                self._pool.end_reading(entry)
                continue
            block = block_of[key[1]]
            before = self._keys[block - 1] if block else None
            current = self._pool.publish(entry, key, worth=entry.worth, before=before)
            if current is not entry:  # another request was faster
                self._pool.end_reading(entry)
            elif self._pool.changes is not None:
                self._pool.changes.published(key[0], self._keys, block)
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


def _shares(wanted: Sequence[Wanted], num_shares: int) -> Iterator[Sequence[Wanted]]:
    """Cut what is wanted, in its order, into up to so many shares of about equal bytes."""
    total_bytes = sum(part.nbytes for _, parts in wanted for part in parts)
    start = num_bytes = num_cut = 0
    for index, (_, parts) in enumerate(wanted, 1):
        num_bytes += sum(part.nbytes for part in parts)
        if num_bytes * num_shares >= total_bytes * (num_cut + 1):
            yield wanted[start:index]
            start, num_cut = index, num_bytes * num_shares // total_bytes
