"""The face of the cache: look up a prompt's prefix, fill pages behind it, publish them.

The pool's lock is held for each call's bookkeeping only; keys are hashed and pages filled outside.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from prfaas.cache.block_table import BlockTable
from prfaas.cache.groups import IsPresent, longest_hit, shared_blocks
from prfaas.cache.hashing import block_keys
from prfaas.cache.lookups import LookupCounts, Openings, miss_reason
from prfaas.cache.policy import dense_worth
from prfaas.cache.pool import Entry, PageKey, PagePool, PoolCounts
from prfaas.cache.spec import CacheLayout, FullSpec, held_blocks
from prfaas.cache.tenants import tenant_of
from prfaas.cache.tiers import DiskTier, PageStore, Promotion
from prfaas.errors import ConfigError


class PrefixCache:
    """Block-aligned KV of prompts, shared by all requests of equal root (model, numerics, salt).

    With a `store`, what is published goes to the disk as well, and `find` looks there, too.
    """

    def __init__(
        self,
        *,
        layout: CacheLayout,
        ram_bytes: int,
        root: Callable[[bytes], bytes],
        store: PageStore | None = None,
    ) -> None:
        self.layout = layout
        supporting = [g for g, spec in enumerate(layout.groups) if isinstance(spec, FullSpec)]
        self.pool = PagePool(
            ram_bytes,
            layout.page_bytes,
            least_worth=dense_worth(layout),
            supporting=supporting,
            supported=[g for g in range(len(layout.groups)) if g not in supporting],
        )
        self.tier = None if store is None else DiskTier(layout, self.pool, store)
        if self.pool.num_pages < layout.pages_per_block:
            raise ConfigError(
                f"cache.ram_bytes = {ram_bytes} is less than one block of all layers: "
                f"{layout.pages_per_block * layout.page_bytes}"
            )
        self._root = root
        self._live: set[BlockTable] = set()
        self._counts = LookupCounts()
        self._openings = Openings()

    def block_keys(
        self, tokens: Sequence[int], salt: bytes, *, after: bytes | None = None
    ) -> tuple[bytes, ...]:
        """Return the keys of the whole blocks of `tokens`; those of another salt never match.

        `after` is the key of the block before `tokens`, if they do not start the prompt.
        """
        root = self._root(salt) if after is None else after
        return block_keys(root, tokens, self.layout.block_tokens)

    def lookup(self, keys: Sequence[bytes], num_tokens: int, *, salt: bytes = b"") -> BlockTable:
        """Return a table that pins the longest prefix in RAM which every group of layers can serve.

        The hit ends at a block and leaves at least one of the `num_tokens` prompt tokens to
        compute. The caller is the table's one holder. `salt` is that of the keys.
        """
        limit = self._limit(keys, num_tokens)
        is_present = self._presence(keys)
        with self.pool.lock:
            num_blocks = self._longest(limit, is_present)
            held, _ = self._hold(keys, num_blocks)
            table = self._table(keys, limit, held, num_blocks, salt, is_present)
            self._count(table, keys, num_tokens, is_present)
        return table

    def find(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        *,
        salt: bytes = b"",
        opening: bytes | None = None,
        after: Promotion | None = None,
    ) -> BlockTable | Promotion:
        """Return the table of the longest hit in RAM and on disk, or what must be read before.

        A promotion is read and then given to the next call as `after`; it is released when that has
        returned. What cannot be read is no part of the hit. `opening` names the prompt's first
        block without a salt, to tell why there is no hit. Touches no disk.
        """
        tier = self.tier
        in_ram = is_present = self._presence(keys)
        if tier is not None:
            known = tier.store.known

            def is_present(group: int, block: int) -> bool:
                return in_ram(group, block) or known((group, keys[block]))

        limit = self._limit(keys, num_tokens)
        with self.pool.lock:
            num_blocks = self._longest(limit, is_present)
            held, absent = self._hold(keys, num_blocks)
            if absent:
                assert tier is not None
                ram_blocks = self._longest(limit, in_ram)
                promotion = tier.try_promote(
                    [entry for entries in held for entry in entries.values()],
                    absent,
                    ram_tokens=ram_blocks * self.layout.block_tokens
                    if after is None
                    else after.ram_tokens,
                )
                if promotion is not None:
                    return promotion
                num_blocks = ram_blocks
                held, _ = self._hold(keys, num_blocks)
            table = self._table(keys, limit, held, num_blocks, salt, is_present)
            is_anothers = opening is not None and self._openings.is_anothers(opening, salt)
            self._count(table, keys, num_tokens, is_present, after, is_anothers=is_anothers)
        if tier is not None:
            tier.touch(keys, num_blocks)
        return table

    def _limit(self, keys: Sequence[bytes], num_tokens: int) -> int:
        return min(len(keys), max(0, num_tokens - 1) // self.layout.block_tokens)

    def _longest(self, limit: int, is_present: IsPresent) -> int:
        return longest_hit(self.layout.groups, self.layout.block_tokens, limit, is_present)

    def _hold(
        self, keys: Sequence[bytes], num_blocks: int
    ) -> tuple[list[dict[int, Entry]], list[tuple[PageKey, int]]]:
        """Hold what a hit of so many blocks pins; return it, and the (key, block) not in RAM."""
        block_tokens = self.layout.block_tokens
        held: list[dict[int, Entry]] = []
        absent: list[tuple[PageKey, int]] = []
        for group, spec in enumerate(self.layout.groups):
            entries: dict[int, Entry] = {}
            for block in held_blocks(spec, num_blocks * block_tokens, block_tokens):
                entry = self.pool.try_hold((group, keys[block]))
                if entry is None:
                    absent.append(((group, keys[block]), block))
                else:
                    entries[block] = entry
            held.append(entries)
        return held, absent

    def _table(
        self,
        keys: Sequence[bytes],
        limit: int,
        held: list[dict[int, Entry]],
        num_blocks: int,
        salt: bytes,
        is_present: IsPresent,
    ) -> BlockTable:
        """Return a table over what is held."""
        for entries in held:
            for entry in entries.values():
                entry.was_hit = True
                if self.tier is not None and not entry.is_kept:
                    self.tier.write_behind(entry, tenant_of(salt))
        hit_tokens = num_blocks * self.layout.block_tokens
        junction_tokens = self._junction(num_blocks, limit, is_present) * self.layout.block_tokens
        table = BlockTable(
            layout=self.layout,
            pool=self.pool,
            live=self._live,
            keys=keys,
            hit_tokens=hit_tokens,
            junction_tokens=junction_tokens if junction_tokens > hit_tokens else 0,
            replay_tokens=limit * self.layout.block_tokens,
            held=held,
            tier=self.tier,
            tenant=tenant_of(salt),
        )
        self._live.add(table)
        return table

    def _count(
        self,
        table: BlockTable,
        keys: Sequence[bytes],
        num_tokens: int,
        is_present: IsPresent,
        promotion: Promotion | None = None,
        *,
        is_anothers: bool = False,
    ) -> None:
        """Count a lookup, and why it found no more."""
        reason = miss_reason(
            self.layout,
            keys,
            table.hit_tokens // self.layout.block_tokens,
            self._limit(keys, num_tokens),
            is_present,
            self.pool.was_evicted,
        )
        if is_anothers and not table.hit_tokens and reason == "no_prefix":
            reason = "other_tenant"
        self._counts.add(
            num_tokens,
            hit_tokens=table.hit_tokens,
            ram_tokens=table.hit_tokens if promotion is None else promotion.ram_tokens,
            reason=reason,
        )

    def _presence(self, keys: Sequence[bytes]) -> IsPresent:
        published = self.pool.published  # asked for every block of a prompt: no call in between
        return lambda group, block: (group, keys[block]) in published

    def _junction(self, hit: int, limit: int, is_present: IsPresent) -> int:
        """Return the leading blocks that other prompts share, where that takes a state to use."""
        groups = self.layout.groups
        if not self.layout.has_states or not any(isinstance(spec, FullSpec) for spec in groups):
            return 0
        return shared_blocks(groups, limit, is_present, start=hit)

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
                lookups=self._counts.copy(),
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
            if self.tier is not None:
                self.tier.check()
                refs.update(self.tier.writing)
                for promotion in self.tier.promotions:
                    refs.update(promotion.entries())
            for entry in self.pool.entries():
                assert entry.num_refs == refs[entry], "references and holders differ"
                assert entry.key is not None or entry.num_refs == 1, "a private page is shared"

    def close(self) -> None:
        """Give the memory back; the caller has released every table, and closed the store."""
        self.pool.close()
