"""The face of the cache: look up a prompt's prefix, fill pages behind it, publish them.

The pool's lock is held for each call's bookkeeping only; keys are hashed and pages filled outside.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prfaas.cache.groups import IsPresent, longest_hit, shared_blocks
from prfaas.cache.hashing import block_keys
from prfaas.cache.pool import Entry, PagePool, PoolCounts
from prfaas.cache.spec import CacheLayout, FullSpec, held_blocks, needed_blocks
from prfaas.errors import ConfigError


class BlockTable:
    """The pages that one request holds; made by `PrefixCache.lookup` with one holder.

    Methods may be called from any thread. Pages are written by whoever allocated them, until they
    are committed; from then on nobody writes them.
    """

    def __init__(
        self,
        *,
        layout: CacheLayout,
        pool: PagePool,
        live: "set[BlockTable]",
        keys: Sequence[bytes],
        hit_tokens: int,
        junction_tokens: int,
        held: list[dict[int, Entry]],
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._live = live
        self._keys = list(keys)
        self._hit_tokens = hit_tokens
        self._junction_tokens = junction_tokens
        self._num_tokens = hit_tokens
        self._held = held
        """For each group: block -> entry."""
        self._superseded: list[tuple[int, Entry]] = []
        """(group, our pages) of blocks that another request published first; still readable."""
        self._num_holders = 1

    @property
    def hit_tokens(self) -> int:
        """Length of the prefix hit; its pages are committed and pinned from the start."""
        return self._hit_tokens

    @property
    def junction_tokens(self) -> int:
        """Where another prompt parted from this one without a state left there; 0: nowhere.

        All KV up to there was cached, and is of no use to a layer with a state: one that is kept
        there now serves the next prompt that begins alike.
        """
        return self._junction_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the pages hold, so that the next one can be computed from them."""
        return self._num_tokens

    @property
    def num_keys(self) -> int:
        """Blocks that can be committed; the ones behind stay private to this table."""
        return len(self._keys)

    def pages(self, group: int, block: int) -> tuple[int, ...] | None:
        """Return the block's pages in their order within it, or None if it is not held."""
        with self._pool.lock:
            entry = self._held[group].get(block)
            return None if entry is None else entry.pages

    def is_committed(self, group: int, block: int) -> bool:
        """Return whether the block is held and whole: nobody may write it."""
        with self._pool.lock:
            entry = self._held[group].get(block)
            return entry is not None and entry.key is not None

    def view(self, page: int) -> memoryview:
        """Return the bytes of a held page, writable; write only before it is committed.

        The view has the pool's page size; the page itself may be shorter (`bytes_of_page`).
        """
        return self._pool.view(page)

    def try_allocate(self, group: int, block: int) -> tuple[int, ...] | None:
        """Return the block's pages, new ones if it was not held, or None if none can be freed."""
        with self._pool.lock:
            held = self._held[group]
            if block not in held:
                size = self._layout.groups[group].pages_per_block
                entries = self._pool.try_take([size], is_transfer=False)
                if entries is None:
                    return None
                held[block] = entries[0]
            return held[block].pages

    def try_reserve(self, num_tokens: int) -> bool:
        """Hold every block needed at `num_tokens`, or change nothing and return False.

        New pages count as transfer pages until they are committed.
        """
        with self._pool.lock:
            places = [
                (group, block)
                for group, spec in enumerate(self._layout.groups)
                for block in needed_blocks(spec, num_tokens, self._layout.block_tokens)
                if block not in self._held[group]
            ]
            sizes = [self._layout.groups[group].pages_per_block for group, _ in places]
            entries = self._pool.try_take(sizes, is_transfer=True)
            if entries is None:
                return False
            for (group, block), entry in zip(places, entries, strict=True):
                self._held[group][block] = entry
            return True

    def commit(self, group: int, block: int) -> None:
        """Publish a held block whose every page is whole and verified; again is harmless.

        If another request published the same key first, its pages take the place of ours: ask
        `pages` again. Ours are freed, or with a second holder, who may be reading them, kept until
        the table is released. A block without a key (the cut last one) stays private.
        """
        with self._pool.lock:
            entry = self._held[group][block]
            if entry.key is not None or block >= len(self._keys):
                return
            current = self._pool.publish(entry, (group, self._keys[block]))
            if current is entry:
                return
            self._held[group][block] = current
            if self._num_holders > 1:
                self._superseded.append((group, entry))
            else:
                self._pool.let_go(entry)

    def set_num_tokens(self, num_tokens: int) -> None:
        """State that the pages hold what goes on at exactly `num_tokens` tokens, of any number."""
        with self._pool.lock:
            for group, spec in enumerate(self._layout.groups):
                for block in held_blocks(spec, num_tokens, self._layout.block_tokens):
                    assert block in self._held[group], f"{spec.name} block {block} is not here"
            self._num_tokens = num_tokens

    def slide(self, num_tokens: int) -> None:
        """Let go, for all holders, of what no position from `num_tokens` on needs.

        Those are blocks of windows and older states. Committed ones stay cached but are the first to be evicted, unless a lookup has hit them.
        """
        with self._pool.lock:
            for group, spec in enumerate(self._layout.groups):
                if not isinstance(spec, FullSpec):
                    first = needed_blocks(spec, num_tokens, self._layout.block_tokens).start
                    held = self._held[group]
                    for block in sorted(b for b in held if b < first):
                        entry = held.pop(block)
                        self._pool.let_go(entry, is_cold=not entry.was_hit)

    def drop_private(self, group: int) -> None:
        """Let go of the group's blocks that were never committed; nobody may be reading them."""
        with self._pool.lock:
            held = self._held[group]
            for block in [b for b, entry in held.items() if entry.key is None]:
                self._pool.let_go(held.pop(block))

    def extend_keys(self, keys: Sequence[bytes]) -> None:
        """Append the keys of blocks that were completed later; they follow the ones known so far."""
        with self._pool.lock:
            self._keys.extend(keys)

    def retain(self) -> None:
        """Add a holder, who will call `release` once."""
        with self._pool.lock:
            assert self._num_holders > 0, "retained after the last release"
            self._num_holders += 1

    def release(self) -> None:
        """Remove a holder; with the last, let every page go.

        The end of the prompt becomes the oldest, so that it is evicted before what it builds on.
        """
        with self._pool.lock:
            assert self._num_holders > 0, "released more often than held"
            self._num_holders -= 1
            if self._num_holders:
                return
            places = [(block, group) for group, held in enumerate(self._held) for block in held]
            for block, group in sorted(places, reverse=True):
                self._pool.let_go(self._held[group].pop(block))
            for _, entry in self._superseded:
                self._pool.let_go(entry)
            self._superseded.clear()
            self._live.remove(self)

    def holdings(self) -> Iterator[tuple[int, Entry]]:
        """Yield (group, entry) for each reference of this table. Needs the pool's lock."""
        for group, held in enumerate(self._held):
            for entry in held.values():
                yield group, entry
        yield from self._superseded


class PrefixCache:
    """Block-aligned KV of prompts, shared by all requests of equal root (model, numerics, salt)."""

    def __init__(
        self, *, layout: CacheLayout, ram_bytes: int, root: Callable[[bytes], bytes]
    ) -> None:
        self.layout = layout
        self.pool = PagePool(ram_bytes, layout.page_bytes)
        if self.pool.num_pages < layout.pages_per_block:
            raise ConfigError(
                f"cache.ram_bytes = {ram_bytes} is less than one block of all layers: "
                f"{layout.pages_per_block * layout.page_bytes}"
            )
        self._root = root
        self._live: set[BlockTable] = set()
        self._num_queries = 0
        self._num_hits = 0
        self._num_query_tokens = 0
        self._num_hit_tokens = 0

    def block_keys(
        self, tokens: Sequence[int], salt: bytes, *, after: bytes | None = None
    ) -> tuple[bytes, ...]:
        """Return the keys of the whole blocks of `tokens`; those of another salt never match.

        `after` is the key of the block before `tokens`, if they do not start the prompt.
        """
        root = self._root(salt) if after is None else after
        return block_keys(root, tokens, self.layout.block_tokens)

    def lookup(self, keys: Sequence[bytes], num_tokens: int) -> BlockTable:
        """Return a table that pins the longest prefix which every group of layers can serve.

        The hit ends at a block and leaves at least one of the `num_tokens` prompt tokens to
        compute. The caller is the table's one holder.
        """
        layout, pool = self.layout, self.pool
        limit = min(len(keys), max(0, num_tokens - 1) // layout.block_tokens)
        with pool.lock:
            num_blocks = longest_hit(
                layout.groups, layout.block_tokens, limit, self._presence(keys)
            )
            hit_tokens = num_blocks * layout.block_tokens
            junction_tokens = self._junction(keys, limit) * layout.block_tokens
            held = []
            for group, spec in enumerate(layout.groups):
                blocks = held_blocks(spec, hit_tokens, layout.block_tokens)
                held.append({block: pool.hold((group, keys[block])) for block in blocks})
                for entry in held[group].values():
                    entry.was_hit = True
            table = BlockTable(
                layout=layout,
                pool=pool,
                live=self._live,
                keys=keys,
                hit_tokens=hit_tokens,
                junction_tokens=junction_tokens if junction_tokens > hit_tokens else 0,
                held=held,
            )
            self._live.add(table)
            self._num_queries += 1
            self._num_hits += hit_tokens > 0
            self._num_query_tokens += num_tokens
            self._num_hit_tokens += hit_tokens
        return table

    def _presence(self, keys: Sequence[bytes]) -> IsPresent:
        return lambda group, block: self.pool.is_published((group, keys[block]))

    def _junction(self, keys: Sequence[bytes], limit: int) -> int:
        """Return the leading blocks that other prompts share, where that takes a state to use."""
        groups = self.layout.groups
        if not self.layout.has_states or not any(isinstance(spec, FullSpec) for spec in groups):
            return 0
        return shared_blocks(groups, limit, self._presence(keys))

    def counts(self) -> PoolCounts:
        """Return pages by state and the totals, all of one moment."""
        with self.pool.lock:
            num_free, num_cached = self.pool.num_free, self.pool.num_cached
            return PoolCounts(
                num_pages=self.pool.num_pages,
                num_free=num_free,
                num_referenced=self.pool.num_pages - num_free - num_cached,
                num_cached=num_cached,
                num_transfer=self.pool.num_transfer,
                num_tables=len(self._live),
                num_queries=self._num_queries,
                num_hits=self._num_hits,
                num_query_tokens=self._num_query_tokens,
                num_hit_tokens=self._num_hit_tokens,
                num_evictions=self.pool.num_evictions,
            )

    def check(self) -> None:
        """Re-derive every count and reference; AssertionError names what is wrong."""
        with self.pool.lock:
            self.pool.check()
            refs: Counter[Entry] = Counter()
            for table in self._live:
                for group, entry in table.holdings():
                    refs[entry] += 1
                    assert entry.key is None or entry.key[0] == group
                    assert len(entry.pages) == self.layout.groups[group].pages_per_block
            for entry in self.pool.entries():
                assert entry.num_refs == refs[entry], "references and holders differ"
                assert entry.key is not None or entry.num_refs == 1, "a private page is shared"

    def close(self) -> None:
        """Give the memory back; the caller has released every table."""
        self.pool.close()
