"""Which segments there are, what they are worth, and which goes first. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from prfaas.cache.pool import PageKey


@dataclass(slots=True, kw_only=True, eq=False)
class Segment:
    """One file of records, which are written, used and evicted together."""

    number: int
    tenant: bytes
    """Whose records it holds; no two tenants share a segment."""
    created_s: float
    """When its oldest record was made, since the epoch: with a TTL all expire by that one."""
    used_s: float
    """When a record was last written, found or touched."""
    size_bytes: int = 0
    """Of the file, as far as it is committed."""
    live_bytes: int = 0
    """Of the records that can still be found."""
    is_suspect: bool = False
    """A record was damaged: nothing is appended any more, perhaps the file is not even there."""
    keys: list[PageKey] = field(default_factory=list)
    """Every record ever committed to it; some may be dead, or live elsewhere."""

    def usefulness(self, now_s: float) -> float:
        """Return its worth per byte: the live part, less the longer nobody asked for it."""
        age_s = max(0.0, now_s - self.used_s)
        return self.live_bytes / max(1, self.size_bytes) / (1.0 + age_s)


class SegmentAccount:
    """All segments of one generation and their sums."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._size_bytes = 0
        self._live_bytes = 0
        self._tenant_bytes: dict[bytes, int] = {}

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments.values()))

    def __contains__(self, segment: Segment) -> bool:
        return self._segments.get(segment.number) is segment

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return self._size_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of all records that can be found."""
        return self._live_bytes

    def tenant_bytes(self, tenant: bytes) -> int:
        """Return the bytes of the tenant's files."""
        return self._tenant_bytes.get(tenant, 0)

    def tenants(self) -> dict[bytes, int]:
        """Return the bytes of each tenant's files."""
        return dict(self._tenant_bytes)

    def add(self, segment: Segment) -> None:
        """Count a segment, with whatever it holds."""
        assert segment.number not in self._segments, "a segment's number is used once"
        self._segments[segment.number] = segment
        self._count(segment, segment.size_bytes, segment.live_bytes)

    def grow(self, segment: Segment, key: PageKey, num_bytes: int, now_s: float) -> None:
        """Count a record that was committed at the end of a segment."""
        segment.keys.append(key)
        segment.size_bytes += num_bytes
        segment.live_bytes += num_bytes
        segment.used_s = max(segment.used_s, now_s)
        self._count(segment, num_bytes, num_bytes)

    def bury(self, segment: Segment, num_bytes: int) -> None:
        """Count a record that can no longer be found; its bytes stay until the segment goes."""
        segment.live_bytes -= num_bytes
        self._count(segment, 0, -num_bytes)

    def remove(self, segment: Segment) -> None:
        """Forget a segment and all it holds."""
        del self._segments[segment.number]
        self._count(segment, -segment.size_bytes, -segment.live_bytes)

    def least_useful(self, now_s: float, *, tenant: bytes | None = None) -> Segment | None:
        """Return the segment to evict first, of one tenant or of all; None if there is none."""
        candidates = (s for s in self._segments.values() if tenant is None or s.tenant == tenant)
        return min(candidates, key=lambda s: (s.usefulness(now_s), s.number), default=None)

    def _count(self, segment: Segment, size_bytes: int, live_bytes: int) -> None:
        self._size_bytes += size_bytes
        self._live_bytes += live_bytes
        tenant_bytes = self._tenant_bytes.get(segment.tenant, 0) + size_bytes
        if tenant_bytes:
            self._tenant_bytes[segment.tenant] = tenant_bytes
        else:
            self._tenant_bytes.pop(segment.tenant, None)

    def check(self) -> None:
        """Re-derive every sum; AssertionError names what is wrong."""
        segments = list(self._segments.values())
        assert sum(s.size_bytes for s in segments) == self._size_bytes, "file bytes differ"
        assert sum(s.live_bytes for s in segments) == self._live_bytes, "live bytes differ"
        assert all(0 <= s.live_bytes <= s.size_bytes for s in segments), "more live than written"
        by_tenant: dict[bytes, int] = {}
        for segment in segments:
            by_tenant[segment.tenant] = by_tenant.get(segment.tenant, 0) + segment.size_bytes
        assert {t: n for t, n in by_tenant.items() if n} == self._tenant_bytes
