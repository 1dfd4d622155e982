"""Whatever happens to the files, the disk or the directory: a clear refusal or a miss."""

import errno
import os
import resource
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lmdb
import pytest
import structlog

from prfaas.cache import segments
from prfaas.cache.store_directory import generation_name
from prfaas.cache.store_index import Index
from prfaas.errors import ConfigError, StoreError
from tests.cache.stores import (
    IDENTITY,
    Hand,
    bytes_of,
    fill,
    flip,
    generation_of,
    get,
    index_of,
    key_of,
    open_store,
    opened,
    put,
    segments_of,
    whole,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


# ---------------------------------------------------------------- segments


@pytest.mark.parametrize("is_open", [True, False])
def test_a_flipped_byte_is_a_miss_and_the_record_goes(directory, is_open):
    store = open_store(directory)
    fill(store, range(5))
    if not is_open:
        store.close()
    flip(segments_of(directory)[0], 25_000)
    if not is_open:
        store = open_store(directory)
    with structlog.testing.capture_logs() as logs:
        assert whole(store, range(5)) == [0, 1, 3, 4]
        assert whole(store, range(5)) == [0, 1, 3, 4]
    assert [entry["event"] for entry in logs] == ["store.record_damaged"]
    assert store.stats().records.counts.num_damaged == 1
    store.check()
    fill(store, range(2, 3))
    assert whole(store, range(5)) == [0, 1, 2, 3, 4], "it can be stored anew"
    store.check()
    store.close()
    with opened(directory) as store:
        assert whole(store, range(5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_cut_segment_loses_what_was_cut_and_no_more(directory, is_open):
    store = open_store(directory)
    fill(store, range(5))
    if not is_open:
        store.close()
    os.truncate(segments_of(directory)[0], 29_999)
    if not is_open:
        store = open_store(directory)
        assert store.stats().records.num_records == 2
    assert whole(store, range(5)) == [0, 1]
    assert store.stats().records.counts.num_damaged == (3 if is_open else 0)
    store.check()
    store.close()


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("instead", ["nothing", "link", "pipe", "directory"])
def test_a_segment_that_is_no_longer_its_file_is_a_miss(directory, is_open, instead):
    store = open_store(directory)
    fill(store, range(5))
    if not is_open:
        store.close()
    (path,) = segments_of(directory)
    kept = directory.parent / "kept"
    path.rename(kept)
    match instead:
        case "link":
            path.symlink_to(kept)
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case _:
            assert instead == "nothing"
    if not is_open:
        store = open_store(directory)
    assert whole(store, range(5)) == []
    if instead == "directory":
        path.rmdir()
    fill(store, range(5))
    assert whole(store, range(5)) == list(range(5))
    store.close()
    assert kept.stat().st_size == 50_000, "nothing outside was touched"


def test_swapped_segments_are_misses(directory):
    with opened(directory) as store:
        fill(store, range(1), tenant=b"a")
        fill(store, range(1, 2), tenant=b"b")
    first, second = segments_of(directory)
    other = first.with_name("other")
    first.rename(other)
    second.rename(first)
    other.rename(second)
    with opened(directory) as store:
        assert whole(store, range(2)) == []


def test_no_file_left_to_open_is_a_miss_once_and_not_the_end_of_the_record(directory, monkeypatch):
    with opened(directory) as store:
        fill(store, range(3))
        with monkeypatch.context() as patch:
            patch.setattr(
                segments.SegmentFiles, "opened", raising(OSError(errno.EMFILE, "too many"))
            )
            assert whole(store, range(3)) == []
        assert whole(store, range(3)) == [0, 1, 2]


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


# ---------------------------------------------------------------- crashes


def test_what_no_index_names_is_reclaimed(directory):
    with opened(directory) as store:
        fill(store, range(5))
    (path,) = segments_of(directory)
    with path.open("ab") as file:
        file.write(bytes(1234))
    path.with_name("00000099.seg").write_bytes(bytes(1000))
    with opened(directory) as store:
        assert [p.stat().st_size for p in segments_of(directory)] == [50_000]
        assert whole(store, range(5)) == list(range(5))


def test_a_lost_index_is_an_empty_store(directory):
    with opened(directory) as store:
        fill(store, range(5))
    index_of(directory).unlink()
    with opened(directory) as store:
        assert whole(store, range(5)) == []
        assert segments_of(directory) == []
        fill(store, range(5))


def test_an_old_index_over_newer_segments_never_gives_other_bytes(directory):
    with opened(directory) as store:
        fill(store, range(5))
    old = index_of(directory).read_bytes()
    with opened(directory) as store:
        store.clear()
    with opened(directory) as store:
        fill(store, range(100, 120))
    index_of(directory).write_bytes(old)
    with opened(directory) as store:
        assert whole(store, range(5)) == []


def test_bytes_and_names_are_synced_before_the_index_commits(directory, monkeypatch):
    steps: list[str] = []

    def noted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            steps.append(name)
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    with opened(directory) as store:
        noted(os, "pwritev")
        noted(os, "fdatasync")
        noted(segments.SegmentFiles, "sync_names")
        noted(Index, "apply")
        fill(store, range(1))
        assert steps == ["pwritev", "fdatasync", "sync_names", "apply"]
        steps.clear()
        fill(store, range(1, 2))
        assert steps == ["pwritev", "fdatasync", "apply"], "the name is synced once"
        steps.clear()


# ---------------------------------------------------------------- a full disk


@pytest.mark.parametrize(
    ("where", "name", "error"),
    [
        (os, "pwritev", OSError(errno.ENOSPC, "No space left on device")),
        (os, "pwritev", OSError(errno.EIO, "Input/output error")),
        (os, "fdatasync", OSError(errno.EIO, "Input/output error")),
        (segments.SegmentFiles, "create", OSError(errno.EROFS, "Read-only file system")),
        (segments.SegmentFiles, "sync_names", OSError(errno.EIO, "Input/output error")),
        (Index, "apply", StoreError("the index is full")),
    ],
    ids=["full", "broken", "unsynced", "read-only", "unnamed", "unindexed"],
)
def test_what_could_not_be_written_is_a_miss_until_it_can(
    directory, monkeypatch, where, name, error
):
    clock = Hand()
    with opened(directory, clock=clock) as store:
        fill(store, range(3))
    outcomes: list[bool] = []
    store = open_store(directory, clock=clock)
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(where, name, raising(error))
        assert put(store, key_of(3), bytes_of(3, 10_000), done=outcomes.append)
        store.flush()
        assert outcomes == [False]
        assert not put(store, key_of(4), bytes_of(4, 10_000)), "writing rests a while"
        clock.now_s += 1
        assert put(store, key_of(4), bytes_of(4, 10_000))
        store.flush()
    assert [entry["event"] for entry in logs] == ["store.write_failed"], "said once"
    assert store.stats().num_failures == 2
    assert store.stats().num_dropped_failing == 3
    assert whole(store, range(5)) == [0, 1, 2]
    store.check()
    clock.now_s += 1
    assert not put(store, key_of(3), b"x"), "the second pause is longer"
    clock.now_s += 1
    with structlog.testing.capture_logs() as logs:
        fill(store, range(3, 6))
    assert [entry["event"] for entry in logs] == ["store.write_recovered"]
    assert whole(store, range(6)) == list(range(6))
    store.check()
    store.close()
    with opened(directory) as store:
        assert whole(store, range(6)) == list(range(6))


def test_half_a_write_is_taken_back(directory, monkeypatch):
    real = os.pwritev
    clock = Hand()
    with opened(directory, clock=clock) as store:
        fill(store, range(2))
        monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: real(fd, [parts[0][:100]], at))
        put(store, key_of(2), bytes_of(2, 10_000))
        store.flush()
        monkeypatch.undo()
        assert [path.stat().st_size for path in segments_of(directory)] == [20_000]
        clock.now_s += 1
        fill(store, range(2, 4))
        assert whole(store, range(4)) == [0, 1, 2, 3]


def test_a_write_that_the_system_cuts_short_is_a_miss_until_it_need_not(directory):
    clock = Hand()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(directory, clock=clock) as store:
        fill(store, range(6))
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, limits[1]))
        try:
            assert put(store, key_of(6), bytes_of(6, 10_000))
            store.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.stats().num_failures == 1
        assert whole(store, range(7)) == list(range(6))
        assert [path.stat().st_size for path in segments_of(directory)] == [60_000]
        clock.now_s += 1
        fill(store, range(6, 8))
    with opened(directory) as store:
        assert whole(store, range(8)) == list(range(8))


def test_a_file_that_cannot_be_deleted_still_counts_and_is_the_next_to_go(directory, monkeypatch):
    clock = Hand()
    with opened(directory, clock=clock, quota_bytes=1 << 20) as store:
        fill(store, range(60))
        before = segments_of(directory)
        refused = 60
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", raising(OSError(errno.EIO, "Input/output error")))
            while not store.stats().num_failures:
                refused += 1
                assert put(store, key_of(refused), bytes_of(refused, 10_000))
                store.flush()
        assert segments_of(directory)[: len(before)] == before
        store.check()
        clock.now_s += 1
        fill(store, range(refused, refused + 20))
        assert set(range(refused, refused + 20)) <= set(whole(store, range(refused + 20)))
        assert before[0] not in segments_of(directory)
        assert sum(path.stat().st_size for path in segments_of(directory)) < 1 << 20


def test_an_error_of_our_own_ends_the_thread_but_gives_every_page_back(directory, monkeypatch):
    outcomes: list[bool] = []
    monkeypatch.setattr("threading.excepthook", lambda *_: None)
    store = open_store(directory)
    monkeypatch.setattr(Index, "apply", raising(ZeroDivisionError()))
    put(store, key_of(1), b"one", done=outcomes.append)
    store.flush()
    store._thread.join()
    assert outcomes == [False]
    assert not put(store, key_of(2), b"two")
    monkeypatch.undo()
    store.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(path)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_evicts_and_goes_on(small_disk):
    with opened(small_disk / "cache", quota_bytes=16 << 20) as store:
        fill(store, range(500), 20_000)
        found = whole(store, range(500), 20_000)
        assert 50 < len(found) < 200
        assert 499 in found
        assert store.stats().num_failures == 0


def test_a_disk_that_others_fill_is_left_to_them(small_disk):
    clock = Hand()
    with opened(small_disk / "cache", quota_bytes=8 << 20, clock=clock) as store:
        fill(store, range(100), 10_000)
        with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)) == 4096:
                pass
        for number in range(100, 400):
            put(store, key_of(number), bytes_of(number, 10_000))
            clock.now_s += 100
            store.flush()
        found = whole(store, range(400))
        (small_disk / "filler").unlink()
        clock.now_s += 100
        fill(store, range(400, 410))
        assert whole(store, range(400, 410)) == list(range(400, 410))
    with opened(small_disk / "cache", quota_bytes=8 << 20) as store:
        assert set(found) <= set(whole(store, range(410)))


def test_a_store_opens_on_a_full_disk(small_disk):
    with opened(small_disk / "cache", quota_bytes=8 << 20) as store:
        for start in range(0, 2000, 500):
            fill(store, range(start, start + 500), 1000)
    with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
    with opened(small_disk / "cache", quota_bytes=8 << 20) as store:
        assert len(whole(store, range(2000), 1000)) > 1000


def test_a_read_only_disk_is_refused(small_disk):
    with opened(small_disk / "cache") as store:
        fill(store, range(3))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ConfigError, match="Read-only"):
        open_store(small_disk / "cache")


# ---------------------------------------------------------------- who and where


def test_a_foreign_version_is_not_touched(directory):
    with opened(directory) as store:
        fill(store, range(3))
    newer = directory / generation_name(IDENTITY).replace("v1-", "v2-")
    generation_of(directory).rename(newer)
    index = (newer / "index.mdb").read_bytes()
    with opened(directory) as store:
        assert whole(store, range(3)) == []
    assert (newer / "index.mdb").read_bytes() == index


def test_lmdb_is_not_asked_whether_a_key_is_known(directory, monkeypatch):
    with opened(directory) as store:
        fill(store, range(3))
        with monkeypatch.context() as patch:
            patch.setattr(Index, "get_many", raising(lmdb.Error("asked")))
            assert [store.known(key_of(n)) for n in range(4)] == [True, True, True, False]
        assert get(store, key_of(0), 10_000)
