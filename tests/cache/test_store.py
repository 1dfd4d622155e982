"""What is put is found again, byte by byte, or is a miss; memory, quota and time are bounded."""

import os
import threading
from typing import Any

import pytest
import structlog

from prfaas.cache import segments
from prfaas.cache.store import MIN_QUOTA_BYTES
from tests.cache.stores import (
    bytes_of,
    deleted_segments,
    fill,
    flip,
    get,
    key_of,
    open_store,
    opened,
    put,
    segments_of,
    whole,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


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
        if flags & os.RWF_NOWAIT and offset + sum(map(len, buffers)) > 50_000:
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
        assert told == [(70_000, 10_000), (90_000, 10_000)]
        told.clear()
        assert whole(store, range(2)) == [0, 1]
        assert told == [], "what is in memory is not asked for"


def test_neighbours_are_read_at_once_as_far_as_that_is_worth_it(directory, monkeypatch):
    real, read = os.preadv, []

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        read.append((offset, sum(map(len, buffers))))
        return real(fd, buffers, offset, flags)

    with opened(directory) as store:
        fill(store, range(5), 100_000)
        monkeypatch.setattr(os, "preadv", preadv)
        buffers = {number: memoryview(bytearray(100_000)) for number in (0, 1, 2, 4)}
        assert all(store.get_many([(key_of(n), [buffer]) for n, buffer in buffers.items()]))
        assert all(buffer == bytes_of(n, 100_000) for n, buffer in buffers.items())
    assert read == [(0, 200_000), (200_000, 100_000), (400_000, 100_000)]


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_damaged_record_does_not_take_its_neighbours_with_it(directory, is_cut):
    with opened(directory) as store:
        fill(store, range(5))
        if is_cut:
            os.truncate(segments_of(directory)[0], 35_000)
        else:
            flip(segments_of(directory)[0], 35_000)
        buffers = [memoryview(bytearray(10_000)) for _ in range(5)]
        found = store.get_many([(key_of(n), [buffer]) for n, buffer in enumerate(buffers)])
        assert found == [True, True, True, False, not is_cut]
        assert all(buffers[n] == bytes_of(n, 10_000) for n in range(5) if found[n])


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
    deleted = deleted_segments(monkeypatch)
    with opened(directory) as store:
        assert len(deleted) > 1
        assert not any(map(any, deleted))
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
