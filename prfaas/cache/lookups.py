"""What lookups found, and why they found no more."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from prfaas.cache.groups import IsPresent, shared_blocks
from prfaas.cache.spec import CacheLayout, FullSpec

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
    layout: CacheLayout,
    keys: Sequence[bytes],
    num_blocks: int,
    limit: int,
    is_present: IsPresent,
    was_evicted: Callable[[PageKey], bool],
) -> MissReason | None:
    """Return why a hit has `num_blocks` and not `limit`; None if it has as many.

    "evicted" is said of what left lately; what left long ago is like what never was.
    """
    if num_blocks == limit:
        return None
    groups = range(len(layout.groups))
    has_full = any(isinstance(spec, FullSpec) for spec in layout.groups)
    shared = num_blocks
    if has_full:
        shared = shared_blocks(layout.groups, limit, is_present, start=num_blocks)
    missing = {shared - 1, shared, limit - 1} & set(range(num_blocks, limit))
    if any(was_evicted((group, keys[block])) for group in groups for block in missing):
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
