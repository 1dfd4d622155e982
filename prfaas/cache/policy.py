"""What is worth its bytes: which pages leave first, and which go to disk. Pure.

The measure is the work that an entry saves per byte it takes. A block of full attention saves its own
tokens; a state or a window saves all tokens since the last place from which the prompt could be
continued without it: deep in a long prompt that is worth far more than its bytes.
"""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec, held_blocks

Item = TypeVar("Item", bound=Hashable)
Rank = tuple[bool, float, int]
"""(is warm, worth on top of the clock, order of use): the least leaves first."""

MIB = 1 << 20
FIRST_SIGHT_SHARE = 0.25


def worth_of(layout: CacheLayout, group: int, position_tokens: int, reused_tokens: int) -> float:
    """Return the tokens that a published block saves for each MiB that has to be kept with it.

    Args:
        layout: of the cache.
        group: the block's.
        position_tokens: where the block ends.
        reused_tokens: where the prompt could be continued before the block was there.
    """
    spec = layout.groups[group]
    if isinstance(spec, FullSpec):
        num_bytes = sum(
            other.page_bytes * other.pages_per_block
            for other in layout.groups
            if isinstance(other, FullSpec)
        )
        return layout.block_tokens * MIB / num_bytes
    if isinstance(spec, StateSpec):
        num_bytes = spec.state_bytes * len(spec.layers)
    else:
        num_blocks = len(held_blocks(spec, position_tokens, layout.block_tokens))
        num_bytes = spec.page_bytes * spec.pages_per_block * num_blocks
    return max(layout.block_tokens, position_tokens - reused_tokens) * MIB / num_bytes


def dense_worth(layout: CacheLayout) -> float:
    """Return the worth of full attention's blocks; 0 where there are none.

    In RAM nothing ranks below it: a snapshot of a short prompt saves less for its own bytes, but
    without it the blocks under it are of no use, either.
    """
    full = (g for g, spec in enumerate(layout.groups) if isinstance(spec, FullSpec))
    return max((worth_of(layout, group, layout.block_tokens, 0) for group in full), default=0.0)


def is_worth_disk(worth: float, dense: float, *, is_second_sight: bool) -> bool:
    """Return whether a block is written to disk.

    At first sight only what saves a good part of the work per byte that full attention's blocks
    do, whose worth is `dense`; anything that was wanted again. Snapshots of short prompts are
    many, large, and mostly never asked for.
    """
    return is_second_sight or worth >= dense * FIRST_SIGHT_SHARE


class EvictionOrder(Generic[Item]):
    """Idle items in the order in which they leave: cold ones, then by worth and age.

    Greedy-dual: an item's rank is its worth on top of a clock that moves to the rank of each item
    that leaves. Items of equal worth leave in the order of their last use; one worth ten times as
    much outlives ten times as many.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._num_uses = 0
        self._num_pushes = 0
        self._heap: list[tuple[Rank, int, Item]] = []
        """With a number of their own: items are never compared."""
        self._ranks: dict[Item, Rank] = {}

    def __contains__(self, item: Item) -> bool:
        """Return whether the item waits here."""
        return item in self._ranks

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._ranks)

    def rank(self, worth: float, *, is_cold: bool = False) -> Rank:
        """Return the rank of an item of this worth that is used now."""
        self._num_uses += 1
        return not is_cold, self._clock + worth, self._num_uses

    def add(self, item: Item, rank: Rank) -> None:
        """Let an item wait; one that waits already takes the new rank."""
        self._ranks[item] = rank
        self._num_pushes += 1
        heapq.heappush(self._heap, (rank, self._num_pushes, item))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [
                (rank, number, item) for number, (item, rank) in enumerate(self._ranks.items())
            ]
            heapq.heapify(self._heap)

    def remove(self, item: Item) -> None:
        """Take an item out: it is used again."""
        del self._ranks[item]

    def pop(self) -> Item:
        """Take out the item that leaves first; there is one."""
        while True:
            rank, _, item = heapq.heappop(self._heap)
            if self._ranks.get(item) == rank:
                del self._ranks[item]
                if rank[0]:
                    self._clock = max(self._clock, rank[1])
                return item

    def check(self) -> None:
        """Every item that waits can leave; AssertionError if not."""
        waiting = {item: rank for rank, _, item in self._heap if self._ranks.get(item) == rank}
        assert waiting == self._ranks, "an item waits that would never leave"
