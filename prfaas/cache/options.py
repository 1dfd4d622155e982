"""How much the prefix cache may hold, in memory and on disk."""

from dataclasses import dataclass

MAX_QUEUED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options of the `[cache]` section."""

    ram_bytes: int = 2 << 30
    block_tokens: int = 64
    snapshot_tokens: int = 0
    """Windows and states are also kept at every multiple of this many tokens of a prompt; 0: only
    where the prompt ends and where it parted from another."""
    dir: str | None = None
    """Where pages are also kept on disk; None keeps them in RAM alone."""
    disk_bytes: int = 20 << 30
    """Of all files in `dir`."""
    tenant_disk_bytes: int | None = None
    """Of one API key's pages in `dir`; None: as much as all."""
    ttl_s: float | None = None
    """Pages in `dir` are forgotten at this age; None keeps them until evicted."""
    zero_freed: bool = False
    """Whether files in `dir` are overwritten before they are deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What the disk tier may hold, and for how long."""

    quota_bytes: int
    """Of the whole cache directory, other models' generations included."""
    ttl_s: float | None = None
    """A record is a miss and goes at this age at the latest; None keeps it until evicted."""
    tenant_quota_bytes: int | None = None
    """Of one tenant's records; None: as much as all."""
    zero_freed: bool = False
    """Whether files are overwritten before they are deleted: evicted, expired or damaged."""
    max_queued_bytes: int = MAX_QUEUED_BYTES
    """Pages that wait to be written stay in memory; beyond this they are not stored."""

    @property
    def segment_bytes(self) -> int:
        """The size at which a segment is full: what one eviction frees."""
        quota_bytes = min(self.quota_bytes, self.tenant_quota_bytes or self.quota_bytes)
        return min(256 << 20, max(1, quota_bytes // 32))

    @property
    def max_record_bytes(self) -> int:
        """The longest record that is stored."""
        return min(self.quota_bytes, self.tenant_quota_bytes or self.quota_bytes) // 4
