"""One arena of equal pages and the account of who holds each.

A page is free, or belongs to one `Entry`: the pages of one (group, block). An entry
is referenced while block tables hold it. When the last lets go, a published entry stays cached until
its pages are needed, any other is freed. So free + referenced + cached = all pages, always.
"""

import mmap
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, KeysView, Sequence
from dataclasses import dataclass

from prfaas.cache.lookups import LookupCounts
from prfaas.cache.policy import EvictionOrder, Rank
from prfaas.errors import ConfigError

PageKey = tuple[int, bytes]
"""(group, block key): what an entry is published under."""

MAX_GONE = 1 << 16
"""Evicted keys that are remembered, to say why a lookup found nothing."""


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """The pages of one (group, block), of all its layers; lives and dies whole."""

    pages: tuple[int, ...]
    num_refs: int = 1
    """Block tables, reads and writes that hold it."""
    key: PageKey | None = None
    """Set once, when published: from then on the bytes are whole and never change."""
    is_transfer: bool = False
    """Reserved for bytes on their way from a peer, and not yet published."""
    was_hit: bool = False
    """A lookup found it: a place where prompts part ways."""
    worth: float = 0.0
    """Tokens that it saves per MiB; see `policy.worth_of`."""
    was_gone: bool = False
    """It had been evicted lately when it was published."""
    is_kept: bool = False
    """A lower tier has it, or will."""
    rank: Rank | None = None
    """Its place among the idle, from its last use by a block table."""


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
        # Private: a forked child cannot write our pages. Pages take memory once they are touched.
        self._map: mmap.mmap | None = mmap.mmap(
            -1, self.num_pages * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._arena = memoryview(self._map)
        self.lock = threading.Lock()
        self._free = list(range(self.num_pages - 1, -1, -1))  # a stack; low numbers come first
        self._owner: list[Entry | None] = [None] * self.num_pages
        self._index: dict[PageKey, Entry] = {}
        self._idle: EvictionOrder[Entry] = EvictionOrder()
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

    def close(self) -> None:
        """Give the memory back as soon as the last view or tensor over it is gone."""
        self._arena.release()
        self._map = None

    # ------------------------------------------------------------ under the lock

    @property
    def published(self) -> KeysView[PageKey]:
        """The keys of published entries, as they are at each look. Needs the lock."""
        return self._index.keys()

    def was_evicted(self, key: PageKey) -> bool:
        """Return whether it was published and is among the latest evicted. Needs the lock."""
        return key in self._gone

    def try_hold(self, key: PageKey) -> Entry | None:
        """Return the published entry with one reference more, or None. Needs the lock."""
        entry = self._index.get(key)
        if entry is not None:
            if entry.num_refs == 0:
                self._idle.remove(entry)
                self._num_cached -= len(entry.pages)
            entry.num_refs += 1
        return entry

    def hold(self, key: PageKey) -> Entry:
        """Return an entry that is published, with one reference more. Needs the lock."""
        entry = self.try_hold(key)
        assert entry is not None, "not published"
        return entry

    def try_take(self, sizes: Sequence[int], *, is_transfer: bool) -> list[Entry] | None:
        """Return one new entry of each size with a reference each, or None and change nothing.

        Evicts cached entries in the order of `policy.EvictionOrder`. Needs the lock.
        """
        num_pages = sum(sizes)
        if num_pages > len(self._free) + self._num_cached:
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

    def publish(self, entry: Entry, key: PageKey, *, worth: float = 0.0) -> Entry:
        """Return the entry that `key` names from now on, referenced by the caller.

        Either `entry` itself, or the one that was published first: then the caller has a reference
        to each, and lets `entry` go when nobody reads it. Needs the lock.
        """
        assert entry.key is None, "published twice"
        if key in self._index:
            return self.hold(key)
        if entry.is_transfer:
            entry.is_transfer = False
            self._num_transfer -= len(entry.pages)
        entry.key, entry.worth, entry.was_gone = key, worth, key in self._gone
        self._index[key] = entry
        self._gone.pop(key, None)
        return entry

    def let_go(self, entry: Entry, *, is_cold: bool = False) -> None:
        """Drop one reference; with the last, cache the entry if published, else free its pages.

        A cold entry is evicted before any warm one. Needs the lock.
        """
        entry.rank = self._rank(entry, is_cold=is_cold)
        self.end_reading(entry)

    def end_reading(self, entry: Entry) -> None:
        """Drop one reference, as `let_go` does, that was no use: its place stays. Needs the lock."""
        assert entry.num_refs > 0, "let go more often than held"
        entry.num_refs -= 1
        if entry.num_refs:
            return
        if entry.key is None:
            self._free_pages(entry)
            return
        if entry.rank is None:
            entry.rank = self._rank(entry)
        self._idle.add(entry, entry.rank)
        self._num_cached += len(entry.pages)

    def chill(self, key: PageKey) -> None:
        """Let an idle entry leave before any warm one: nobody can use it. Needs the lock."""
        entry = self._index.get(key)
        if entry is not None and entry in self._idle:
            entry.rank = self._rank(entry, is_cold=True)
            self._idle.add(entry, entry.rank)

    def _rank(self, entry: Entry, *, is_cold: bool = False) -> Rank:
        return self._idle.rank(max(entry.worth, self._least_worth), is_cold=is_cold)

    def _evict_one(self) -> None:
        entry = self._idle.pop()
        assert entry.key is not None
        del self._index[entry.key]
        self._gone[entry.key] = None
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        self._num_cached -= len(entry.pages)
        self._num_evictions += 1
        self._free_pages(entry)
        if entry.key[0] in self._supporting:
            for group in self._supported:
                self.chill((group, entry.key[1]))

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
        assert published == self._index, "the index and the owners differ"
        self._idle.check()
        idle = {entry for entry in entries if entry.num_refs == 0}
        assert len(idle) == len(self._idle), "idle entries and those that can leave differ"
        assert all(entry in self._idle for entry in idle), "an idle entry would never leave"
        assert not self._gone.keys() & self._index.keys(), "a published key counts as evicted"
        assert len(self._gone) <= MAX_GONE
        assert all(entry.key is not None for entry in idle), "an idle entry was never published"
        assert sum(len(entry.pages) for entry in idle) == self._num_cached
        in_transfer = [entry for entry in entries if entry.is_transfer]
        assert all(entry.key is None for entry in in_transfer)
        assert sum(len(entry.pages) for entry in in_transfer) == self._num_transfer
