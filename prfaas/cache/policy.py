"""What is worth its bytes: which pages leave first, and which go to disk. Pure.

The measure is the work that an entry saves per byte it takes. A block of full attention saves its own
tokens; a state or a window saves all tokens since the last place from which the prompt could be
continued without it: deep in a long prompt that is worth far more than its bytes.
"""

import heapq
import math
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec, held_blocks

Item = TypeVar("Item", bound="Placed")

MIB = 1 << 20
COLD = -(1 << 20)
"""The level of what leaves before all else."""
LEVELS_PER_DOUBLING = 4
MAX_RUN = 1024
"""Items used after each other share a run up to this many; more that are used at once do, too."""
MIN_HUSKS = 64
FIRST_SIGHT_SHARE = 0.25
CHAT_WEIGHT = 2.0
"""More is better on some traces and sizes, and worse than plain LRU on others."""


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
        num_blocks = max(1, len(held_blocks(spec, position_tokens, layout.block_tokens)))
        num_bytes = spec.page_bytes * spec.pages_per_block * num_blocks
    return max(layout.block_tokens, position_tokens - reused_tokens) * MIB / num_bytes


def dense_worth(layout: CacheLayout) -> float:
    """Return the worth of full attention's blocks; 0 where there are none.

    In RAM nothing ranks below it: a snapshot of a short prompt saves less for its own bytes, but
    without it the blocks under it are of no use, either.
    """
    full = (g for g, spec in enumerate(layout.groups) if isinstance(spec, FullSpec))
    return max((worth_of(layout, group, layout.block_tokens, 0) for group in full), default=0.0)


def prompt_worth(layout: CacheLayout, hit_tokens: int, prompt_tokens: int) -> float:
    """Return what is worth keeping of a prompt that was served, for each MiB.

    The KV, windows and states that go on at its end are of use together, so they are worth the
    same. A prompt of which at least half was cached is taken for a chat's next turn, and chats go on
    more often than new prompts do.

    Args:
        layout: of the cache.
        hit_tokens: what was cached.
        prompt_tokens: of the prompt, what could have been.
    """
    goes_on = prompt_tokens > 0 and 2 * hit_tokens >= prompt_tokens
    of_prompt = dense_worth(layout) or 1.0  # without full attention any will do
    return of_prompt * (CHAT_WEIGHT if goes_on else 1.0)


def is_worth_disk(worth: float, dense: float, *, is_second_sight: bool) -> bool:
    """Return whether a block is written to disk.

    At first sight only what saves a good part of the work per byte that full attention's blocks
    do, whose worth is `dense`; anything that was wanted again. Snapshots of short prompts are
    many, large, and mostly never asked for.
    """
    return is_second_sight or worth >= dense * FIRST_SIGHT_SHARE


def level_of(worth: float) -> int:
    """Return the level of a worth above 0: those of one level differ by less than a fifth."""
    return round(LEVELS_PER_DOUBLING * math.log2(worth))


class Placed(Protocol):
    """What can wait in an `EvictionOrder`, which alone sets the place."""

    place: "Run | None"


@dataclass(slots=True, eq=False)
class Run:
    """Items of one level that were used together: they leave one after the other."""

    level: int
    rank: float
    items: list[Any] = field(default_factory=list)
    """In the order of leaving; those whose place is another by now do not count."""
    start: int = 0
    """The first that may still wait."""
    num_waiting: int = 0


class EvictionOrder(Generic[Item]):
    """Items in the order in which they leave: cold ones, then by worth and age.

    Greedy-dual: an item's rank is its worth on top of a clock that moves to the rank of each item
    that leaves. Items of one level leave in the order of their last use; those worth ten times as
    much outlive ten times as many. So each level is a queue, and only the heads compare. A queue
    is of runs, because a long prompt's blocks are used at once; an item that is used again goes
    into another run, and stays in the list of the old one as a husk, until half of those are.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._queues: defaultdict[int, OrderedDict[Run, None]] = defaultdict(OrderedDict)
        """Level -> runs in which someone waits; ranks never fall along a queue."""
        self._heads: list[tuple[float, int]] = []
        """A heap of (rank, level), one for each level: no more than the rank of its first run."""
        self._listed: set[int] = set()
        """Levels in the heap: every one with runs."""

    def __len__(self) -> int:
        """Return how many wait."""
        return sum(run.num_waiting for queue in self._queues.values() for run in queue)

    def use(self, items: Sequence[Item], level: int) -> None:
        """Let items wait as the last used of a level, in this order."""
        if not items:
            return
        queue, rank = self._queues[level], self._rank(level)
        run = next(reversed(queue)) if queue else None
        if (
            run is None
            or run.rank != rank
            or len(run.items) + len(items) > MAX_RUN
            or run.num_waiting < len(run.items) - run.start  # one of the husks may be an item's
            or any(item.place is run for item in items)
        ):
            run = Run(level, rank)
            queue[run] = None
            self._list(level, rank)
        run.num_waiting += len(items)
        old: Run | None = run
        num_left = 0
        for item in items:
            place = item.place
            if place is not old:
                self._leave(old, num_left)
                old, num_left = place, 0
            num_left += 1
            item.place = run
        self._leave(old, num_left)
        run.items += items

    def pop(self) -> Item:
        """Take out the item that leaves first; there is one."""
        while True:
            bound, level = self._heads[0]
            queue = self._queues[level]
            if not queue:
                heapq.heappop(self._heads)
                self._listed.remove(level)
                continue
            run = next(iter(queue))
            if run.rank > bound:
                heapq.heapreplace(self._heads, (run.rank, level))
                continue
            item: Item = run.items[run.start]
            run.start += 1
            if item.place is run:
                item.place = None
                self._leave(run, 1)
                self._clock = max(self._clock, run.rank)
                return item

    def _leave(self, run: Run | None, num_items: int) -> None:
        """Count items that wait in a run no more, and forget what is left of them."""
        if run is None or not num_items:
            return
        run.num_waiting -= num_items
        if not run.num_waiting:
            del self._queues[run.level][run]
        elif len(run.items) > 2 * run.num_waiting + MIN_HUSKS:
            run.items = [item for item in run.items[run.start :] if item.place is run]
            run.start = 0

    def _rank(self, level: int) -> float:
        return -math.inf if level == COLD else self._clock + 2.0 ** (level / LEVELS_PER_DOUBLING)

    def _list(self, level: int, rank: float) -> None:
        if level not in self._listed:
            self._listed.add(level)
            heapq.heappush(self._heads, (rank, level))

    def check(self) -> None:
        """Every item that waits can leave, when it is its turn; AssertionError if not."""
        levels = [level for _, level in self._heads]
        assert len(levels) == len(self._listed), "a level is listed twice"
        assert set(levels) == self._listed, "levels and their list differ"
        bounds = {level: rank for rank, level in self._heads}
        for level, queue in self._queues.items():
            assert not queue or level in bounds, "an item waits that would never leave"
            ranks = [bounds.get(level, -math.inf), *(run.rank for run in queue)]
            assert ranks == sorted(ranks), "an item would leave too early"
            for run in queue:
                waiting = [item for item in run.items[run.start :] if item.place is run]
                assert len(set(map(id, waiting))) == len(waiting), "an item waits twice"
                assert run.level == level, "a run stands in another's queue"
                assert len(waiting) == run.num_waiting > 0, "an item waits that would never leave"
                assert len(run.items) <= max(2 * run.num_waiting + MIN_HUSKS, MAX_RUN)
