"""Who replays a cache's changes expects the hit that there is, or less."""

import threading
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas.cache import store_records
from prfaas.cache.block_table import BlockTable
from prfaas.cache.changes import CacheSnapshot, ChangeLog, Changes
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout
from prfaas.cache.store import Store
from prfaas.scheduler.directory import BlockEvent, Directory, Snapshot
from tests.cache.stores import EPOCH_S, Hand, flip, opened, segments_of
from tests.cache.test_chains import LAYOUTS, TOKENS, layout_of
from tests.cache.tiered import DictStore, cache_over

EPOCH = 17
PROMPTS = st.lists(st.sampled_from([0, 1]), max_size=13)


@dataclass
class Scheduler:
    """What hears of a cache, and expects hits."""

    layout: CacheLayout
    directory: Directory = field(init=False)

    def __post_init__(self) -> None:
        has_places = layout_has_places(self.layout)
        self.directory = Directory(block_tokens=TOKENS, has_places=has_places)

    def hear(self, changes: Changes) -> None:
        event = BlockEvent(
            node="n",
            epoch=changes.epoch,
            sequence=changes.sequence,
            added=changes.added,
            removed=changes.removed,
            places_added=changes.places_added,
            places_removed=changes.places_removed,
        )
        assert self.directory.apply(event)
        self.directory.check()

    def see(self, snapshot: CacheSnapshot) -> None:
        assert self.directory.replace(
            Snapshot(
                node="n",
                epoch=snapshot.epoch,
                sequence=snapshot.sequence,
                keys=snapshot.keys,
                places=snapshot.places,
            )
        )
        self.directory.check()

    def hear_all(self, log: ChangeLog) -> None:
        while (changes := log.take(1000)) is not None:
            self.hear(changes)

    def expected(self, keys: tuple[bytes, ...]) -> int:
        return self.directory.lookup(keys).get("n", 0)


def layout_has_places(layout: CacheLayout) -> bool:
    return any(not spec.name.startswith(("full", "other")) for spec in layout.groups)


def log_of(cache: PrefixCache) -> ChangeLog:
    assert cache.changes is not None
    return cache.changes


def found(cache: PrefixCache, tokens: list[int] | range) -> BlockTable:
    """Look up as a server does, reading what must be read."""
    keys, promotion = cache.block_keys(tokens, b""), None
    while True:
        table = cache.find(keys, len(tokens), after=promotion)
        if promotion is not None:
            promotion.release()
        if isinstance(table, BlockTable):
            return table
        promotion = table
        promotion.read()


def compute(table: BlockTable, layout: CacheLayout, states: set[int]) -> None:
    """Publish all blocks behind the hit, of states those in `states`."""
    for block in range(table.hit_tokens // TOKENS, table.num_keys):
        for group, spec in enumerate(layout.groups):
            if spec.name == "state" and block not in states:
                continue
            if table.try_allocate(group, block) is not None:
                table.commit(group, block)


def serve(cache: PrefixCache, tokens: list[int] | range, states: set[int] | None = None) -> int:
    table = found(cache, tokens)
    compute(table, cache.layout, set(range(99)) if states is None else states)
    table.release()
    return table.hit_tokens


def evict_all(cache: PrefixCache) -> None:
    with cache.pool.lock:
        num_pages = cache.pool.num_free + cache.pool.num_cached
        entries = cache.pool.try_take([1] * num_pages, is_transfer=False)
        assert entries is not None
        for entry in entries:
            cache.pool.let_go(entry)


class AnyHistory(RuleBasedStateMachine):
    """Prompts are served and held, pages leave RAM and the disk, and messages are lost."""

    @initialize(
        name=st.sampled_from(list(LAYOUTS)),
        num_pages=st.integers(20, 60),
        has_disk=st.booleans(),
    )
    def start(self, name, num_pages, has_disk) -> None:
        self.layout = layout_of(LAYOUTS[name])
        self.store = DictStore()
        self.has_disk = has_disk
        self.cache = cache_over(
            self.store if has_disk else None, num_pages, layout=self.layout, epoch=EPOCH
        )
        self.num_pages = num_pages
        self.scheduler = Scheduler(self.layout)
        self.held: list[BlockTable] = []
        self.is_missing = False
        """Something that was said did not arrive."""

    @rule(tokens=PROMPTS, states=st.sets(st.integers(0, 5)), slides=st.booleans())
    def serve(self, tokens, states, slides):
        table = found(self.cache, tokens)
        compute(table, self.layout, states)
        if slides and not self.layout.has_states:
            table.slide(len(tokens) // TOKENS * TOKENS)
        self.held.append(table)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1))).release()

    @rule(num_pages=st.integers(1, 60))
    def evict(self, num_pages):
        with self.cache.pool.lock:
            entries = self.cache.pool.try_take([1] * num_pages, is_transfer=False) or []
            for entry in entries:
                self.cache.pool.let_go(entry)

    @precondition(lambda self: self.has_disk)
    @rule()
    def write(self):
        self.store.write()

    @precondition(lambda self: self.has_disk)
    @rule(tokens=PROMPTS, states=st.sets(st.integers(0, 5)))
    def spill(self, tokens, states):
        """What is wanted twice goes to disk, and then leaves RAM."""
        for _ in range(2):
            serve(self.cache, tokens, states)
        self.store.write()
        evict_all(self.cache)

    @precondition(lambda self: self.store.records)
    @rule(data=st.data(), is_lost=st.booleans())
    def lose_records(self, data, is_lost):
        keys = data.draw(st.sets(st.sampled_from(sorted(self.store.records)), min_size=1))
        if is_lost:
            self.store.lost |= keys  # noticed by whoever reads them
        else:
            self.store.remove(keys)

    @rule(max_keys=st.integers(1, 9), arrives=st.sampled_from([True, True, False]))
    def tell_some(self, max_keys, arrives):
        changes = log_of(self.cache).take(max_keys)
        if changes is None:
            return
        lists = (changes.added, changes.removed, changes.places_added, changes.places_removed)
        assert 1 <= sum(map(len, lists)) <= max_keys
        if not arrives:
            self.is_missing = True
            return
        self.scheduler.hear(changes)
        assert self.scheduler.directory.needs_snapshot("n") == self.is_missing

    @rule(arrives=st.sampled_from([True, True, False]))
    def tell_all(self, arrives):
        before = log_of(self.cache)._sequence
        snapshot = log_of(self.cache).snapshot()
        if arrives:
            self.scheduler.see(snapshot)
            self.is_missing = False
            assert not self.scheduler.directory.needs_snapshot("n")
        elif snapshot.sequence != before:
            self.is_missing = True

    @rule(tokens=PROMPTS)
    def who_has_heard_all_expects_the_hit_that_there_is(self, tokens):
        if self.is_missing:
            self.scheduler.see(log_of(self.cache).snapshot())
            self.is_missing = False
        self.scheduler.hear_all(log_of(self.cache))
        keys = self.cache.block_keys(tokens, b"")
        limit = max(0, len(tokens) - 1) // TOKENS
        expected = self.scheduler.expected(keys[:limit])
        is_whole = not any(
            (g, key) in self.store.lost for g in range(len(self.layout.groups)) for key in keys
        )
        table = found(self.cache, tokens)
        num_pages = self.layout.pages_per_block * limit
        has_room = self.num_pages - self.cache.counts().num_referenced > 2 * num_pages
        if is_whole and has_room:
            assert table.hit_tokens == expected
        else:
            assert table.hit_tokens <= expected
        table.release()

    @invariant()
    def the_account_is_right(self):
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self):
        if hasattr(self, "cache"):
            for table in self.held:
                table.release()
            self.store.write()
            self.cache.close()


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# ---------------------------------------------------------------- one by one


def test_a_cache_without_an_epoch_keeps_no_log():
    assert cache_over(None).changes is None


def test_nothing_is_told_twice_and_what_came_and_went_unseen_is_not_told():
    cache = cache_over(None, layout=layout_of(LAYOUTS["dense"]), epoch=EPOCH)
    log = log_of(cache)
    assert log.take(10) is None
    assert log.snapshot() == CacheSnapshot(epoch=EPOCH, sequence=0)
    serve(cache, range(4))
    keys = cache.block_keys(range(4), b"")
    assert log.take(10) == Changes(epoch=EPOCH, sequence=1, added=keys)
    assert log.take(10) is None
    evict_all(cache)
    serve(cache, range(4))
    assert log.take(10) is None
    serve(cache, range(50, 58))
    evict_all(cache)
    assert log.take(10) == Changes(epoch=EPOCH, sequence=2, removed=keys[::-1])
    cache.close()


def test_what_left_is_told_before_what_came():
    cache = cache_over(None, layout=layout_of(LAYOUTS["states"]), epoch=EPOCH)
    log = log_of(cache)
    serve(cache, range(8))
    assert log.take(100) is not None
    evict_all(cache)
    serve(cache, range(50, 54))
    first = log.take(7)
    assert first is not None
    assert (len(first.removed), len(first.places_removed)) == (4, 3)
    second = log.take(3)
    assert second is not None
    assert (len(second.places_removed), len(second.added)) == (1, 2)
    third = log.take(7)
    assert third is not None
    assert (third.sequence, third.added, len(third.places_added)) == (4, (), 2)
    cache.close()


def test_a_snapshot_that_was_lost_leaves_a_gap_if_it_held_news():
    cache = cache_over(None, layout=layout_of(LAYOUTS["dense"]), epoch=EPOCH)
    log, scheduler = log_of(cache), Scheduler(cache.layout)
    serve(cache, range(4))
    scheduler.hear_all(log)
    assert log.snapshot().sequence == 1, "nothing is new"
    serve(cache, range(50, 54))
    assert log.snapshot().sequence == 2
    serve(cache, range(60, 64))
    scheduler.hear_all(log)
    assert scheduler.directory.needs_snapshot("n")
    scheduler.see(log.snapshot())
    assert scheduler.expected(cache.block_keys(range(50, 54), b"")) == 4
    cache.close()


# ---------------------------------------------------------------- over a real store


def on_disk(store: Store) -> tuple[PrefixCache, Scheduler]:
    """A cache whose one prompt, of eight tokens, is only on disk, and a scheduler that knows."""
    cache = cache_over(store, layout=layout_of(LAYOUTS["dense"]), epoch=EPOCH)
    scheduler = Scheduler(cache.layout)
    serve(cache, range(9))
    assert serve(cache, range(9)) == 8, "what was hit is worth the disk"
    store.flush()
    evict_all(cache)
    scheduler.hear_all(log_of(cache))
    assert scheduler.expected(cache.block_keys(range(8), b"")) == 8
    return cache, scheduler


def test_what_was_read_from_disk_is_in_ram_whatever_becomes_of_the_disk(tmp_path):
    with opened(tmp_path) as store:
        cache, scheduler = on_disk(store)
        found(cache, range(9)).release()
        store.clear()
        scheduler.hear_all(log_of(cache))
        assert scheduler.expected(cache.block_keys(range(8), b"")) == 8
        evict_all(cache)
        hears_of_the_loss(cache, scheduler)


def test_after_a_restart_the_disk_is_told_of_as_prompts_come_by(tmp_path):
    with opened(tmp_path) as store:
        on_disk(store)[0].close()
    with opened(tmp_path) as store:
        cache = cache_over(store, layout=layout_of(LAYOUTS["dense"]), epoch=EPOCH + 1)
        scheduler = Scheduler(cache.layout)
        assert log_of(cache).take(100) is None
        found(cache, range(7)).release()
        scheduler.hear_all(log_of(cache))
        assert scheduler.expected(cache.block_keys(range(8), b"")) == 6
        evict_all(cache)
        scheduler.hear_all(log_of(cache))
        assert scheduler.expected(cache.block_keys(range(8), b"")) == 6
        cache.close()


def hears_of_the_loss(cache: PrefixCache, scheduler: Scheduler) -> None:
    scheduler.hear_all(log_of(cache))
    assert scheduler.expected(cache.block_keys(range(8), b"")) == 0
    table = found(cache, range(9))
    assert table.hit_tokens == 0
    table.release()
    cache.check()
    cache.close()


def test_records_that_expired_are_told_of_before_they_are_deleted(tmp_path):
    wall = Hand()
    with opened(tmp_path, ttl_s=1e6, wall=wall) as store:
        cache, scheduler = on_disk(store)
        wall.now_s = EPOCH_S + 2e6
        hears_of_the_loss(cache, scheduler)


def test_records_that_were_cleared_are_told_of(tmp_path):
    with opened(tmp_path) as store:
        cache, scheduler = on_disk(store)
        store.clear()
        hears_of_the_loss(cache, scheduler)


def test_more_removals_than_are_noted_are_found_out_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(store_records, "MAX_REMOVED", 2)
    with opened(tmp_path) as store:
        cache, scheduler = on_disk(store)
        store.clear()
        assert store.take_removed() is None
        assert store.take_removed() == []
        store._records._removed = None
        hears_of_the_loss(cache, scheduler)


def test_a_damaged_record_is_told_of_when_it_was_noticed(tmp_path):
    with opened(tmp_path) as store:
        cache, scheduler = on_disk(store)
        flip(segments_of(tmp_path)[0], 0)
        table = found(cache, range(9))  # the first block is the damaged one
        assert table.hit_tokens == 0
        table.release()
        evict_all(cache)
        hears_of_the_loss(cache, scheduler)


def test_a_store_that_fails_is_told_of_as_a_whole(tmp_path, monkeypatch):
    with opened(tmp_path) as store:
        cache, scheduler = on_disk(store)
        store._records._forget_all("a test")
        hears_of_the_loss(cache, scheduler)
        monkeypatch.setattr(store, "check", lambda: None)


# ---------------------------------------------------------------- threads


def test_changes_taken_while_an_engine_publishes_and_evicts_add_up():
    cache = cache_over(DictStore(), 40, layout=layout_of(LAYOUTS["states"]), epoch=EPOCH)
    log, scheduler = log_of(cache), Scheduler(cache.layout)
    is_done = threading.Event()

    def run() -> None:
        for number in range(150):
            serve(cache, range(number % 7 * 100, number % 7 * 100 + 10))
        is_done.set()

    engine = threading.Thread(target=run)
    engine.start()
    while not is_done.is_set():
        changes = log.take(5)
        if changes is not None:
            scheduler.hear(changes)
    engine.join()
    scheduler.hear_all(log)
    cache.check()
    hits = 0
    for number in range(7):
        tokens = range(number * 100, number * 100 + 10)
        expected = scheduler.expected(cache.block_keys(tokens, b"")[:4])
        with cache.pool.lock:
            log.check()
        table = cache.lookup(cache.block_keys(tokens, b""), len(tokens))
        assert table.hit_tokens == expected
        table.release()
        hits += expected > 0
    assert hits
    cache.close()
