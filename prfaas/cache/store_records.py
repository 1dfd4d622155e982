"""The records of one generation: index, segment files and account, kept in step. No threads.

The order that makes a crash harmless: bytes are written and synced, then the index commits, then the
record can be found. Removal goes the other way: it cannot be found, the file goes, the index entry
goes with the next commit. In between an entry may point at nothing; then it is a miss.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, repeat
from pathlib import Path

from prfaas.cache.options import StoreOptions
from prfaas.cache.pool import PageKey
from prfaas.cache.segment_account import Segment
from prfaas.cache.segment_writers import SegmentWriters
from prfaas.cache.segments import SegmentFiles, record_checksum
from prfaas.cache.store_directory import INDEX_NAME, ZEROING_NAME
from prfaas.cache.store_index import Index, Record, encode_key
from prfaas.cache.store_load import load
from prfaas.cache.store_read import Read, read_segment
from prfaas.cache.store_types import Listed, RecordCounts, RecordStats, Wanted, Write
from prfaas.clock import Clock
from prfaas.errors import StoreError
from prfaas.log import get_logger

MAX_REMOVED = 1 << 16


class Records:
    """Records by key, on disk. Reads may come from any thread, changes take turns.

    Open it on a directory that no other process uses and whose index was just renewed, with what
    `renew_index` returned; raises StoreError and OSError.
    """

    def __init__(
        self,
        directory: Path,
        options: StoreOptions,
        *,
        entries: bytes,
        wall: Clock,
        free_others: Callable[[int], int] = lambda _needed: 0,
    ) -> None:
        self._options = options
        self._ttl_s = options.ttl_s
        self._wall = wall
        self._free_others = free_others
        """Bytes to spare -> bytes that other generations still take, after deleting some of them."""
        self._zeroing = directory / ZEROING_NAME
        self._lock = threading.Lock()
        self._changing = threading.Lock()
        self._other_bytes = 0
        self._is_broken = False
        self._removed: list[PageKey] | None = None
        """What can be found no more since `take_removed`; None: nobody asks, or too much."""
        self.counts = RecordCounts()
        self._files = SegmentFiles(directory, zeroes=options.zero_freed or self._zeroing.exists())
        try:
            self._index = Index(directory / INDEX_NAME)
        except BaseException:
            self._files.close()
            raise
        try:
            loaded = load(self._files, entries, wall())
            self._end_zeroing()
            self._where, self._account = loaded.where, loaded.account
            self._stale = loaded.stale
            """Keys whose index entry goes with the next commit."""
            self._writers = SegmentWriters(
                self._files,
                first_number=loaded.next_number,
                segment_bytes=options.segment_bytes,
                max_age_s=None if options.ttl_s is None else options.ttl_s / 16,
            )
            self._other_bytes = self._free_others(0)
            with suppress(StoreError):  # the next commit tries again
                self.commit(())
        except BaseException:
            self._index.close()
            self._files.close()
            raise

    # ------------------------------------------------------------ finding

    def known(self, key: PageKey) -> bool:
        """Return whether a record has this key. Takes no lock and touches no disk."""
        segment = self._where.get(key)
        return segment is not None and (self._ttl_s is None or not self._is_expired(segment))

    def num_known(self, group: int, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a group are `known` before the first that is not."""
        where = self._where
        if self._ttl_s is None and all(
            map(where.__contains__, zip(repeat(group), keys, strict=False))
        ):
            return len(keys)
        return next((n for n, key in enumerate(keys) if not self.known((group, key))), len(keys))

    def _is_expired(self, segment: Segment) -> bool:
        return self._ttl_s is not None and self._wall() >= segment.created_s + self._ttl_s

    def get_many(self, wanted: Sequence[Wanted], *, is_use: bool = True) -> list[bool]:
        """Fill each key's buffers with its bytes; False where that is a miss.

        The buffers of a miss hold anything.
        `is_use` counts hits and keeps what was found from being evicted soon.
        """
        found = [False] * len(wanted)
        hit_bytes = 0
        for number, reads in groupby(sorted(self._look_up(wanted)), lambda read: read[0].segment):
            whole, damaged = read_segment(self._files, number, list(reads), wanted)
            for record, position, _ in damaged:
                self._bury(wanted[position][0], record)
            for record, position, _ in whole:
                found[position] = True
                hit_bytes += record.length
            if is_use:  # one is enough: they are of one segment
                self.touch(wanted[position][0] for _, position, _ in whole[:1])
        if is_use:
            with self._lock:
                self.counts.num_hits += found.count(True)
                self.counts.hit_bytes += hit_bytes
                self.counts.num_misses += found.count(False)
        return found

    def _look_up(self, wanted: Sequence[Wanted]) -> list[Read]:
        """Return where the bytes of the known keys lie."""
        positions = [position for position, (key, _) in enumerate(wanted) if self.known(key)]
        names = [encode_key(wanted[position][0]) for position in positions]
        try:
            records = self._index.get_many(names)
        except StoreError as error:
            self._forget_all(str(error))
            return []
        reads = []
        for record, position, name in zip(records, positions, names, strict=True):
            key, parts = wanted[position]
            if record is not None and record.length == sum([part.nbytes for part in parts]):
                reads.append((record, position, name))
            else:
                self._bury(key, record)
        return reads

    def _bury(self, key: PageKey, record: Record | None) -> None:
        """Make a damaged record a miss from now on, unless it was evicted or replaced meanwhile.

        `record` is what the index said of it; None: not what it should.
        """
        with self._lock:
            segment = self._where.get(key)
            if segment is None:
                return
            with suppress(StoreError):
                if self._index.get(key) != record:
                    return
            is_first = not self.counts.num_damaged
            self.counts.num_damaged += 1
            del self._where[key]
            self._note_removed((key,))
            self._stale.add(key)
            segment.is_suspect = True
            lost_bytes = record.length if record else self._unaccounted_bytes(segment)
            self._account.bury(segment, lost_bytes)
        if is_first:
            get_logger().warning("store.record_damaged", segment=segment.number)

    def _unaccounted_bytes(self, segment: Segment) -> int:
        """Return the live bytes that no record of a segment explains any more."""
        live = {key for key in segment.keys if self._where.get(key) is segment}
        records = (self._index.get(key) for key in live)
        return segment.live_bytes - sum(record.length for record in records if record)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Note that these records are of use, wherever their bytes came from. Takes no lock."""
        now_s = self._wall()
        for key in keys:
            segment = self._where.get(key)
            if segment is not None:
                segment.used_s = now_s

    def take_removed(self) -> list[PageKey] | None:
        """Return what can be found no more since the last call, or None: that may be anything.

        Some of it may be found again. Nothing is noted before the first call, and no more than
        MAX_REMOVED.
        """
        with self._lock:
            removed, self._removed = self._removed, []
            if removed is not None and self._ttl_s is not None:
                for segment in self._account:
                    if self._is_expired(segment):
                        removed += segment.keys
            return removed

    def _note_removed(self, keys: Sequence[PageKey]) -> None:
        if self._removed is not None:
            self._removed += keys
            if len(self._removed) > MAX_REMOVED:
                self._removed = None

    def listing(self) -> Iterator[Listed]:
        """Yield every record that can be found, in the order of keys."""
        return (found for found in self._index.records() if self.known(found[0]))

    # ------------------------------------------------------------ changing

    def commit(self, writes: Sequence[Write]) -> None:
        """Store all the records, for good, or none and raise StoreError.

        What has expired goes too, and what must so that the quota holds.
        """
        with self._changing:
            if self._is_broken:
                raise StoreError("the store failed and takes no more")
            now_s = self._wall()
            fresh = list({w.key: w for w in writes if not self.known(w.key)}.values())
            try:
                self._drop_useless(now_s)
                self._make_room(fresh, now_s)
                stored = [(write.key, *self._append(write, now_s)) for write in fresh]
                self._writers.sync()
                self._commit_index([(key, record) for key, _, record in stored])
                self._writers.keep()
            except (OSError, StoreError) as error:
                self._writers.roll_back()
                if not self._index.is_usable:
                    self._forget_all(str(error))
                raise StoreError(f"cannot store: {error}") from error
            with self._lock:
                for key, segment, record in stored:
                    if segment not in self._account:
                        self._account.add(segment)
                    self._account.grow(segment, key, record.length, now_s)
                    self._where[key] = segment
                    self.counts.num_stored += 1
                    self.counts.stored_bytes += record.length

    def _append(self, write: Write, now_s: float) -> tuple[Segment, Record]:
        checksum = record_checksum(encode_key(write.key), write.parts)
        segment, offset = self._writers.append(write.tenant, write.parts, write.length, now_s)
        return segment, Record(segment.number, offset, write.length, checksum, now_s, write.tenant)

    def _commit_index(self, additions: Sequence[tuple[PageKey, Record]]) -> None:
        with self._lock:
            stale = list(self._stale)
        if not stale and not additions:
            return
        self._index.apply(removals=stale, additions=additions)
        with self._lock:
            self._stale.difference_update(stale)

    def _drop_useless(self, now_s: float) -> None:
        for segment in self._account:
            segment.created_s = min(segment.created_s, now_s)  # the clock may have been set back
            if self._is_expired(segment) or (segment.is_suspect and not segment.live_bytes):
                self.counts.num_expired += self._drop(segment)

    def _make_room(self, writes: Sequence[Write], now_s: float) -> None:
        """Evict until `writes` fit; raises StoreError, and evicts nothing, if they never will."""
        by_tenant: Counter[bytes] = Counter()
        for write in writes:
            by_tenant[write.tenant] += write.length
        limit_bytes = self._options.tenant_quota_bytes
        if limit_bytes is not None:
            for tenant, num_bytes in by_tenant.items():
                held_bytes = self._account.tenant_bytes(tenant)
                self._evict(held_bytes + num_bytes - limit_bytes, held_bytes, now_s, tenant)
        new_bytes = by_tenant.total()
        over_bytes = self._over_bytes(new_bytes)
        if over_bytes > 0 and self._other_bytes:
            self._other_bytes = self._free_others(over_bytes)
            over_bytes = self._over_bytes(new_bytes)
        self._evict(over_bytes, self._account.size_bytes, now_s, None)

    def _evict(self, over_bytes: int, held_bytes: int, now_s: float, tenant: bytes | None) -> None:
        """Evict `over_bytes` of the `held_bytes` of one tenant or, None, of all."""
        if over_bytes > held_bytes:
            raise StoreError(f"{over_bytes} bytes would have to go, and {held_bytes} are ours")
        while over_bytes > 0:  # not measured again: a file system may take time to free blocks
            segment = self._account.least_useful(now_s, tenant=tenant)
            assert segment is not None, "more bytes are held than there are"
            self.counts.num_evicted += self._drop(segment)
            over_bytes -= segment.size_bytes

    def _over_bytes(self, new_bytes: int) -> int:
        """Return what must go before `new_bytes` fit the quota, and the disk with a margin."""
        used_bytes = self._account.size_bytes + self._index.num_bytes() + self._other_bytes
        over_quota_bytes = used_bytes + new_bytes - self._options.quota_bytes
        margin_bytes = self._options.segment_bytes if new_bytes else 0
        return max(over_quota_bytes, new_bytes + margin_bytes - self._files.free_bytes())

    def _drop(self, segment: Segment) -> int:
        """Make all records of a segment misses and delete it; return how many there were.

        After an OSError the file still counts, and is the next to go.
        """
        with self._lock:
            keys = [key for key in segment.keys if self._where.get(key) is segment]
            for key in keys:
                self._where.pop(key, None)
            self._note_removed(keys)
            self._stale.update(key for key in segment.keys if key not in self._where)
            self._account.bury(segment, segment.live_bytes)
            segment.is_suspect = True
        self._writers.seal(segment)
        self._files.remove(segment.number)
        with self._lock:
            self._account.remove(segment)
        return len(keys)

    def clear(self, *, zero: bool = False) -> None:
        """Remove every record, its bytes overwritten on request, even if that is interrupted.

        Raises:
            StoreError: some file or the index could not be changed; all records are misses.
        """
        with self._changing:
            try:
                if zero:
                    self._zeroing.touch(mode=0o600)
                    self._files.zeroes = True
                for segment in self._account:
                    self._drop(segment)
                self._commit_index(())
                self._end_zeroing()
            except (OSError, StoreError) as error:
                self._forget_all(str(error))
                raise StoreError(f"cannot clear: {error}") from error

    def _end_zeroing(self) -> None:
        self._zeroing.unlink(missing_ok=True)
        self._files.zeroes = self._options.zero_freed

    def _forget_all(self, reason: str) -> None:
        """Make every record a miss until the next open."""
        with self._lock:
            was_broken, self._is_broken = self._is_broken, True
            self._where.clear()
            self._removed = None
            for segment in self._account:
                self._account.bury(segment, segment.live_bytes)
        if not was_broken:
            get_logger().error("store.failed", error=reason)

    def stats(self) -> RecordStats:
        """Return what there is now."""
        with self._lock:
            segments = list(self._account)
            return RecordStats(
                num_records=len(self._where),
                live_bytes=self._account.live_bytes,
                segment_bytes=self._account.size_bytes,
                other_bytes=self._other_bytes,
                num_segments=len(segments),
                tenant_bytes=self._account.tenants(),
                oldest_s=min((segment.created_s for segment in segments), default=None),
                is_broken=self._is_broken,
                counts=replace(self.counts),
            )

    def check(self) -> None:
        """Re-derive what is known from the index and the files; AssertionError names the fault.

        For tests: nothing else may happen meanwhile.
        """
        assert not self._is_broken, "the index failed"
        self._account.check()
        indexed = dict(self._index.records())
        assert set(indexed) - self._stale <= set(self._where), "the index names what is not known"
        live = Counter[int]()
        for key, segment in self._where.items():
            record = indexed[key]
            assert record.segment == segment.number, "the index names another segment"
            assert record.tenant == segment.tenant, "a segment of two tenants"
            assert record.offset + record.length <= segment.size_bytes, "a record ends too late"
            live[segment.number] += record.length
            assert segment in self._account, "a record in a segment that is gone"
        for segment in self._account:
            assert segment.live_bytes == live[segment.number], "live bytes differ"

    def close(self) -> None:
        """Keep when each segment was last used, and close all files. Nobody reads any more."""
        try:
            with suppress(StoreError):  # what is stale now is found to be so by the next open
                self.commit(())
            for segment in self._account:
                with suppress(OSError):
                    self._files.set_used_s(segment.number, segment.used_s)
        finally:
            self._writers.close()
            self._index.close()
            self._files.close()
