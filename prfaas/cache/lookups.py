"""What lookups found, and why they found no more."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prfaas.cache.pool import PageKey

MissReason = Literal["no_prefix", "no_snapshot", "evicted", "other_tenant"]
MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)
MAX_OPENINGS = 1 << 14


@dataclass(slots=True, kw_only=True)
class LookupCounts:
    """Totals over all lookups."""

    num_queries: int = 0
    num_hits: int = 0
    num_query_tokens: int = 0
    num_ram_tokens: int = 0
    """Of hits, what RAM alone would have served."""
    num_disk_tokens: int = 0
    """Of hits, what the disk added."""
    misses: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MISS_REASONS, 0))
    """Lookups whose hit ended before the prompt's last whole block, by why."""

    @property
    def num_hit_tokens(self) -> int:
        """Of hits, whatever served them."""
        return self.num_ram_tokens + self.num_disk_tokens

    def add(
        self, num_tokens: int, *, hit_tokens: int, ram_tokens: int, reason: MissReason | None
    ) -> None:
        """Count a lookup."""
        self.num_queries += 1
        self.num_hits += hit_tokens > 0
        self.num_query_tokens += num_tokens
        self.num_ram_tokens += min(ram_tokens, hit_tokens)
        self.num_disk_tokens += max(0, hit_tokens - ram_tokens)
        if reason is not None:
            self.misses[reason] += 1

    def copy(self) -> LookupCounts:
        """Return the counts of this moment."""
        return replace(self, misses=dict(self.misses))


def miss_reason(
    num_groups: int,
    keys: Sequence[bytes],
    num_blocks: int,
    shared: int,
    limit: int,
    was_evicted: Callable[[PageKey], bool],
) -> MissReason | None:
    """Return why a hit has `num_blocks` and not `limit`; None if it has as many.

    All full groups have the first `shared`, at least those of the hit. "evicted" is said of what
    left lately; what left long ago is like what never was.
    """
    if num_blocks == limit:
        return None
    missing = {b for b in (shared - 1, shared, limit - 1) if num_blocks <= b < limit}
    if any(was_evicted((group, keys[block])) for group in range(num_groups) for block in missing):
        return "evicted"
    return "no_snapshot" if shared > num_blocks else "no_prefix"


class Openings:
    """Remembers which salt a prompt's first block was last asked under.

    It only serves to name a miss: no block is found, kept or touched by it.
    """

    def __init__(self) -> None:
        self._salts: OrderedDict[bytes, bytes] = OrderedDict()

    def is_anothers(self, opening: bytes, salt: bytes) -> bool:
        """Return whether only another salt had this opening, by its unsalted name; note this one."""
        last = self._salts.pop(opening, salt)
        self._salts[opening] = salt
        if len(self._salts) > MAX_OPENINGS:
            self._salts.popitem(last=False)
        return last != salt
