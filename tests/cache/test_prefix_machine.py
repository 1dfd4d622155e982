"""The cache against a dictionary that does the same the obvious way, and under many threads."""

import threading
from dataclasses import dataclass, field
from math import log2
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from prfaas.cache.block_table import BlockTable
from prfaas.cache.hashing import root_key
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import (
    CacheLayout,
    FullSpec,
    StateSpec,
    WindowSpec,
    held_blocks,
    needed_blocks,
)

BLOCK_TOKENS = 2
PAGE_BYTES = 8
LAYOUT = CacheLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(
        FullSpec(name="full", layers=(1,), page_bytes=PAGE_BYTES),
        WindowSpec(name="window", layers=(0, 2), page_bytes=PAGE_BYTES, window_tokens=4),
        StateSpec(name="state", layers=(1, 3), page_bytes=PAGE_BYTES, state_bytes=12),
    ),
)
SIZES = [1, 2, 4]
LEAST_WORTH = BLOCK_TOKENS * 2**20 / PAGE_BYTES
GROUPS = st.sampled_from([0, 1, 2])
SALTS = st.sampled_from([b"", b"other tenant"])
PROMPTS = st.lists(st.sampled_from([0, 1]), max_size=11)
Place = tuple[int, int]
Key = tuple[int, bytes]


def make_cache(num_pages: int) -> PrefixCache:
    def root(salt: bytes) -> bytes:
        return root_key(
            model_fingerprint="m",
            numerics_fingerprint="n",
            kv_dtype="float32",
            layout=LAYOUT,
            salt=salt,
        )

    return PrefixCache(layout=LAYOUT, ram_bytes=num_pages * PAGE_BYTES, root=root)


def content(stamp: bytes, group: int, index: int) -> bytes:
    return stamp[: PAGE_BYTES - 2] + bytes([group, index])


@dataclass(eq=False)
class Model:
    """What one table should hold."""

    table: BlockTable
    tokens: list[int]
    keys: tuple[bytes, ...]
    held: dict[Place, bytes] = field(default_factory=dict)
    """(group, block) -> stamp of the bytes."""
    committed: set[Place] = field(default_factory=set)
    reserved: set[Place] = field(default_factory=set)
    parked: list[tuple[tuple[int, ...], bytes, int]] = field(default_factory=list)
    num_holders: int = 1
    landmarks: set[int] = field(default_factory=set)


class CacheMachine(RuleBasedStateMachine):
    """A tiny pool, so that almost every step evicts."""

    tables = Bundle("tables")

    @initialize(num_pages=st.integers(7, 45))
    def start(self, num_pages: int) -> None:
        self.cache = make_cache(num_pages)
        self.num_pages = num_pages
        self.models: list[Model] = []
        self.refs: dict[Key, int] = {}
        """Every published key and the tables that hold it."""
        self.worths: dict[Key, float] = {}
        self.ranks: dict[Key, tuple[bool, float, int]] = {}
        """Of every published key: whether warm, worth on the clock, order of use."""
        self.clock = 0.0
        self.num_uses = 0
        self.hits: set[Key] = set()
        self.num_private_pages = 0
        self.num_stamps = 0

    # ------------------------------------------------------------ the obvious way

    def hold(self, key: Key) -> None:
        self.refs[key] += 1

    def let_go(self, key: Key, worth: float) -> None:
        self.refs[key] -= 1
        self.rank(key, worth)

    def rank(self, key: Key, worth: float) -> None:
        """Use it last; a worth of 0 is cold."""
        self.num_uses += 1
        level = round(4 * log2(max(worth, LEAST_WORTH)))
        self.ranks[key] = (worth > 0, self.clock + 2 ** (level / 4), self.num_uses)

    def publish(self, key: Key, block: int, hit_tokens: int) -> None:
        """Tokens saved for each byte that must be kept for that."""
        position = (block + 1) * BLOCK_TOKENS
        tokens = max(BLOCK_TOKENS, position - hit_tokens)
        num_bytes = {0: PAGE_BYTES, 1: 2 * PAGE_BYTES, 2: 2 * 12}[key[0]]
        if key[0] == 0:
            tokens = BLOCK_TOKENS
        elif key[0] == 1:  # the blocks of the last three tokens
            num_bytes *= min(2, block + 1)
        self.refs[key] = 1
        self.worths[key] = tokens * 2**20 / num_bytes
        self.rank(key, self.worths[key])

    def idle(self) -> list[Key]:
        return [key for key, refs in self.refs.items() if not refs]

    def num_free(self) -> int:
        return self.num_pages - self.num_private_pages - sum(SIZES[g] for g, _ in self.refs)

    def take(self, num_pages: int) -> bool:
        idle = self.idle()
        if num_pages > self.num_free() + sum(SIZES[g] for g, _ in idle):
            return False
        while self.num_free() < num_pages:
            key = min(self.idle(), key=lambda key: self.ranks[key])
            is_warm, worth, _ = self.ranks.pop(key)
            self.clock = max(self.clock, worth) if is_warm else self.clock
            del self.refs[key], self.worths[key]
            self.hits.discard(key)
            for dependent in ((1, key[1]), (2, key[1])):  # of no use without its KV
                if key[0] == 0 and dependent in self.idle():
                    self.rank(dependent, 0.0)
        self.num_private_pages += num_pages
        return True

    def serves(self, keys: tuple[bytes, ...], num_blocks: int) -> bool:
        position = num_blocks * BLOCK_TOKENS
        for group, spec in enumerate(LAYOUT.groups):
            width = BLOCK_TOKENS
            if isinstance(spec, FullSpec):
                width = position
            elif isinstance(spec, WindowSpec):
                width = spec.window_tokens - 1
            for token in range(max(0, position - width), position):
                if (group, keys[token // BLOCK_TOKENS]) not in self.refs:
                    return False
        return True

    def write(self, model: Model, place: Place) -> None:
        group, block = place
        if block < len(model.keys):
            stamp = model.keys[block]
        else:
            self.num_stamps += 1
            stamp = self.num_stamps.to_bytes(PAGE_BYTES, "little")
        model.held[place] = stamp
        for index, page in enumerate(model.table.pages(group, block) or ()):
            model.table.view(page)[:] = content(stamp, group, index)

    # ------------------------------------------------------------ steps

    @rule(target=tables, tokens=PROMPTS, salt=SALTS)
    def lookup(self, tokens, salt):
        keys = self.cache.block_keys(tokens, salt)
        limit = min(len(keys), max(0, len(tokens) - 1) // BLOCK_TOKENS)
        expected = max(n for n in range(limit + 1) if self.serves(keys, n))
        shared = max(n for n in range(limit + 1) if all((0, k) in self.refs for k in keys[:n]))
        landmarks = {limit - 1, shared - 1 if shared > expected else -1}
        model = Model(table=self.cache.lookup(keys, len(tokens)), tokens=tokens, keys=keys)
        model.landmarks = landmarks
        assert model.table.hit_tokens == model.table.num_tokens == expected * BLOCK_TOKENS
        junction = shared * BLOCK_TOKENS if shared > expected else 0
        assert model.table.junction_tokens == junction
        for group, spec in enumerate(LAYOUT.groups):
            for block in held_blocks(spec, model.table.hit_tokens, BLOCK_TOKENS):
                key = (group, keys[block])
                self.hold(key)
                self.hits.add(key)
                model.held[group, block] = keys[block]
                model.committed.add((group, block))
        self.models.append(model)
        return model

    @rule(model=tables, group=GROUPS, block=st.integers(0, 6))
    def allocate(self, model, group, block):
        place = (group, block)
        is_held = place in model.held
        expected = is_held or self.take(SIZES[group])
        pages = model.table.try_allocate(group, block)
        assert (pages is not None) == expected
        if pages is not None and not is_held:
            self.write(model, place)

    @rule(model=tables, num_tokens=st.integers(0, 14))
    def reserve(self, model, num_tokens):
        places = [
            (group, block)
            for group, spec in enumerate(LAYOUT.groups)
            for block in needed_blocks(spec, num_tokens, BLOCK_TOKENS)
            if (group, block) not in model.held
        ]
        expected = self.take(sum(SIZES[group] for group, _ in places))
        assert model.table.try_reserve(num_tokens) == expected
        if expected:
            for place in places:
                self.write(model, place)
                model.reserved.add(place)
            model.table.set_num_tokens(num_tokens)
            assert model.table.num_tokens == num_tokens

    @rule(model=tables, data=st.data())
    def commit(self, model, data):
        if not model.held:
            return
        group, block = place = data.draw(st.sampled_from(sorted(model.held)))
        before = model.table.pages(group, block)
        model.table.commit(group, block)
        after = model.table.pages(group, block)
        if place in model.committed or block >= len(model.keys):
            assert after == before
            return
        key = (group, model.keys[block])
        model.committed.add(place)
        if key in self.refs:
            assert after != before
            self.hold(key)
            if model.num_holders > 1:
                model.parked.append((before, model.keys[block], group))
                if place in model.reserved:
                    return
            else:
                self.num_private_pages -= SIZES[group]
        else:
            assert after == before
            self.publish(key, block, model.table.hit_tokens)
            self.num_private_pages -= SIZES[group]
        model.reserved.discard(place)

    @rule(model=tables, num_tokens=st.integers(0, 14))
    def slide(self, model, num_tokens):
        model.table.slide(num_tokens)
        for group in (1, 2):
            first = needed_blocks(LAYOUT.groups[group], num_tokens, BLOCK_TOKENS).start
            for place in sorted(model.held):
                if place[0] == group and place[1] < first:
                    key = (group, model.keys[place[1]]) if place in model.committed else None
                    is_landmark = group == 2 and place[1] in model.landmarks
                    is_warm = key is not None and (key in self.hits or is_landmark)
                    self.drop(model, place, self.worths[key] if is_warm and key else 0.0)

    @rule(model=tables, group=GROUPS)
    def drop_private(self, model, group):
        model.table.drop_private(group)
        for place in sorted(model.held):
            if place[0] == group and place not in model.committed:
                self.drop(model, place)

    def drop(self, model: Model, place: Place, worth: float = 0.0) -> None:
        group, block = place
        del model.held[place]
        if place in model.committed:
            model.committed.discard(place)
            self.let_go((group, model.keys[block]), worth)
        else:
            self.num_private_pages -= SIZES[group]
            model.reserved.discard(place)

    @rule(target=tables, model=consumes(tables))
    def retain(self, model):
        model.table.retain()
        model.num_holders += 1
        return model

    @rule(model=consumes(tables), target=tables)
    def release_one_of_several(self, model):
        if model.num_holders > 1:
            model.num_holders -= 1
            model.table.release()
        return model

    @rule(model=consumes(tables))
    def release(self, model):
        for _ in range(model.num_holders):
            model.table.release()
        limit = min(len(model.keys), max(0, len(model.tokens) - 1) // BLOCK_TOKENS)
        goes_on = 0 < limit <= 2 * model.table.hit_tokens // BLOCK_TOKENS
        for group, block in sorted(model.held, key=lambda p: (p[0], -p[1])):
            self.drop(model, (group, block), LEAST_WORTH * (2 if goes_on else 1))
        self.num_private_pages -= sum(len(pages) for pages, _, _ in model.parked)
        self.models.remove(model)

    # ------------------------------------------------------------ always

    @invariant()
    def counts_agree(self):
        self.cache.check()
        counts = self.cache.counts()
        idle = sum(SIZES[group] for group, _ in self.idle())
        assert counts.num_free + counts.num_referenced + counts.num_cached == self.num_pages
        assert counts.num_free == self.num_free()
        assert counts.num_cached == idle
        assert counts.num_tables == len(self.models)
        if not any(model.parked for model in self.models):
            reserved = [place for model in self.models for place in model.reserved]
            assert counts.num_transfer == sum(SIZES[group] for group, _ in reserved)

    @invariant()
    def every_held_page_has_its_bytes(self):
        for model in self.models:
            for (group, block), stamp in model.held.items():
                pages = model.table.pages(group, block)
                assert pages is not None
                assert model.table.is_committed(group, block) == ((group, block) in model.committed)
                for index, page in enumerate(pages):
                    assert model.table.view(page) == content(stamp, group, index)
            for pages, stamp, group in model.parked:
                for index, page in enumerate(pages):
                    assert model.table.view(page) == content(stamp, group, index)

    def teardown(self):
        for model in self.models:
            for _ in range(model.num_holders):
                model.table.release()
        self.cache.check()
        counts = self.cache.counts()
        assert counts.num_referenced == counts.num_transfer == counts.num_tables == 0
        self.cache.close()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def serve_random_prompt(cache: PrefixCache, random: Random) -> list[str]:
    """Look up, compute, commit, slide and release as an engine does; return foreign bytes seen."""
    tokens = [random.randint(0, 1) for _ in range(random.randint(0, 14))]
    keys = cache.block_keys(tokens, b"")
    table = cache.lookup(keys, len(tokens))
    if random.random() < 0.3:
        table.try_reserve(len(tokens))
    for block in range(table.hit_tokens // BLOCK_TOKENS, len(keys)):
        for group in (0, 1, 2):
            pages = table.try_allocate(group, block)
            if pages is not None:
                for index, page in enumerate(pages):
                    table.view(page)[:] = content(keys[block], group, index)
                table.commit(group, block)
        table.slide(block * BLOCK_TOKENS)
    faults = [
        f"group {group} block {block}"
        for group in (0, 1, 2)
        for block, key in enumerate(keys)
        if table.is_committed(group, block)
        for index, page in enumerate(table.pages(group, block) or ())
        if table.view(page) != content(key, group, index)
    ]
    table.release()
    return faults


@pytest.mark.usefixtures("no_leaks")
def test_threads_that_share_a_tiny_pool_never_see_foreign_bytes():
    cache = make_cache(60)
    faults: list[str] = []
    num_done: list[int] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        random = Random(seed)
        start.wait()
        for _ in range(150):
            faults.extend(serve_random_prompt(cache, random))
        num_done.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert sorted(num_done) == [0, 1, 2, 3]
    cache.check()
    counts = cache.counts()
    assert counts.num_referenced == counts.num_transfer == counts.num_tables == 0
    assert counts.num_evictions > 0
    assert counts.lookups.num_hits > 0
    cache.close()
