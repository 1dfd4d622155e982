"""Prefixes come up from the disk beside the event loop, several threads to a promotion."""

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from prfaas.cache.block_table import BlockTable
from prfaas.cache.pool import Entry, PageKey
from prfaas.cache.prefix import PrefixCache
from prfaas.clock import monotonic_s
from prfaas.server.prefix_finder import MIN_SHARED_RECORDS, NUM_READERS, PrefixFinder
from tests.cache.tiered import BLOCK_TOKENS, DictStore, assert_whole, cache_over, serve

HANG_GUARD_S = 30
LONG = list(range(BLOCK_TOKENS * MIN_SHARED_RECORDS + 1))
SHORT = list(range(BLOCK_TOKENS * 2 + 1))

Wanted = Sequence[tuple[PageKey, Sequence[memoryview]]]


class WatchedStore(DictStore):
    """Notes which threads read; may wait until so many do, or fail in one."""

    def __init__(self) -> None:
        super().__init__()
        self.meeting: threading.Barrier | None = None
        self.fails_for: PageKey | None = None
        self.readers: list[str] = []
        self.num_reading = 0

    def get_many(self, wanted: Wanted) -> list[bool]:
        self.readers.append(threading.current_thread().name)
        self.num_reading += 1
        try:
            if self.meeting is not None:
                self.meeting.wait(HANG_GUARD_S)
            if self.fails_for in {key for key, _ in wanted}:
                raise RuntimeError("a fault of the store")
            if self.fails_for is not None:
                threading.Event().wait(0.05)  # still reading when the other has failed
            return super().get_many(wanted)
        finally:
            self.num_reading -= 1


@contextmanager
def stored(tokens: Sequence[int]) -> Iterator[tuple[WatchedStore, PrefixCache]]:
    """A cache with nothing in RAM over a store of one prompt."""
    store = WatchedStore()
    serve(cache_over(store), tokens)
    store.write()
    yield store, cache_over(store)


async def found(cache: PrefixCache, tokens: Sequence[int]) -> BlockTable:
    finder = PrefixFinder(cache, clock=monotonic_s)
    try:
        return await finder.find(tokens, b"")
    finally:
        await finder.close()


def test_a_long_promotion_is_read_by_all_readers_at_once() -> None:
    with stored(LONG) as (store, cache):
        store.meeting = threading.Barrier(NUM_READERS)
        table = asyncio.run(found(cache, LONG))
        assert len(set(store.readers)) == len(store.readers) == NUM_READERS
        assert threading.current_thread().name not in store.readers
        assert table.hit_tokens == len(LONG) - 1
        assert_whole(table, cache.block_keys(LONG, b""))
        table.release()
        cache.check()


def test_a_short_one_is_read_by_one() -> None:
    with stored(SHORT) as (store, cache):
        table = asyncio.run(found(cache, SHORT))
        assert len(store.readers) == 1
        assert table.hit_tokens == len(SHORT) - 1
        table.release()


def test_no_page_is_let_go_while_any_reader_still_reads(monkeypatch) -> None:
    with stored(LONG) as (store, cache):
        store.fails_for = (0, cache.block_keys(LONG, b"")[0])
        let_go = cache.pool.end_reading

        def end_reading(entry: Entry) -> None:
            assert store.num_reading == 0
            let_go(entry)

        monkeypatch.setattr(cache.pool, "end_reading", end_reading)
        with pytest.raises(RuntimeError, match="a fault of the store"):
            asyncio.run(found(cache, LONG))
        cache.check()
        assert cache.counts().num_referenced == 0


def test_the_ram_of_the_next_promotion_is_made_ready(monkeypatch) -> None:
    with stored(LONG) as (_, cache):
        asked: queue.Queue[int] = queue.Queue()
        monkeypatch.setattr(cache.pool, "prefault", asked.put)

        async def find_and_wait() -> None:
            finder = PrefixFinder(cache, clock=monotonic_s)
            eighth = len(cache.pool.arena) // 8
            assert asked.get(timeout=HANG_GUARD_S) == eighth
            (await finder.find(LONG, b"")).release()
            assert asked.get(timeout=HANG_GUARD_S) == eighth
            await finder.close()

        asyncio.run(find_and_wait())


def test_without_a_disk_no_ram_is_made_ready(monkeypatch) -> None:
    cache = cache_over(None)
    asked: list[int] = []
    monkeypatch.setattr(cache.pool, "prefault", asked.append)
    asyncio.run(found(cache, LONG)).release()
    assert asked == []
