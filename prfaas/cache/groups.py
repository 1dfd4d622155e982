"""How much of a prompt every group of layers can serve. Pure."""

from collections.abc import Sequence
from typing import Protocol

from prfaas.cache.spec import CacheLayout, FullSpec, GroupSpec, held_blocks


class Presence(Protocol):
    """Which blocks of a prompt are cached."""

    def leading(self, group: int) -> int:
        """Return how many blocks of a group are there before the first that is not."""
        ...

    def has(self, group: int, block: int) -> bool:
        """Return whether that block of that group is there."""
        ...


def longest_hit(
    groups: Sequence[GroupSpec], block_tokens: int, num_blocks: int, presence: Presence
) -> int:
    """Return the most leading blocks, at most `num_blocks`, after which every group can go on.

    A full group serves a length if all its blocks up to there are present, a window group if those
    of the last window_tokens - 1 tokens are, a state group if its state at that very length is.
    Asks about no block of a window or a state twice.
    """
    hit = shared_blocks(groups, num_blocks, presence)
    scans = [
        _Scan(group, spec, block_tokens, hit, presence)
        for group, spec in enumerate(groups)
        if not isinstance(spec, FullSpec)
    ]
    settled = None
    while settled != hit:  # one group's shorter hit moves what the others need
        settled = hit
        for scan in scans:
            hit = scan.longest_up_to(hit)
    return hit


def shared_blocks(groups: Sequence[GroupSpec], num_blocks: int, presence: Presence) -> int:
    """Return the most leading blocks, at most `num_blocks`, that all full groups have."""
    full = (group for group, spec in enumerate(groups) if isinstance(spec, FullSpec))
    return min([num_blocks, *map(presence.leading, full)])


def pinned_blocks(layout: CacheLayout, num_blocks: int) -> list[range]:
    """Return for each group the blocks that a hit of `num_blocks` pins."""
    num_tokens = num_blocks * layout.block_tokens
    return [held_blocks(spec, num_tokens, layout.block_tokens) for spec in layout.groups]


class _Scan:
    """Looks for what a window or a state group needs, from the right; asks about no block twice."""

    def __init__(
        self,
        group: int,
        spec: GroupSpec,
        block_tokens: int,
        num_blocks: int,
        presence: Presence,
    ) -> None:
        self._group = group
        self._spec = spec
        self._block_tokens = block_tokens
        self._has = presence.has
        self._present_from = num_blocks
        """All blocks from here to the hit are known to be present."""

    def longest_up_to(self, hit: int) -> int:
        """Return the largest length in blocks, at most `hit`, whose needed blocks are present."""
        self._present_from = min(self._present_from, hit)
        while self._present_from > self._first_needed(hit):
            self._present_from -= 1
            if not self._has(self._group, self._present_from):
                hit = self._present_from
        return hit

    def _first_needed(self, hit: int) -> int:
        return held_blocks(self._spec, hit * self._block_tokens, self._block_tokens).start
