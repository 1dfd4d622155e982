"""The disk tier against a dictionary, through crashes at every step of a commit, damage and restarts."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas.cache import store_scan
from prfaas.cache.pool import PageKey
from prfaas.cache.segment_writers import SegmentWriters
from prfaas.cache.store_index import Index
from tests.cache.stores import Hand, bytes_of, get, key_of, open_store, put, segments_of

QUOTA_BYTES = 1 << 20
TENANT_QUOTA_BYTES = QUOTA_BYTES * 3 // 4
TTL_S = 1600.0
KEYS = st.builds(key_of, st.integers(0, 11), st.integers(0, 1))
LENGTHS = st.sampled_from([1, 100, 4096, 50_000, 150_000])
STEPS = {
    "written": (SegmentWriters, "sync", "before"),
    "synced": (Index, "apply", "before"),
    "indexed": (Index, "apply", "after"),
}


@contextmanager
def observed(step: str, look: Callable[[], None]) -> Iterator[None]:
    """Call `look` whenever a commit has come to `step`."""
    owner, name, when = STEPS[step]
    real = getattr(owner, name)

    def stepping(*arguments: Any, **named: Any) -> None:
        if when == "before":
            look()
        real(*arguments, **named)
        if when == "after":
            look()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, stepping)
        yield


def _copied_here(source: Path, target: Path) -> bytes:
    """What a child does, without one."""
    listing = BytesIO()
    store_scan.copy_index(source, target, listing)
    return listing.getvalue()


class StoreMachine(RuleBasedStateMachine):
    """`put_ever` says what may be found under a key, `stored` what must be unless it was evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(store_scan, "_run_child", _copied_here)
        self.root = Path(tempfile.mkdtemp())
        self.num_directories = 0
        self.wall = Hand()
        self.clock = Hand()
        self.put_ever: dict[PageKey, set[bytes]] = {}
        self.stored: dict[PageKey, tuple[bytes, float]] = {}
        self.num_lost = 0
        """Records of `stored` that may be missing for reasons of their own."""

    def open(self) -> None:
        self.store = open_store(
            self.directory,
            quota_bytes=QUOTA_BYTES,
            tenant_quota_bytes=TENANT_QUOTA_BYTES,
            ttl_s=TTL_S,
            wall=self.wall,
            clock=self.clock,
        )
        self.queued: dict[PageKey, bytes] = {}
        self.forget_missing(may_be_evicted=True)

    @initialize()
    def begin(self) -> None:
        self.directory = self.root / "0"
        self.open()

    def forget_missing(self, *, may_be_evicted: bool) -> None:
        """Drop from `stored` what is not known; each needs a reason."""
        missing = [key for key in self.stored if not self.store.known(key)]
        for key in missing:
            _, stored_s = self.stored.pop(key)
            is_old = self.wall.now_s - stored_s >= TTL_S * 15 / 16
            assert may_be_evicted or is_old, "a record went for no reason"

    @rule(key=KEYS, length=LENGTHS, version=st.integers(0, 3))
    def put(self, key: PageKey, length: int, version: int) -> None:
        content = bytes_of((key, length, version), length)
        tenant = b"ab"[key[1][-1] % 2 :][:1]
        is_new = not self.store.known(key) and key not in self.queued
        if put(self.store, key, content, tenant=tenant):
            assert is_new
            self.put_ever.setdefault(key, set()).add(content)
            self.queued[key] = content
        else:
            assert not is_new, "refused for no reason"

    @rule()
    def flush(self) -> None:
        evicted_before = self.store.stats().records.counts.num_evicted
        self.store.flush()
        for key, content in self.queued.items():
            self.stored[key] = (content, self.wall.now_s)
        self.queued = {}
        counts = self.store.stats().records.counts
        self.forget_missing(may_be_evicted=counts.num_evicted > evicted_before)

    def find(self, key: PageKey) -> None:
        for content in self.put_ever.get(key, {b"never put"}):
            found = get(self.store, key, len(content))
            if found is not None:
                assert found in self.put_ever[key], "bytes that nobody put"
                return
            if key in self.stored and self.stored[key][0] != content:
                return  # asked with the length of another version, which costs the record
        assert key not in self.stored or not self.store.known(key)

    @rule(key=KEYS)
    def get(self, key: PageKey) -> None:
        self.flush()
        if key in self.stored:
            content, _ = self.stored[key]
            assert get(self.store, key, len(content)) == content
        else:
            self.find(key)

    @rule()
    def get_all(self) -> None:
        self.flush()
        wanted = [
            (key, [memoryview(bytearray(len(content)))])
            for key, (content, _) in self.stored.items()
        ]
        assert all(self.store.get_many(wanted))
        for key, (buffer,) in wanted:
            assert buffer == self.stored[key][0]

    @rule(key=KEYS)
    def touch(self, key: PageKey) -> None:
        self.store.touch([key])

    @rule(seconds=st.sampled_from([1.0, 99.0, 800.0]))
    def wait(self, seconds: float) -> None:
        self.flush()
        self.wall.now_s += seconds
        self.clock.now_s += seconds
        self.forget_missing(may_be_evicted=False)

    @rule(zero=st.booleans())
    def clear(self, zero: bool) -> None:
        self.flush()
        self.store.clear(zero=zero)
        self.stored, self.put_ever = {}, {}

    @rule()
    def restart(self) -> None:
        self.flush()
        self.store.close()
        self.open()

    def copy(self) -> None:
        self.num_directories += 1
        self.directory = self.root / str(self.num_directories)
        shutil.copytree(self.store._directory.path, self.directory)

    @rule()
    def crash(self) -> None:
        self.flush()
        self.copy()
        self.store.close()
        self.open()

    @precondition(lambda self: not self.queued)
    @rule(
        step=st.sampled_from(sorted(STEPS)),
        writes=st.dictionaries(KEYS, LENGTHS, min_size=1, max_size=4),
    )
    def crash_in_a_commit(self, step: str, writes: dict[PageKey, int]) -> None:
        """Go on with the directory as it was in the middle of the last commit."""
        with observed(step, self.copy):
            for key, length in writes.items():
                self.put(key, length, 0)
            self.store.flush()
        self.store.close(drain=False)
        self.queued = {}
        self.open()

    @rule(step=st.sampled_from(["pwritev", "fdatasync"]), key=KEYS, length=LENGTHS)
    def fail_to_write(self, step: str, key: PageKey, length: int) -> None:
        self.flush()
        with pytest.MonkeyPatch.context() as patch:

            def fail(*_: Any) -> int:
                raise OSError(28, "No space left on device")

            patch.setattr(os, step, fail)
            if put(self.store, key, bytes_of("lost", length)):
                evicted_before = self.store.stats().records.counts.num_evicted
                self.store.flush()
                assert not self.store.known(key)
                counts = self.store.stats().records.counts
                self.forget_missing(may_be_evicted=counts.num_evicted >= evicted_before)
        self.clock.now_s += 61

    @rule(
        which=st.integers(0, 1 << 16),
        where=st.integers(0, 1 << 20),
        how=st.sampled_from(["flip", "cut", "delete"]),
        is_open=st.booleans(),
    )
    def damage(self, which: int, where: int, how: str, is_open: bool) -> None:
        """What is drawn does not hang on the files, which the store's thread writes in its own time."""
        self.flush()
        if not is_open:
            self.store.close()
        # One that was cut to nothing has no byte left to damage.
        if paths := [path for path in segments_of(self.directory) if path.stat().st_size]:
            path = paths[which % len(paths)]
            offset = where % path.stat().st_size
            match how:
                case "flip":
                    content = bytearray(path.read_bytes())
                    content[offset] ^= 1
                    path.write_bytes(content)
                case "cut":
                    os.truncate(path, offset)
                case _:
                    path.unlink()
        if not is_open:
            self.open()
        wanted = {key: memoryview(bytearray(len(c))) for key, (c, _) in self.stored.items()}
        found = self.store.get_many([(key, [buffer]) for key, buffer in wanted.items()])
        for (key, buffer), is_found in zip(wanted.items(), found, strict=True):
            if is_found:
                assert buffer == self.stored[key][0]
            else:
                assert not self.store.known(key)
                del self.stored[key]

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "store") and not self.queued:
            self.store.flush()
            self.store.check()
            files = [path for path in self.directory.rglob("*.*") if path.is_file()]
            assert sum(path.stat().st_size for path in files) <= QUOTA_BYTES + 1000
            stats = self.store.stats()
            assert stats.queued_bytes == stats.num_queued == 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.patch.undo()
        shutil.rmtree(self.root)


TestStoreMachine = pytest.mark.slow(StoreMachine.TestCase)
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=30)
