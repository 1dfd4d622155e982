"""The cache over a real store against the obvious: what is in RAM or known is the hit, to the byte.

Prompts are inserted, matched and held, pages evicted and persisted; the store crashes, is opened
again, damaged and cleared.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from prfaas.cache.block_table import BlockTable  # noqa: TC001  hypothesis reads hints
from prfaas.cache.spec import held_blocks
from prfaas.cache.store import Store  # noqa: TC001
from tests.cache.stores import open_store, segments_of
from tests.cache.tiered import BLOCK_TOKENS, LAYOUT, assert_whole, cache_over, compute, find

pytestmark = pytest.mark.slow
PROMPTS = st.lists(st.sampled_from([0, 1]), max_size=11)
SALTS = st.sampled_from([b"", b"a" * 32, b"b" * 32])


class TieredMachine(RuleBasedStateMachine):
    """Prompts are served and kept; the store crashes, reopens, is damaged and cleared."""

    tables = Bundle("tables")

    @initialize(num_pages=st.integers(14, 60))
    def start(self, num_pages: int) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.num_pages = num_pages
        self.held: list[tuple[BlockTable, tuple[bytes, ...]]] = []
        self.published: set[tuple[int, bytes]] = set()
        self.durable: set[tuple[int, bytes]] = set()
        """What was committed to disk and neither damaged nor cleared since."""
        self.is_damaged = False
        self.open()

    def open(self) -> None:
        self.store: Store = open_store(self.directory)
        self.cache = cache_over(self.store, self.num_pages)

    def expected(self, keys: tuple[bytes, ...], limit: int) -> int:
        """The longest hit by its definition, over what is in RAM or known to be on disk."""

        def has(group: int, block: int) -> bool:
            key = (group, keys[block])
            in_ram = keys[block] in self.cache.pool.published(group)
            return in_ram or self.store.known(key)

        return max(
            n
            for n in range(limit + 1)
            if all(
                has(group, block)
                for group, spec in enumerate(LAYOUT.groups)
                for block in held_blocks(spec, n * BLOCK_TOKENS, BLOCK_TOKENS)
            )
        )

    @rule(target=tables, tokens=PROMPTS, salt=SALTS, states=st.sets(st.integers(0, 5)))
    def serve(self, tokens, salt, states):
        keys = self.cache.block_keys(tokens, salt)
        limit = max(0, len(tokens) - 1) // BLOCK_TOKENS
        before = self.expected(keys, limit)
        table = find(self.cache, keys, len(tokens), salt)
        hit = table.hit_tokens // BLOCK_TOKENS
        assert hit <= before
        for group, spec in enumerate(LAYOUT.groups):
            for block in held_blocks(spec, table.hit_tokens, BLOCK_TOKENS):
                assert (group, keys[block]) in self.published
        compute(table, keys, states)
        assert_whole(table, keys)
        self.published |= {
            (group, keys[block])
            for group in range(len(LAYOUT.groups))
            for block in range(len(keys))
            if table.is_committed(group, block)
        }
        self.held.append((table, keys))
        return table

    @rule(table=consumes(tables))
    def release(self, table):
        if any(held is table for held, _ in self.held):  # else a restart released it
            self.held = [pair for pair in self.held if pair[0] is not table]
            table.release()

    @rule(tokens=PROMPTS, salt=SALTS)
    def with_room_and_whole_files_the_hit_is_all_that_is_there(self, tokens, salt):
        self.store.flush()
        keys = self.cache.block_keys(tokens, salt)
        limit = max(0, len(tokens) - 1) // BLOCK_TOKENS
        table = find(self.cache, keys, len(tokens), salt)
        if self.num_pages - self.cache.counts().num_referenced > 7 * limit:
            assert table.hit_tokens // BLOCK_TOKENS == self.expected(keys, limit)
        table.release()

    @rule()
    def evict(self):
        """Take all that nobody holds: then RAM has only what is held, the disk all it had."""
        with self.cache.pool.lock:
            num_pages = self.cache.pool.num_free + self.cache.pool.num_cached
            entries = self.cache.pool.try_take([1] * num_pages, is_transfer=False)
            assert entries is not None
            assert self.cache.pool.num_cached == 0
            for group in range(len(LAYOUT.groups)):
                assert all(e.num_refs for e in self.cache.pool.published(group).values())
            for entry in entries:
                self.cache.pool.let_go(entry)
        self.persisted_is_known()

    @rule()
    def persist(self):
        self.store.flush()
        self.store.check()
        if not self.is_damaged:
            self.durable = {key for key in self.published if self.store.known(key)}

    def persisted_is_known(self) -> None:
        assert all(self.store.known(key) for key in self.durable)

    @rule(is_clean=st.booleans())
    def restart(self, is_clean):
        for table, _ in self.held:
            table.release()
        self.held.clear()
        self.store.close(drain=is_clean)
        self.cache.check()
        assert self.cache.counts().num_referenced == 0
        self.cache.close()
        self.open()
        self.persisted_is_known()

    @rule(which=st.integers(0, 1 << 16), where=st.integers(0, 1 << 20))
    def damage(self, which, where):
        """What is drawn does not hang on the files: how far the store's thread had come is its own affair."""
        self.store.flush()
        paths = [path for path in segments_of(self.directory) if path.stat().st_size]
        if not paths:
            return
        self.is_damaged = True
        self.durable.clear()
        path = paths[which % len(paths)]
        at = where % path.stat().st_size
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x40]))

    @rule()
    def clear(self):
        self.store.flush()
        self.store.clear()
        self.durable.clear()
        self.is_damaged = False

    @invariant()
    def every_count_adds_up(self):
        self.cache.check()
        for table, keys in self.held:
            assert_whole(table, keys)

    def teardown(self):
        for table, _ in self.held:
            table.release()
        self.store.close()
        self.cache.check()
        assert self.cache.counts().num_referenced == 0
        self.cache.close()
        shutil.rmtree(self.directory)


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
