"""The pages that one request holds."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prfaas.cache.groups import longest_hit, pinned_blocks, shared_blocks
from prfaas.cache.held import HeldBlocks
from prfaas.cache.policy import prompt_worth, worth_of
from prfaas.cache.pool import Entry, PagePool
from prfaas.cache.presence import InRam
from prfaas.cache.spec import (
    CacheLayout,
    FullSpec,
    held_blocks,
    needed_blocks,
    snapshot_blocks,
    snapshot_of_block,
)
from prfaas.cache.tiers import DiskTier


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshots:
    """Where windows and states are kept along a prompt."""

    every_tokens: int
    num_tokens: int
    is_held: bool


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
        replay_tokens: int,
        held: list[HeldBlocks],
        tier: DiskTier | None = None,
        tenant: bytes = b"",
    ) -> None:
        self._tier = tier
        self._tenant = tenant
        self._layout = layout
        self._pool = pool
        self._live = live
        self._keys = list(keys)
        self._landmarks = {junction_tokens, replay_tokens} - {0} if layout.has_states else set()
        """Positions where others will go on."""
        self._snapshots: list[_Snapshots] = []
        """Positions at even distances where others may."""
        self._dropped_tokens = 0
        """Held snapshots up to here are held no more."""
        self._hit_tokens = hit_tokens
        self._replay_tokens = replay_tokens
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
    def keys(self) -> Sequence[bytes]:
        """The keys of the blocks that can be committed; more may follow."""
        return self._keys

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

    @property
    def arena(self) -> memoryview:
        """All pages of the pool in one buffer, to read those that are held without a call for each."""
        return self._pool.arena

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
            worth = self._worth(group, block)
            current = self._pool.publish(
                entry,
                (group, self._keys[block]),
                worth=worth,
                before=self._keys[block - 1] if block else None,
            )
            if current is entry:
                if self._pool.changes is not None:
                    self._pool.changes.published(group, self._keys, block)
                if self._tier is not None:
                    self._tier.write_behind(entry, self._tenant)
                return
            self._held[group][block] = current
            if self._num_holders > 1:
                self._superseded.append((group, entry))
            else:
                self._pool.let_go(entry)

    def _worth(self, group: int, block: int) -> float:
        """Return what a block is worth; of a snapshot in a row, what lies since the one before."""
        position_tokens = (block + 1) * self._layout.block_tokens
        reused_tokens = self._hit_tokens
        if not self._is_landmark(group, block):
            for snapshots in self._snapshots:
                if at := self._snapshot_of(snapshots, group, block):
                    position_tokens = at
                    reused_tokens = max(reused_tokens, at - snapshots.every_tokens)
        return worth_of(self._layout, group, position_tokens, reused_tokens)

    def set_num_tokens(self, num_tokens: int) -> None:
        """State that the pages hold what goes on at exactly `num_tokens` tokens, of any number."""
        with self._pool.lock:
            for group, spec in enumerate(self._layout.groups):
                for block in held_blocks(spec, num_tokens, self._layout.block_tokens):
                    assert block in self._held[group], f"{spec.name} block {block} is not here"
            self._num_tokens = num_tokens

    def slide(self, num_tokens: int) -> None:
        """Let go, for all holders, of what no position from `num_tokens` on needs.

        Those are blocks of windows and older states, but for snapshots that are held. Committed
        ones stay cached. They are the first to be evicted, unless a lookup has hit them or others
        will go on from them: of a model with states where the prompt ends and where it parted from
        another, of any model at its snapshots.
        """
        with self._pool.lock:
            self._slide(num_tokens)

    def _slide(self, num_tokens: int) -> None:
        for group, spec in enumerate(self._layout.groups):
            if isinstance(spec, FullSpec):
                continue
            first = needed_blocks(spec, num_tokens, self._layout.block_tokens).start
            held = self._held[group]
            for block in sorted(b for b in held if b < first):
                if self._is_held_snapshot(group, block):
                    continue
                entry = held.pop(block)
                is_warm = (
                    entry.was_hit
                    or self._is_landmark(group, block)
                    or any(self._snapshot_of(s, group, block) for s in self._snapshots)
                )
                self._pool.let_go(entry, is_cold=not is_warm)

    def mark(self, num_tokens: int) -> None:
        """Note that others will go on at `num_tokens`, a whole number of blocks."""
        with self._pool.lock:
            self._landmarks.add(num_tokens)

    @property
    def landmarks(self) -> frozenset[int]:
        """Positions whose windows and states are worth keeping, whatever they cost."""
        with self._pool.lock:
            return frozenset(self._landmarks)

    def keep_snapshots(self, every_tokens: int, num_tokens: int, *, is_held: bool = False) -> None:
        """Let windows and states at the multiples of `every_tokens` stay cached, up to `num_tokens`.

        Held ones are also kept from eviction, until `drop_snapshots` or the last release. Call it
        before the first `slide`.
        """
        with self._pool.lock:
            self._snapshots.append(
                _Snapshots(every_tokens=every_tokens, num_tokens=num_tokens, is_held=is_held)
            )

    def drop_snapshots(self, num_tokens: int) -> None:
        """Hold the snapshots at positions up to `num_tokens` no more; the next `slide` lets them go.

        Nobody may be reading pages that no other position needs.
        """
        with self._pool.lock:
            self._dropped_tokens = max(self._dropped_tokens, num_tokens)

    def _is_landmark(self, group: int, block: int) -> bool:
        spec, block_tokens = self._layout.groups[group], self._layout.block_tokens
        return any(block in snapshot_blocks(spec, at, block_tokens) for at in self._landmarks)

    def _is_held_snapshot(self, group: int, block: int) -> bool:
        return any(
            self._snapshot_of(snapshots, group, block, after_tokens=self._dropped_tokens)
            for snapshots in self._snapshots
            if snapshots.is_held
        )

    def _snapshot_of(
        self, snapshots: _Snapshots, group: int, block: int, *, after_tokens: int = 0
    ) -> int:
        return snapshot_of_block(
            self._layout.groups[group],
            block,
            every_tokens=snapshots.every_tokens,
            num_tokens=snapshots.num_tokens,
            block_tokens=self._layout.block_tokens,
            after_tokens=after_tokens,
        )

    def let_go_of(self, group: int, block: int) -> None:
        """Hold a committed block no more; it stays cached while there is room. Nobody may be reading it."""
        with self._pool.lock:
            self._pool.let_go(self._held[group].pop(block))

    def drop_private(self, group: int) -> None:
        """Let go of the group's blocks that were never committed; nobody may be reading them."""
        with self._pool.lock:
            held = self._held[group]
            for block in [b for b, entry in held.items() if entry.key is None]:
                self._pool.let_go(held.pop(block))

    def look_again(self, num_tokens: int) -> int:
        """Return the hit in RAM as it is now, at least as long as before; its pages are pinned.

        For a table whose `num_tokens` are those of its hit, and into whose other pages nobody has
        written. It leaves at least one of the `num_tokens` prompt tokens to compute.
        """
        with self._pool.lock:
            assert self._num_tokens == self._hit_tokens, "pages behind the hit are in use"
            layout, block_tokens = self._layout, self._layout.block_tokens
            limit = min(len(self._keys), max(0, num_tokens - 1) // block_tokens)
            hit = self._hit_tokens // block_tokens
            full = [g for g, spec in enumerate(layout.groups) if isinstance(spec, FullSpec)]
            if hit >= limit or any(
                self._keys[hit] not in self._pool.published(group) for group in full
            ):
                return self._hit_tokens  # the common case, and cheap
            ram = InRam(self._pool, self._keys[:limit])
            num_blocks = longest_hit(layout.groups, block_tokens, limit, ram)
            if layout.has_states and full:
                shared = shared_blocks(layout.groups, limit, ram)
                if shared > num_blocks:
                    self._landmarks.add(shared * block_tokens)
            if num_blocks > hit:
                self._grow_hit(num_blocks, ram)
            return self._hit_tokens

    def _grow_hit(self, num_blocks: int, ram: InRam) -> None:
        """Pin a longer hit in place of what was reserved for it, and of the hit before."""
        for group, blocks in enumerate(pinned_blocks(self._layout, num_blocks)):
            held = self._held[group]
            for block, entry in zip(blocks, ram.some(group, blocks), strict=True):
                assert entry is not None, "a hit that is not there"
                mine = held.get(block)
                if mine is entry:
                    continue
                self._pool.hold([entry])
                entry.was_hit = True
                if mine is not None:
                    self._pool.let_go(mine)
                held[block] = entry
                if self._tier is not None and not entry.is_kept:
                    self._tier.write_behind(entry, self._tenant)
        self._hit_tokens = self._num_tokens = num_blocks * self._layout.block_tokens
        self._slide(self._hit_tokens)

    def num_shared_blocks(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks are those of another prompt, whose `keys` these are."""
        own = self._keys  # a key names all that comes before it
        most = min(len(own), len(keys))
        return bisect_left(range(most), True, key=lambda block: own[block] != keys[block])

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
            worth = prompt_worth(self._layout, self._hit_tokens, self._replay_tokens)
            for held in self._held:
                self._pool.let_go_all(held.from_the_end(), worth=worth)
                held.clear()
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
