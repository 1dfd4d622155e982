"""The pages that one request holds."""

from collections.abc import Iterator, Sequence

from prfaas.cache.policy import worth_of
from prfaas.cache.pool import Entry, PagePool
from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec, held_blocks, needed_blocks
from prfaas.cache.tiers import DiskTier


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
        held: list[dict[int, Entry]],
        tier: DiskTier | None = None,
        tenant: bytes = b"",
    ) -> None:
        self._tier = tier
        self._tenant = tenant
        self._layout = layout
        self._pool = pool
        self._live = live
        self._keys = list(keys)
        self._landmarks = {at // layout.block_tokens - 1 for at in (junction_tokens, replay_tokens)}
        """Blocks at whose end others will go on."""
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
            position_tokens = (block + 1) * self._layout.block_tokens
            worth = worth_of(self._layout, group, position_tokens, self._hit_tokens)
            current = self._pool.publish(entry, (group, self._keys[block]), worth=worth)
            if current is entry:
                if self._tier is not None:
                    self._tier.write_behind(entry, self._tenant)
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

        Those are blocks of windows and older states; but for the states where the prompt ends and
        where it parted from another, which the next prompts start from. Committed ones stay cached but are the first to be evicted, unless a lookup has hit them.
        """
        with self._pool.lock:
            for group, spec in enumerate(self._layout.groups):
                if not isinstance(spec, FullSpec):
                    first = needed_blocks(spec, num_tokens, self._layout.block_tokens).start
                    held = self._held[group]
                    for block in sorted(b for b in held if b < first):
                        entry = held.pop(block)
                        is_cold = not entry.was_hit and not (
                            isinstance(spec, StateSpec) and block in self._landmarks
                        )
                        self._pool.let_go(entry, is_cold=is_cold)

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
