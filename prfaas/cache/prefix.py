"""The face of the cache: look up a prompt's prefix, fill pages behind it, publish them.

The pool's lock is held for each call's bookkeeping only; keys are hashed and pages filled outside.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from prfaas.cache.block_table import BlockTable
from prfaas.cache.changes import ChangeLog
from prfaas.cache.groups import Presence, longest_hit, pinned_blocks, shared_blocks
from prfaas.cache.hashing import block_keys
from prfaas.cache.held import HeldBlocks
from prfaas.cache.lookups import LookupCounts, Openings, miss_reason
from prfaas.cache.policy import dense_worth
from prfaas.cache.pool import Entry, PagePool, PoolCounts
from prfaas.cache.presence import InRam, InRamOrOnDisk
from prfaas.cache.spec import CacheLayout, FullSpec
from prfaas.cache.tenants import tenant_of
from prfaas.cache.tiers import DiskTier, PageStore, Promotion
from prfaas.errors import ConfigError


class PrefixCache:
    """Block-aligned KV of prompts, shared by all requests of equal root (model, numerics, salt).

    With a `store`, what is published goes to the disk as well, and `find` looks there, too. With an
    `epoch`, greater than that of each cache before it, `changes` tells which blocks it can serve.
    """

    def __init__(
        self,
        *,
        layout: CacheLayout,
        ram_bytes: int,
        root: Callable[[bytes], bytes],
        store: PageStore | None = None,
        epoch: int | None = None,
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
        if epoch is not None:
            self.pool.changes = ChangeLog(layout, epoch=epoch, lock=self.pool.lock, store=store)
        self._root = root
        self._live: set[BlockTable] = set()
        self._counts = LookupCounts()
        self._openings = Openings()

    @property
    def changes(self) -> ChangeLog | None:
        """Which blocks it can serve, for others to be told; None without an epoch."""
        return self.pool.changes

    def block_keys(
        self, tokens: Sequence[int], salt: bytes, *, after: bytes | None = None
    ) -> tuple[bytes, ...]:
        """Return the keys of the whole blocks of `tokens`; those of another salt never match.

        `after` is the key of the block before `tokens`, if they do not start the prompt.
        """
        root = self._root(salt) if after is None else after
        return block_keys(root, tokens, self.layout.block_tokens)

    def lookup(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        *,
        salt: bytes = b"",
        is_counted: bool = True,
    ) -> BlockTable:
        """Return a table that pins the longest prefix in RAM which every group of layers can serve.

        The hit ends at a block and leaves at least one of the `num_tokens` prompt tokens to
        compute. The caller is the table's one holder. `salt` is that of the keys.
        """
        limit = self._limit(keys, num_tokens)
        with self.pool.lock:
            ram = InRam(self.pool, keys[:limit])
            num_blocks = self._longest(limit, ram)
            table = self._table(keys, ram, num_blocks, salt, ram)
            if is_counted:
                self._count(table, keys, num_tokens, limit, ram)
        return table

    def peek(self, keys: Sequence[bytes], num_tokens: int) -> int:
        """Return how many tokens `find` would find now; nothing is pinned, read, touched or counted."""
        limit = self._limit(keys, num_tokens)
        with self.pool.lock:
            ram = InRam(self.pool, keys[:limit])
            presence = ram if self.tier is None else InRamOrOnDisk(ram, self.tier.store)
            return self._longest(limit, presence) * self.layout.block_tokens

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
        limit = self._limit(keys, num_tokens)
        with self.pool.lock:
            ram = InRam(self.pool, keys[:limit])
            presence = ram if tier is None else InRamOrOnDisk(ram, tier.store)
            num_blocks = ram_blocks = self._longest(limit, ram)
            if ram_blocks < limit:
                num_blocks = self._longest(limit, presence)
            if tier is not None and ram_blocks < num_blocks:
                promotion = tier.try_promote(
                    ram,
                    num_blocks,
                    ram_tokens=ram_blocks * self.layout.block_tokens
                    if after is None
                    else after.ram_tokens,
                )
                if promotion is not None:
                    return promotion
            table = self._table(keys, ram, ram_blocks, salt, presence)
            is_anothers = opening is not None and self._openings.is_anothers(opening, salt)
            self._count(table, keys, num_tokens, limit, presence, after, is_anothers=is_anothers)
        if tier is not None:
            tier.touch(keys, ram_blocks)
        return table

    def _limit(self, keys: Sequence[bytes], num_tokens: int) -> int:
        return min(len(keys), max(0, num_tokens - 1) // self.layout.block_tokens)

    def _longest(self, limit: int, presence: Presence) -> int:
        return longest_hit(self.layout.groups, self.layout.block_tokens, limit, presence)

    def _shared(self, hit: int, limit: int, presence: Presence) -> int:
        """Return the leading blocks whose KV is there, at least those of the hit."""
        if not any(isinstance(spec, FullSpec) for spec in self.layout.groups):
            return hit
        return shared_blocks(self.layout.groups, limit, presence)

    def _table(
        self,
        keys: Sequence[bytes],
        ram: InRam,
        num_blocks: int,
        salt: bytes,
        presence: Presence,
    ) -> BlockTable:
        """Return a table that holds what a hit of so many blocks pins; RAM has it all."""
        held = []
        for group, blocks in enumerate(pinned_blocks(self.layout, num_blocks)):
            entries = cast("list[Entry]", ram.some(group, blocks))
            are_kept = self.pool.hold(entries)
            held.append(HeldBlocks(blocks, entries))
            is_full = isinstance(self.layout.groups[group], FullSpec)
            if not (is_full and (are_kept or self.tier is None)):
                self._note_hits(entries, salt)
        block_tokens, limit = self.layout.block_tokens, len(ram.keys)
        junction = 0
        if self.layout.has_states:
            junction = self._shared(num_blocks, limit, presence)
        table = BlockTable(
            layout=self.layout,
            pool=self.pool,
            live=self._live,
            keys=keys,
            hit_tokens=num_blocks * block_tokens,
            junction_tokens=junction * block_tokens if junction > num_blocks else 0,
            replay_tokens=limit * block_tokens,
            held=held,
            tier=self.tier,
            tenant=tenant_of(salt),
        )
        self._live.add(table)
        return table

    def _note_hits(self, entries: list[Entry], salt: bytes) -> None:
        """Let what is wanted again go to disk, and windows and states stay where prompts part."""
        for entry in entries:
            entry.was_hit = True
            if self.tier is not None and not entry.is_kept:
                self.tier.write_behind(entry, tenant_of(salt))

    def _count(
        self,
        table: BlockTable,
        keys: Sequence[bytes],
        num_tokens: int,
        limit: int,
        presence: Presence,
        promotion: Promotion | None = None,
        *,
        is_anothers: bool = False,
    ) -> None:
        """Count a lookup, and why it found no more."""
        hit = table.hit_tokens // self.layout.block_tokens
        reason = miss_reason(
            len(self.layout.groups),
            keys,
            hit,
            self._shared(hit, limit, presence),
            limit,
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
            if self.pool.changes is not None:
                self.pool.changes.check()
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
