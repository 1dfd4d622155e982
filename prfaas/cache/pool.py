"""One arena of equal pages and the account of who holds each.

A page is free, or belongs to one `Entry`: the pages of one (group, block). An entry
is referenced while block tables hold it. When the last lets go, a published entry stays cached until
its pages are needed, any other is freed. So free + referenced + cached = all pages, always.
"""

import mmap
import threading
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from prfaas.cache.lookups import LookupCounts
from prfaas.cache.policy import COLD, EvictionOrder, Run, level_of
from prfaas.errors import ConfigError

if TYPE_CHECKING:
    from prfaas.cache.changes import ChangeLog

PageKey = tuple[int, bytes]
"""(group, block key): what an entry is published under."""

_MADV_POPULATE_WRITE = 23
"""Linux 5.14; Python has no name for it."""
_PREFAULT_BYTES = 1 << 20
"""Of one call, which holds up Python's other threads: half a millisecond."""

MAX_GONE = 1 << 16
"""Evicted keys that are remembered, to say why a lookup found nothing."""


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """The pages of one (group, block), of all its layers; lives and dies whole."""

    num_refs: int = 1
    """Block tables, reads and writes that hold it."""
    is_kept: bool = False
    """A lower tier has it, or will."""
    key: PageKey | None = None
    """Set once, when published: from then on the bytes are whole and never change. None once evicted."""
    before: "Entry | None" = None
    """The entry of the block before it, as it was when this was published: a way to walk a prompt."""
    worth: float = 1.0
    """Tokens that it saves per MiB; see `policy.worth_of`."""
    place: Run | None = None
    """Where it waits to leave. None: not published, or held when an eviction met it."""
    pages: tuple[int, ...]
    is_transfer: bool = False
    """Reserved for bytes on their way from a peer, and not yet published."""
    was_hit: bool = False
    """A lookup found it. Of full attention only noted until a lower tier has it."""
    was_gone: bool = False
    """It had been evicted lately when it was published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """One consistent look at the pool: pages by state, and totals since the start."""

    num_pages: int
    num_free: int
    num_referenced: int
    num_cached: int
    """Published and unreferenced: a hit, or the next to be evicted."""
    num_transfer: int
    """Of the referenced: reserved for a transfer and not yet published."""
    num_tables: int
    """Block tables that someone still holds."""
    lookups: LookupCounts
    num_evictions: int
    """Entries whose pages were taken for others."""


def _new_map(num_bytes: int) -> mmap.mmap:
    """Return untouched memory, which takes none yet; raises ConfigError if there is not so much."""
    try:  # private: a forked child cannot write our pages
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cache.ram_bytes: the system does not give {num_bytes} bytes: {error}"
        ) from error


class PagePool:
    """Pages of `page_bytes` in one anonymous memory map, and the index of published entries.

    Callers hold `lock` around the methods that say so and do nothing slow under it: no hashing, no
    copying, no I/O.
    """

    def __init__(
        self,
        ram_bytes: int,
        page_bytes: int,
        *,
        least_worth: float = 0.0,
        supporting: Collection[int] = (),
        supported: Collection[int] = (),
    ) -> None:
        """Make a pool of free pages.

        A block of a `supported` group is of no use without that of the same key in a `supporting`
        one. None is evicted as if it were worth less than `least_worth`.
        """
        self._least_worth = least_worth
        self._supporting, self._supported = frozenset(supporting), tuple(supported)
        self.page_bytes = page_bytes
        self.num_pages = ram_bytes // page_bytes
        if self.num_pages < 1:
            raise ConfigError(f"cache.ram_bytes = {ram_bytes} is less than a page: {page_bytes}")
        self._map: mmap.mmap | None = _new_map(self.num_pages * page_bytes)
        self._arena = memoryview(self._map)
        self.lock = threading.Lock()
        self.changes: ChangeLog | None = None
        """Who hears which entries come and go; set it before the first is published."""
        self._free = list(range(self.num_pages - 1, -1, -1))  # a stack; low numbers come first
        self._owner: list[Entry | None] = [None] * self.num_pages
        self._index: defaultdict[int, dict[bytes, Entry]] = defaultdict(dict)
        """Group -> block key -> entry."""
        self._order: EvictionOrder[Entry] = EvictionOrder()
        """All that is idle, and what is held but for what an eviction met: that is put back."""
        self._gone: OrderedDict[PageKey, None] = OrderedDict()
        """The latest keys that were evicted."""
        self._num_cached = 0
        self._num_transfer = 0
        self._num_evictions = 0

    @property
    def arena(self) -> memoryview:
        """All pages as one writable buffer; page i starts at i * page_bytes."""
        return self._arena

    def view(self, page: int) -> memoryview:
        """Return a held page's bytes, writable; write only before the page is published."""
        owner = self._owner[page]
        assert owner is not None, f"page {page} is free"
        assert owner.num_refs > 0, f"page {page} is held by nobody"
        start = page * self.page_bytes
        return self._arena[start : start + self.page_bytes]

    def prefault(self, num_bytes: int) -> None:
        """Have the system put memory behind so many bytes of the next pages that nobody took yet.

        The first write to fresh memory takes several times as long as later ones. Changes no byte;
        where the system cannot, nothing happens. Holds no lock meanwhile.
        """
        arena = self._map
        with self.lock:  # the free pages that were never taken are the stack's lowest
            num_fresh = bisect_left(
                range(len(self._free)), 1, key=lambda at: self._free[at] != self.num_pages - 1 - at
            )
        if arena is None:
            return
        start = (self.num_pages - num_fresh) * self.page_bytes
        stop = min(start + num_bytes, self.num_pages * self.page_bytes)
        with suppress(OSError):
            for at in range(start - start % mmap.PAGESIZE, stop, _PREFAULT_BYTES):
                arena.madvise(_MADV_POPULATE_WRITE, at, min(_PREFAULT_BYTES, stop - at))

    def close(self) -> None:
        """Give the memory back as soon as the last view or tensor over it is gone."""
        self._arena.release()
        self._map = None

    # ------------------------------------------------------------ under the lock

    def published(self, group: int) -> Mapping[bytes, Entry]:
        """Return a group's published entries by block key, as they are at each look.

        Needs the lock.
        """
        return self._index[group]

    def was_evicted(self, key: PageKey) -> bool:
        """Return whether it was published and is among the latest evicted. Needs the lock."""
        return key in self._gone

    def hold(self, entries: Sequence[Entry]) -> bool:
        """Add a reference to each published entry; they are of one group. Needs the lock.

        Returns whether a lower tier has all of them.
        """
        num_idle = 0
        are_kept = True
        for entry in entries:
            if not entry.is_kept:
                are_kept = False
            if entry.num_refs:
                entry.num_refs += 1
            else:
                entry.num_refs = 1
                num_idle += 1
        if num_idle:
            self._num_cached -= num_idle * len(entries[0].pages)
        return are_kept

    def has_room(self, num_pages: int) -> bool:
        """Return whether so many pages are free or can be. Needs the lock."""
        return num_pages <= len(self._free) + self._num_cached

    def try_take(self, sizes: Sequence[int], *, is_transfer: bool) -> list[Entry] | None:
        """Return one new entry of each size with a reference each, or None and change nothing.

        Evicts cached entries in the order of `policy.EvictionOrder`. Needs the lock.
        """
        num_pages = sum(sizes)
        if not self.has_room(num_pages):
            return None
        while len(self._free) < num_pages:
            self._evict_one()
        entries = []
        for size in sizes:
            entry = Entry(
                pages=tuple(self._free.pop() for _ in range(size)), is_transfer=is_transfer
            )
            for page in entry.pages:
                self._owner[page] = entry
            entries.append(entry)
        if is_transfer:
            self._num_transfer += num_pages
        return entries

    def publish(
        self, entry: Entry, key: PageKey, *, worth: float = 1.0, before: bytes | None = None
    ) -> Entry:
        """Return the entry that `key` names from now on, referenced by the caller.

        Either `entry` itself, or the one that was published first: then the caller has a reference
        to each, and lets `entry` go when nobody reads it. `before` is the key of the prompt's block
        before this one. Needs the lock.
        """
        assert entry.key is None, "published twice"
        group, block_key = key
        current = self._index[group].get(block_key)
        if current is not None:
            self.hold([current])
            return current
        if entry.is_transfer:
            entry.is_transfer = False
            self._num_transfer -= len(entry.pages)
        entry.key, entry.worth, entry.was_gone = key, worth, key in self._gone
        if before is not None:
            entry.before = self._index[group].get(before)
        self._index[group][block_key] = entry
        self._gone.pop(key, None)
        self._order.use([entry], self._level(worth))
        return entry

    def let_go(self, entry: Entry, *, is_cold: bool = False) -> None:
        """Drop one reference; with the last, cache the entry if published, else free its pages.

        A cold entry is evicted before any warm one. Needs the lock.
        """
        self.let_go_all([entry], is_cold=is_cold)

    def let_go_all(
        self, entries: Sequence[Entry], *, worth: float | None = None, is_cold: bool = False
    ) -> None:
        """Drop one reference to each, as `let_go` does: the first is the first to be evicted.

        They are of one group. `worth` is that of the use they are let go after, if it differs from
        their own. Needs the lock.
        """
        published = [entry for entry in entries if entry.key is not None]
        if len(published) < len(entries):
            for entry in entries:
                if entry.key is None:
                    self.end_reading(entry)
        num_idle = 0
        for entry in published:
            num_refs = entry.num_refs
            assert num_refs > 0, "let go more often than held"
            entry.num_refs = num_refs - 1
            if num_refs == 1:
                num_idle += 1
        if num_idle:
            self._num_cached += num_idle * len(published[0].pages)
        if worth is not None:
            self._order.use(published, self._level(worth))
            return
        for own, run in groupby(published, attrgetter("worth")):
            self._order.use(list(run), COLD if is_cold else self._level(own))

    def end_reading(self, entry: Entry) -> None:
        """Drop one reference, as `let_go` does, that was no use: its place stays. Needs the lock."""
        assert entry.num_refs > 0, "let go more often than held"
        entry.num_refs -= 1
        if entry.num_refs:
            return
        if entry.key is None:
            self._free_pages(entry)
            return
        if entry.place is None:  # it was to leave next when an eviction met it
            self._order.use([entry], COLD)
        self._num_cached += len(entry.pages)

    def chill(self, key: PageKey) -> None:
        """Let an idle entry leave before any warm one: nobody can use it. Needs the lock."""
        entry = self._index[key[0]].get(key[1])
        if entry is not None and not entry.num_refs:
            self._order.use([entry], COLD)

    def _level(self, worth: float) -> int:
        return level_of(max(worth, self._least_worth))

    def _evict_one(self) -> None:
        entry = self._order.pop()
        while entry.num_refs:  # it takes a new place when it is let go
            entry = self._order.pop()
        assert entry.key is not None
        group, block_key = key = entry.key
        del self._index[group][block_key]
        self._gone[key] = None
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        self._num_cached -= len(entry.pages)
        self._num_evictions += 1
        entry.key = entry.before = None
        self._free_pages(entry)
        if self.changes is not None:
            self.changes.evicted(key)
        if group in self._supporting:
            for other in self._supported:
                self.chill((other, block_key))

    def _free_pages(self, entry: Entry) -> None:
        if entry.is_transfer:
            self._num_transfer -= len(entry.pages)
        for page in entry.pages:
            self._owner[page] = None
        self._free.extend(reversed(entry.pages))

    @property
    def num_free(self) -> int:
        """Pages that belong to no entry. Needs the lock."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages of published entries that nobody holds. Needs the lock."""
        return self._num_cached

    @property
    def num_transfer(self) -> int:
        """Pages reserved for transfers and not yet published. Needs the lock."""
        return self._num_transfer

    @property
    def num_evictions(self) -> int:
        """Entries evicted since the start. Needs the lock."""
        return self._num_evictions

    def entries(self) -> Iterator[Entry]:
        """Yield every entry that owns a page, once each. Needs the lock."""
        seen: set[Entry] = set()
        for owner in self._owner:
            if owner is not None and owner not in seen:
                seen.add(owner)
                yield owner

    def check(self) -> None:
        """Re-derive every counter and place from the owners of the pages. Needs the lock."""
        entries = list(self.entries())
        owned = [page for entry in entries for page in entry.pages]
        assert len(set(owned)) == len(owned), "a page belongs to two entries"
        assert sorted(owned + self._free) == list(range(self.num_pages)), "a page has no one place"
        assert all(self._owner[page] is entry for entry in entries for page in entry.pages)
        published = {entry.key: entry for entry in entries if entry.key is not None}
        indexed = {(g, key): entry for g, of in self._index.items() for key, entry in of.items()}
        assert published == indexed, "the index and the owners differ"
        self._order.check()
        waiting = {entry for entry in entries if entry.place is not None}
        assert len(waiting) == len(self._order), "what is to leave and what says so differ"
        idle = {entry for entry in entries if entry.num_refs == 0}
        assert idle <= waiting <= set(published.values()), "an idle entry would never leave"
        assert not self._gone.keys() & published.keys(), "a published key counts as evicted"
        assert len(self._gone) <= MAX_GONE
        assert sum(len(entry.pages) for entry in idle) == self._num_cached
        in_transfer = [entry for entry in entries if entry.is_transfer]
        assert all(entry.key is None for entry in in_transfer)
        assert sum(len(entry.pages) for entry in in_transfer) == self._num_transfer
