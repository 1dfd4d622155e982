"""How much of a prompt every group of layers can serve. Pure."""

from collections.abc import Callable, Sequence

from prfaas.cache.spec import FullSpec, GroupSpec, held_blocks

IsPresent = Callable[[int, int], bool]
"""(group, block) -> whether that block of that group is cached."""


def longest_hit(
    groups: Sequence[GroupSpec], block_tokens: int, num_blocks: int, is_present: IsPresent
) -> int:
    """Return the most leading blocks, at most `num_blocks`, after which every group can go on.

    A full group serves a length if all its blocks up to there are present, a window group if those
    of the last window_tokens - 1 tokens are, a state group if its state at that very length is.
    Asks `is_present` at most once for each (group, block).
    """
    hit = shared_blocks(groups, num_blocks, is_present)
    scans = [
        _Scan(group, spec, block_tokens, hit, is_present)
        for group, spec in enumerate(groups)
        if not isinstance(spec, FullSpec)
    ]
    settled = None
    while settled != hit:  # one group's shorter hit moves what the others need
        settled = hit
        for scan in scans:
            hit = scan.longest_up_to(hit)
    return hit


def shared_blocks(
    groups: Sequence[GroupSpec], num_blocks: int, is_present: IsPresent, *, start: int = 0
) -> int:
    """Return the most leading blocks, at most `num_blocks`, that all full groups have.

    They are known to have the first `start`.
    """
    hit = num_blocks
    for group, spec in enumerate(groups):
        if isinstance(spec, FullSpec):
            hit = next((b for b in range(start, hit) if not is_present(group, b)), hit)
    return hit


class _Scan:
    """Looks for what a window or a state group needs, from the right; asks about no block twice."""

    def __init__(
        self,
        group: int,
        spec: GroupSpec,
        block_tokens: int,
        num_blocks: int,
        is_present: IsPresent,
    ) -> None:
        self._group = group
        self._spec = spec
        self._block_tokens = block_tokens
        self._is_present = is_present
        self._present_from = num_blocks
        """All blocks from here to the hit are known to be present."""

    def longest_up_to(self, hit: int) -> int:
        """Return the largest length in blocks, at most `hit`, whose needed blocks are present."""
        self._present_from = min(self._present_from, hit)
        while self._present_from > self._first_needed(hit):
            self._present_from -= 1
            if not self._is_present(self._group, self._present_from):
                hit = self._present_from
        return hit

    def _first_needed(self, hit: int) -> int:
        return held_blocks(self._spec, hit * self._block_tokens, self._block_tokens).start
