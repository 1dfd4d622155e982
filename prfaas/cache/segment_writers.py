"""The segments that grow: one a tenant, appended to and synced before anything names the bytes."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from prfaas.cache.segment_account import Segment
from prfaas.cache.segments import SegmentFiles, write_at

_MAX_GROWING = 16


@dataclass(slots=True, kw_only=True)
class _Growing:
    segment: Segment
    descriptor: int
    end_bytes: int
    """Of what was written; the segment's own size is what was committed."""


class SegmentWriters:
    """Appends to segments of about `segment_bytes`; one thread at a time. Raises OSError."""

    def __init__(
        self,
        files: SegmentFiles,
        *,
        first_number: int,
        segment_bytes: int,
        max_age_s: float | None,
    ) -> None:
        self._files = files
        self._next_number = first_number
        self._segment_bytes = segment_bytes
        self._max_age_s = max_age_s
        """Records of one segment are not further apart; None: however far."""
        self._growing: dict[bytes, _Growing] = {}
        self._unsynced: dict[int, _Growing] = {}
        self._has_new_names = False

    def append(
        self, tenant: bytes, parts: Sequence[memoryview], length: int, now_s: float
    ) -> tuple[Segment, int]:
        """Write the bytes; return the segment and the offset at which they lie in it."""
        growing = self._growing.pop(tenant, None)
        if growing is not None and self._is_full(growing, length, now_s):
            self._retire(growing)
            growing = None
        if growing is None:
            growing = self._create(tenant, now_s)
        self._growing[tenant] = growing  # at the end: the first is the longest unused
        offset = growing.end_bytes
        self._unsynced[growing.segment.number] = growing
        write_at(growing.descriptor, parts, offset)
        growing.end_bytes += length
        return growing.segment, offset

    def _is_full(self, growing: _Growing, length: int, now_s: float) -> bool:
        age_s = now_s - growing.segment.created_s
        return (
            growing.segment.is_suspect
            or growing.end_bytes + length > self._segment_bytes
            or (self._max_age_s is not None and age_s > self._max_age_s)
        )

    def _create(self, tenant: bytes, now_s: float) -> _Growing:
        if len(self._growing) >= _MAX_GROWING:
            self._retire(self._growing.pop(next(iter(self._growing))))
        number, self._next_number = self._next_number, self._next_number + 1
        descriptor = self._files.create(number)
        self._has_new_names = True
        segment = Segment(number=number, tenant=tenant, created_s=now_s, used_s=now_s)
        return _Growing(segment=segment, descriptor=descriptor, end_bytes=0)

    def _retire(self, growing: _Growing) -> None:
        """Append no more to a segment; closed at once, or when what was written is synced."""
        if growing.segment.number not in self._unsynced:
            os.close(growing.descriptor)

    def sync(self) -> None:
        """Make everything appended last through a power cut."""
        for growing in self._unsynced.values():
            os.fdatasync(growing.descriptor)
        if self._has_new_names:
            self._files.sync_names()
            self._has_new_names = False

    def keep(self) -> None:
        """Take what was synced as committed: it is never rolled back."""
        self._settle()

    def roll_back(self) -> None:
        """Take back what was appended since `keep`; those segments grow no more."""
        for growing in list(self._unsynced.values()):
            if self._growing.get(growing.segment.tenant) is growing:
                del self._growing[growing.segment.tenant]
            with suppress(OSError):  # the next open cuts what nobody names
                if growing.segment.size_bytes:
                    self._files.truncate(growing.segment.number, growing.segment.size_bytes)
                else:
                    self._files.remove(growing.segment.number)
        self._settle()

    def _settle(self) -> None:
        current = {growing.segment.number for growing in self._growing.values()}
        for number, growing in self._unsynced.items():
            if number not in current:
                os.close(growing.descriptor)
        self._unsynced.clear()

    def seal(self, segment: Segment) -> None:
        """Append no more to a committed segment."""
        growing = self._growing.get(segment.tenant)
        if growing is not None and growing.segment is segment:
            del self._growing[segment.tenant]
            self._retire(growing)

    def close(self) -> None:
        """Close every file."""
        for growing in self._growing.values():
            os.close(growing.descriptor)
        self._growing.clear()
