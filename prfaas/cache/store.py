"""The disk tier: what RAM evicts can be found again, after a restart too, or is a miss.

LMDB holds only the index; pages lie in segment files and are read straight into pages. Whatever
happens to the files, what `get` returns True for are the very bytes that were put. Pages are
written behind the caller's back by one thread; they are pinned until `done` is called.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from prfaas.cache.options import StoreOptions
from prfaas.cache.pool import PageKey
from prfaas.cache.store_directory import CacheDirectory
from prfaas.cache.store_open import open_records
from prfaas.cache.store_records import Records
from prfaas.cache.store_types import Listed, RecordStats, Wanted, Write
from prfaas.cache.store_verify import VerifyProgress, verify_records
from prfaas.cache.tenants import TENANT_BYTES
from prfaas.clock import Clock, monotonic_s, wall_s
from prfaas.errors import ConfigError, StoreError
from prfaas.log import get_logger

Done = Callable[[bool], None]
"""Called once when a record is stored (True) or will not be; the pages are the caller's again."""

MIN_QUOTA_BYTES = 1 << 20
_BATCH_BYTES = 64 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What the store holds, what waits, and what it could not take, since it was opened."""

    records: RecordStats
    quota_bytes: int
    num_queued: int
    queued_bytes: int
    num_dropped_full: int
    """Not stored because too much was waiting."""
    num_dropped_failing: int
    """Not stored because of a write that failed, or in the pause after one."""
    num_dropped_large: int
    """Not stored because one record would take too much of the quota."""
    num_failures: int
    """Batches that could not be written."""


class Store:
    """Records of pages on disk, of one identity (model, numerics, layout). Any thread may call.

    Only `open`, `get`, `get_many`, `flush`, `clear`, `verify`, `ls` and `close` touch the disk.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        records: Records,
        options: StoreOptions,
        *,
        clock: Clock = monotonic_s,
    ) -> None:
        self._directory = directory
        self._records = records
        self._options = options
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[Write] = deque()
        self._waiting: set[PageKey] = set()
        self._waiting_bytes = 0
        """Of what is queued, and of what is being written."""
        self._is_closing = False
        self._is_closed = False
        self._pause_s = 0.0
        self._paused_until_s = float("-inf")
        self._num_dropped_full = 0
        self._num_dropped_failing = 0
        self._num_dropped_large = 0
        self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name="prfaas-store", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        identity: str,
        options: StoreOptions,
        clock: Clock = monotonic_s,
        wall: Clock = wall_s,
    ) -> Self:
        """Return the store of `identity` in a cache directory that nobody else uses.

        What a crash left half written is reclaimed. An index that cannot be read is moved aside
        with all it names, and the store starts empty.

        Raises:
            ConfigError: the directory cannot be used; the message says why.
        """
        if options.quota_bytes < MIN_QUOTA_BYTES:
            raise ConfigError(
                f"a cache of {options.quota_bytes} bytes on disk is below the minimum of"
                f" {MIN_QUOTA_BYTES}"
            )
        held = CacheDirectory(directory, zeroes=options.zero_freed)
        try:
            records = open_records(held, identity, options, wall=wall)
        except BaseException:
            held.close()
            raise
        return cls(held, records, options, clock=clock)

    # ------------------------------------------------------------ writing behind

    def put(
        self,
        key: PageKey,
        parts: Sequence[memoryview],
        *,
        tenant: bytes = b"",
        done: Done | None = None,
    ) -> bool:
        """Queue a record to be written; return whether it was.

        If so, the parts must stay as they are until `done` is called, from the store's thread; it
        must not raise. If not (known, queued already, no room in the queue, writes failing), `done`
        is never called. `tenant` is the head of a hash of the salt that is chained into the key.
        """
        length = sum([part.nbytes for part in parts])
        if not length or len(tenant) > TENANT_BYTES:
            raise ValueError(f"{length} bytes of a tenant named by {len(tenant)} bytes")
        write = Write(key=key, parts=tuple(parts), length=length, tenant=tenant, done=done)
        with self._changed:
            if self._records.known(key) or key in self._waiting or not self._has_room(length):
                return False
            if not self._queue:
                self._changed.notify_all()
            self._queue.append(write)
            self._waiting.add(key)
            self._waiting_bytes += length
        return True

    def _has_room(self, length: int) -> bool:
        if length > self._options.max_record_bytes:
            self._num_dropped_large += 1
        elif self._is_closing or self._clock() < self._paused_until_s:
            self._num_dropped_failing += 1
        elif self._waiting_bytes + length > self._options.max_queued_bytes:
            self._num_dropped_full += 1
        else:
            return True
        return False

    def flush(self) -> None:
        """Return when nothing waits to be written any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def _run(self) -> None:
        ttl_s = self._options.ttl_s
        tick_s = None if ttl_s is None else min(60.0, max(0.05, ttl_s / 16))
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self._is_closing, tick_s)
                    if self._is_closing and not self._queue:
                        return
                    batch = self._next_batch()
                self._write(batch)
        finally:
            with self._changed:
                self._is_closing = True
                left = list(self._queue)
                self._queue.clear()
            self._finish(left, is_stored=False)

    def _next_batch(self) -> list[Write]:
        """Take as much from the queue as one commit should hold."""
        limit_bytes = min(_BATCH_BYTES, self._options.segment_bytes)
        batch: list[Write] = []
        num_bytes = 0
        while self._queue and (not batch or num_bytes + self._queue[0].length <= limit_bytes):
            batch.append(self._queue.popleft())
            num_bytes += batch[-1].length
        return batch

    def _write(self, batch: Sequence[Write]) -> None:
        is_stored = False
        try:
            self._records.commit(batch)
            is_stored = True
        except StoreError as error:
            self._note_failure(error, batch)
        else:
            self._note_success(batch)
        finally:
            self._finish(batch, is_stored=is_stored)

    def _note_failure(self, error: StoreError, batch: Sequence[Write]) -> None:
        with self._changed:
            self._num_failures += 1
            self._num_dropped_failing += len(batch)
            is_first = not self._pause_s
            self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2 or _FIRST_PAUSE_S)
            self._paused_until_s = self._clock() + self._pause_s
        if is_first:
            get_logger().warning("store.write_failed", error=str(error))

    def _note_success(self, batch: Sequence[Write]) -> None:
        with self._changed:
            was_failing = bool(batch and self._pause_s)
            if batch:
                self._pause_s = 0.0
        if was_failing:
            get_logger().info("store.write_recovered")

    def _finish(self, batch: Sequence[Write], *, is_stored: bool) -> None:
        for write in batch:
            if write.done is not None:
                write.done(is_stored)
        with self._changed:
            self._waiting.difference_update(write.key for write in batch)
            self._waiting_bytes -= sum(write.length for write in batch)
            self._changed.notify_all()

    # ------------------------------------------------------------ finding

    def known(self, key: PageKey) -> bool:
        """Return whether `get` is likely to succeed. Takes no lock and touches no disk."""
        return self._records.known(key)

    def num_known(self, group: int, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a group are `known` before the first that is not."""
        return self._records.num_known(group, keys)

    def get(self, key: PageKey, into: Sequence[memoryview]) -> bool:
        """Fill the buffers with the record's very bytes and return True, or return False: a miss.

        The buffers together have the record's length. After a miss they hold anything.
        """
        return self._records.get_many([(key, into)])[0]

    def get_many(self, wanted: Sequence[Wanted]) -> list[bool]:
        """Return what `get` would for each; the disk reads ahead where that saves waiting."""
        return self._records.get_many(wanted)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Keep these records from being evicted soon: RAM served them. Takes no lock."""
        self._records.touch(keys)

    def take_removed(self) -> Sequence[PageKey] | None:
        """Return the records that left since the last call, or None: any may have left. No disk."""
        return self._records.take_removed()

    # ------------------------------------------------------------ caring for it

    def ls(self) -> Iterator[Listed]:
        """Yield every record in the order of keys; raises StoreError if the index failed."""
        return self._records.listing()

    def verify(self) -> Iterator[VerifyProgress]:
        """Read every record and drop the damaged ones, yielding after each stretch."""
        return verify_records(self._records)

    def clear(self, *, zero: bool = False) -> None:
        """Remove every record that is stored, overwriting the files first on request.

        Raises:
            StoreError: not all of it could be removed; all records are misses.
        """
        self._records.clear(zero=zero)

    def stats(self) -> StoreStats:
        """Return figures of this moment."""
        records = self._records.stats()
        with self._changed:
            return StoreStats(
                records=records,
                quota_bytes=self._options.quota_bytes,
                num_queued=len(self._waiting),
                queued_bytes=self._waiting_bytes,
                num_dropped_full=self._num_dropped_full,
                num_dropped_failing=self._num_dropped_failing,
                num_dropped_large=self._num_dropped_large,
                num_failures=self._num_failures,
            )

    def check(self) -> None:
        """Re-derive every count and place, with nothing queued; AssertionError names the fault."""
        with self._changed:
            queued = [write.length for write in self._queue]
            assert not queued, "check a store that was flushed"
            assert self._waiting_bytes == 0, "bytes wait that nobody put"
        self._records.check()

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Write what is queued, or with `drain` False give it up; then let others use the directory.

        What is queued after `timeout_s` is given up, too; a commit under way ends. Nobody reads or
        puts any more. Again is harmless.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            if drain:
                self._changed.wait_for(lambda: not self._queue, timeout_s)
            given_up = list(self._queue)
            self._queue.clear()
        self._finish(given_up, is_stored=False)
        self._thread.join()
        if not self._is_closed:
            self._is_closed = True
            try:
                self._records.close()
            finally:
                self._directory.close()
