"""What is put is found again, byte by byte, or is a miss; memory, quota and time are bounded."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog

from prfaas.cache import segments
from prfaas.cache.store import MIN_QUOTA_BYTES
from prfaas.errors import ConfigError
from tests.cache.stores import (
    EPOCH_S,
    Hand,
    bytes_of,
    fill,
    generation_of,
    get,
    key_of,
    open_store,
    opened,
    put,
    segments_of,
    whole,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "cache"


class Gate:
    """Holds the writing thread before it writes bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        write = os.pwritev

        def gated(*arguments: Any) -> int:
            self.reached.set()
            assert self.open.wait(60)
            return write(*arguments)

        monkeypatch.setattr(os, "pwritev", gated)


def test_a_record_is_found_again_in_the_same_bytes(directory):
    with opened(directory) as store:
        fill(store, range(20))
        assert whole(store, range(25)) == list(range(20))


def test_a_record_is_found_after_a_restart(directory):
    with opened(directory) as store:
        fill(store, range(20))
    with opened(directory) as store:
        assert store.stats().records.num_records == 20
        assert whole(store, range(20)) == list(range(20))


def test_many_parts_and_one_part_are_the_same_bytes(directory):
    content = bytes_of("parts", 3000)
    with opened(directory) as store:
        view = memoryview(content)
        assert store.put(key_of(1), [view[i : i + 1] for i in range(3000)])
        store.flush()
        assert get(store, key_of(1), 3000) == content
        one_by_one = memoryview(bytearray(3000))
        assert store.get(key_of(1), [one_by_one[i : i + 1] for i in range(3000)])
        assert one_by_one == content


def test_groups_do_not_share_keys(directory):
    with opened(directory) as store:
        put(store, key_of(1, group=0), b"zero")
        put(store, key_of(1, group=1), b"one!")
        store.flush()
        assert get(store, key_of(1, group=0), 4) == b"zero"
        assert get(store, key_of(1, group=1), 4) == b"one!"
        assert not store.known(key_of(1, group=2))


def test_get_many_answers_in_the_order_asked(directory):
    with opened(directory) as store:
        fill(store, range(30), 50_000)
        buffers = {number: memoryview(bytearray(50_000)) for number in (29, 3, 77, 17, 0)}
        found = store.get_many([(key_of(n), [buffer]) for n, buffer in buffers.items()])
        assert found == [True, True, False, True, True]
        assert all(buffers[n] == bytes_of(n, 50_000) for n in (29, 3, 17, 0))


@pytest.mark.parametrize("refusal", ["raises", "short"])
def test_a_read_that_would_wait_has_the_disk_read_ahead(directory, monkeypatch, refusal):
    real, told = os.preadv, []

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT and offset >= 20_000:
            if refusal == "raises":
                raise BlockingIOError
            return real(fd, [buffers[0][:1]], offset)
        return real(fd, buffers, offset, flags)

    def advise(_fd: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        told.append((offset, length))

    with opened(directory) as store:
        fill(store, range(10))
        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(os, "posix_fadvise", advise)
        buffers = {number: memoryview(bytearray(10_000)) for number in (9, 0, 4, 3, 2, 1, 7)}
        assert all(store.get_many([(key_of(n), [buffer]) for n, buffer in buffers.items()]))
        assert all(buffer == bytes_of(n, 10_000) for n, buffer in buffers.items())
        assert told == [(20_000, 30_000), (70_000, 10_000), (90_000, 10_000)]
        told.clear()
        assert whole(store, range(2)) == [0, 1]
        assert told == [], "what is in memory is not asked for"


def test_a_record_of_another_length_is_a_miss_for_good(directory):
    with opened(directory) as store:
        fill(store, range(2))
        assert get(store, key_of(0), 9_999) is None
        assert not store.known(key_of(0))
        assert whole(store, range(2)) == [1]


def test_what_waits_is_not_yet_known_and_its_pages_are_given_back_once(directory, monkeypatch):
    gate = Gate(monkeypatch)
    outcomes: list[bool] = []
    with opened(directory) as store:
        assert put(store, key_of(1), b"first", done=outcomes.append)
        assert gate.reached.wait(60)
        assert not store.known(key_of(1))
        assert not put(store, key_of(1), b"first", done=outcomes.append), "queued already"
        assert outcomes == []
        gate.open.set()
        store.flush()
        assert outcomes == [True]
        assert not put(store, key_of(1), b"first", done=outcomes.append), "known already"
        assert outcomes == [True]


def test_the_queue_is_bounded_and_what_it_refuses_is_counted(directory, monkeypatch):
    gate = Gate(monkeypatch)
    with opened(directory, max_queued_bytes=2500) as store:
        queued = [put(store, key_of(number), bytes(1000)) for number in range(5)]
        assert queued == [True, True, False, False, False]
        assert store.stats().num_dropped_full == 3
        assert store.stats().queued_bytes == 2000
        gate.open.set()
        store.flush()
        assert store.stats().queued_bytes == 0
        assert put(store, key_of(4), bytes(1000)), "there is room again"


def test_a_record_that_would_take_the_quota_alone_is_refused(directory):
    with opened(directory, quota_bytes=MIN_QUOTA_BYTES) as store:
        assert not put(store, key_of(1), bytes(MIN_QUOTA_BYTES // 4 + 1))
        assert store.stats().num_dropped_large == 1
        assert put(store, key_of(2), bytes(MIN_QUOTA_BYTES // 4))


def test_closing_writes_what_waits(directory, monkeypatch):
    store = open_store(directory)
    for number in range(10):
        put(store, key_of(number), bytes_of(number, 10_000))
    store.close()
    with opened(directory) as store:
        assert whole(store, range(10)) == list(range(10))


def test_closing_without_draining_gives_up_what_waits_and_says_so(directory, monkeypatch):
    gate = Gate(monkeypatch)
    store = open_store(directory)
    outcomes: dict[int, bool] = {}
    put(store, key_of(0), b"being written", done=lambda ok: outcomes.update({0: ok}))
    assert gate.reached.wait(60)
    put(store, key_of(1), b"waiting", done=lambda ok: outcomes.update({1: ok}))
    closing = threading.Thread(target=lambda: store.close(drain=False))
    closing.start()
    while 1 not in outcomes:
        assert closing.is_alive()
    gate.open.set()
    closing.join()
    assert outcomes == {0: True, 1: False}
    with opened(directory) as store:
        assert (store.known(key_of(0)), store.known(key_of(1))) == (True, False)


def file_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_the_files_stay_within_the_quota_and_the_newest_stay(directory):
    quota_bytes = 4 * MIN_QUOTA_BYTES
    wall = Hand()
    with opened(directory, quota_bytes=quota_bytes, wall=wall) as store:
        for number in range(160):
            wall.now_s += 1
            fill(store, range(number, number + 1), 70_000)
            if number % 20 == 0:
                assert file_bytes(generation_of(directory)) <= quota_bytes
        assert file_bytes(generation_of(directory)) <= quota_bytes
        found = whole(store, range(160), 70_000)
        assert found == list(range(160 - len(found), 160)), "the oldest go first"
        assert len(found) * 70_000 > quota_bytes * 0.8
        assert store.stats().records.counts.num_evicted == 160 - len(found)


@pytest.mark.parametrize("use", ["get", "touch"])
def test_what_is_used_outlives_what_is_not(directory, use):
    wall = Hand()
    with opened(directory, quota_bytes=4 * MIN_QUOTA_BYTES, wall=wall) as store:
        for number in range(160):
            wall.now_s += 1
            fill(store, range(number, number + 1), 70_000)
            if use == "get":
                assert whole(store, range(1), 70_000) == [0]
            else:
                store.touch([key_of(0), key_of(10_000)])
        assert store.known(key_of(0))
        assert not store.known(key_of(100))


def test_a_smaller_quota_holds_from_the_next_open_on(directory):
    with opened(directory, quota_bytes=8 * MIN_QUOTA_BYTES) as store:
        fill(store, range(300), 20_000)
    with opened(directory, quota_bytes=2 * MIN_QUOTA_BYTES) as store:
        assert file_bytes(generation_of(directory)) <= 2 * MIN_QUOTA_BYTES
        assert whole(store, range(300), 20_000)


def test_a_quota_too_small_for_anything_is_refused(directory):
    with pytest.raises(ConfigError, match=f"1000.*{MIN_QUOTA_BYTES}"):
        open_store(directory, quota_bytes=1000)
    assert not directory.exists()


def test_one_tenant_cannot_push_out_another(directory):
    limits = {"quota_bytes": 8 * MIN_QUOTA_BYTES, "tenant_quota_bytes": 2 * MIN_QUOTA_BYTES}
    with opened(directory, **limits) as store:
        fill(store, range(20), 20_000, tenant=b"quiet")
        fill(store, range(100, 600), 20_000, tenant=b"greedy")
        assert whole(store, range(20), 20_000) == list(range(20))
        tenants = store.stats().records.tenant_bytes
        assert tenants[b"quiet"] == 400_000
        assert MIN_QUOTA_BYTES < tenants[b"greedy"] <= 2 * MIN_QUOTA_BYTES
    with opened(directory, **limits) as store:
        assert store.stats().records.tenant_bytes == tenants, "a restart forgets no tenant"


def test_tenants_do_not_share_a_file(directory):
    with opened(directory) as store:
        fill(store, range(3), tenant=b"a")
        fill(store, range(3, 6), tenant=b"b")
        numbers = {record.tenant: record.segment for _, record in store.ls()}
        assert len(set(numbers.values())) == 2
        assert {record.segment for _, record in store.ls()} == set(numbers.values())


def test_more_tenants_than_open_files_are_served(directory):
    with opened(directory) as store:
        for number in range(40):
            put(store, key_of(number), bytes_of(number, 100), tenant=b"t%d" % number)
        store.flush()
        for number in range(40, 80):
            put(store, key_of(number), bytes_of(number, 100), tenant=b"t%d" % (number - 40))
            store.flush()
        assert whole(store, range(80), 100) == list(range(80))
        assert len(store.stats().records.tenant_bytes) == 40


def test_a_record_is_a_miss_at_the_end_of_its_time_and_its_bytes_go(directory):
    wall = Hand()
    with opened(directory, ttl_s=1600, wall=wall) as store:
        fill(store, range(5))
        wall.now_s += 800
        fill(store, range(5, 10))
        wall.now_s += 799
        assert whole(store, range(10)) == list(range(10))
        wall.now_s += 1
        assert whole(store, range(10)) == list(range(5, 10))
        fill(store, range(20, 21))
        assert store.stats().records.counts.num_expired == 5
        assert (
            b"".join(path.read_bytes() for path in segments_of(directory)).find(bytes_of(0, 10_000))
            < 0
        )
    wall.now_s += 800
    with opened(directory, ttl_s=1600, wall=wall) as store:
        assert whole(store, range(30)) == [20]


def test_records_written_over_a_long_time_do_not_all_live_as_long_as_the_last(directory):
    wall = Hand()
    with opened(directory, ttl_s=1600, wall=wall) as store:
        for number in range(40):
            fill(store, range(number, number + 1), 1000)
            wall.now_s += 50
        age_s = {number: wall.now_s - (EPOCH_S + 50 * number) for number in range(40)}
        found = whole(store, range(40), 1000)
        assert all(age_s[number] < 1600 for number in found)
        assert {number for number in range(40) if age_s[number] < 1500} <= set(found)


def test_the_thread_expires_records_without_being_asked(directory):
    with opened(directory, ttl_s=0.2) as store:
        fill(store, range(3))
        assert segments_of(directory)
        while segments_of(directory):
            threading.Event().wait(0.01)
        assert not store.known(key_of(0))


def test_another_identity_finds_nothing_and_takes_nothing_away(directory):
    with opened(directory) as store:
        fill(store, range(5))
    with opened(directory, identity="model b") as store:
        assert whole(store, range(5)) == []
        assert store.stats().records.other_bytes >= 50_000
        put(store, key_of(0), b"b" * 10_000)
    with opened(directory) as store:
        assert whole(store, range(5)) == list(range(5))


def test_what_other_models_left_goes_before_our_own(directory):
    quota_bytes = 4 * MIN_QUOTA_BYTES
    for identity in ("old", "older"):
        with opened(directory, identity=identity, quota_bytes=quota_bytes) as store:
            fill(store, range(50), 20_000)
    with opened(directory, quota_bytes=quota_bytes) as store:
        fill(store, range(180), 20_000)
        assert whole(store, range(180), 20_000) == list(range(180))
        assert store.stats().records.other_bytes == 0
        assert file_bytes(directory) <= quota_bytes + 100


def test_the_time_of_other_models_records_runs_out_too(directory):
    with opened(directory, identity="old") as store:
        fill(store, range(5))
    with opened(directory, ttl_s=100, wall=Hand(EPOCH_S * 2)) as store:
        assert store.stats().records.other_bytes < 50_000


@pytest.mark.parametrize("zero", [False, True])
def test_clear_removes_everything(directory, zero, monkeypatch):
    overwritten: list[memoryview] = []
    real = segments.write_at

    def watched(fd: int, parts: list[memoryview], offset: int) -> None:
        overwritten.extend(parts)
        real(fd, parts, offset)

    monkeypatch.setattr(segments, "write_at", watched)
    with opened(directory) as store:
        fill(store, range(40), 30_000)
        store.clear(zero=zero)
        assert whole(store, range(40), 30_000) == []
        assert segments_of(directory) == []
        assert sum(map(len, overwritten)) == (1_200_000 if zero else 0)
        assert not any(map(any, overwritten))
        fill(store, range(3))
    with opened(directory) as store:
        assert whole(store, range(40)) == [0, 1, 2]


def test_zeroing_that_was_interrupted_goes_on_at_the_next_open(directory, monkeypatch):
    store = open_store(directory)
    fill(store, range(40), 30_000)
    monkeypatch.setattr(store._records._files, "remove", lambda *_, **__: None)
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
    store.clear(zero=True)
    monkeypatch.undo()
    store.close()
    assert segments_of(directory)
    zeroed: list[int] = []
    real = segments.SegmentFiles._overwrite

    def watched(files: segments.SegmentFiles, number: int) -> None:
        zeroed.append(number)
        real(files, number)

    monkeypatch.setattr(segments.SegmentFiles, "_overwrite", watched)
    with opened(directory) as store:
        assert len(zeroed) > 1
        assert store.stats().records.num_records == 0
    assert segments_of(directory) == []


def test_verify_finds_every_damaged_record_and_no_other(directory):
    with opened(directory) as store:
        fill(store, range(400), 100_000 // 8)
        for path in segments_of(directory)[:3]:
            with path.open("r+b") as file:
                file.seek(5)
                byte = file.read(1)[0]
                file.seek(5)
                file.write(bytes([byte ^ 1]))
        steps = list(store.verify())
        assert steps[-1].num_damaged == 3
        assert steps[-1].num_done == steps[-1].num_records == 400
        assert steps[-1].done_bytes == steps[-1].total_bytes == 400 * 12_500
        assert store.stats().records.counts.num_hits == 0, "a check is no use"
        assert len(whole(store, range(400), 12_500)) == 397


def test_verify_goes_in_steps(directory):
    with opened(directory, quota_bytes=256 << 20) as store:
        fill(store, range(3), 10 << 20)
        assert [step.num_done for step in store.verify()] == [1, 2, 3]


def test_an_empty_record_and_a_long_tenant_are_mistakes(directory):
    with opened(directory) as store:
        with pytest.raises(ValueError, match="0 bytes"):
            store.put(key_of(1), [])
        with pytest.raises(ValueError, match="17 bytes"):
            store.put(key_of(1), [memoryview(b"x")], tenant=bytes(17))


def test_readers_and_evictions_at_once_never_give_wrong_bytes(directory):
    with opened(directory, quota_bytes=MIN_QUOTA_BYTES) as store:
        wrong, num_found = [], [0]
        is_over = threading.Event()

        def read(seed):
            number = seed
            while not is_over.is_set():
                number = (number * 7 + 1) % 200
                content = get(store, key_of(number), 10_000)
                num_found[0] += content is not None
                if content not in (None, bytes_of(number, 10_000)):
                    wrong.append(number)

        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
        for reader in readers:
            reader.start()
        try:
            for number in [*range(200)] * 3:
                put(store, key_of(number), bytes_of(number, 10_000))
                if number % 10 == 0:
                    store.flush()
        finally:
            is_over.set()
            for reader in readers:
                reader.join()
        assert not wrong
        assert num_found[0] > 0
        counts = store.stats().records.counts
        assert counts.num_evicted > 0
        assert counts.num_damaged == 0, "what was evicted under a reader is no damage"


def test_prompts_and_keys_are_not_logged(directory):
    with structlog.testing.capture_logs() as logs, opened(directory) as store:
        fill(store, range(3))
    assert [entry["event"] for entry in logs] == ["store.opened"]
