"""Files stay within the quota, tenants within theirs, and records within their time."""

import os
import threading
from pathlib import Path

import pytest

from prfaas.cache.store import MIN_QUOTA_BYTES
from prfaas.errors import ConfigError
from tests.cache.stores import (
    EPOCH_S,
    IDENTITY,
    Hand,
    bytes_of,
    deleted_segments,
    fill,
    generation_of,
    index_of,
    key_of,
    open_store,
    opened,
    put,
    segments_of,
    whole,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


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


@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_clock_that_was_set_back_makes_nothing_live_longer(directory, is_reopened):
    wall = Hand()
    with opened(directory, ttl_s=1600, wall=wall) as store:
        fill(store, range(5))
        wall.now_s -= 86_400
        if not is_reopened:
            fill(store, range(5, 10))
            assert whole(store, range(10)) == list(range(10))
            wall.now_s += 1600
            assert whole(store, range(10)) == []
    with opened(directory, ttl_s=1600, wall=wall) as store:
        wall.now_s += 1600
        assert whole(store, range(10)) == []


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


@pytest.mark.parametrize("zero_freed", [True, False])
@pytest.mark.parametrize("why", ["evicted", "expired", "damaged", "of another model", "unnamed"])
def test_what_is_deleted_was_overwritten_if_that_was_asked_for(
    directory, monkeypatch, why, zero_freed
):
    wall = Hand()
    limits = {"quota_bytes": 1 << 20, "zero_freed": zero_freed, "wall": wall}
    if why == "expired":
        limits["ttl_s"] = 1000.0
    identity = "another" if why == "of another model" else IDENTITY
    with opened(directory, identity=identity, **limits) as store:
        fill(store, range(60))
    if why == "damaged":
        for path in segments_of(directory):
            path.write_bytes(bytes(range(256)) * 10)
    if why == "unnamed":
        index_of(directory).unlink()
    deleted = deleted_segments(monkeypatch)
    wall.now_s += 1000
    with opened(directory, **limits) as store:
        fill(store, range(100, 160))
    assert deleted
    assert [any(content) for content in deleted] == [not zero_freed] * len(deleted)


def test_what_is_cut_was_overwritten_if_that_was_asked_for(directory, monkeypatch):
    with opened(directory) as store:
        fill(store, range(3))
    (path,) = segments_of(directory)
    with path.open("ab") as file:
        file.write(b"x" * 5000)
    cut: list[bytes] = []
    real = os.ftruncate

    def truncate(descriptor: int, num_bytes: int) -> None:
        if num_bytes == 30_000:
            cut.append(path.read_bytes())
        real(descriptor, num_bytes)

    monkeypatch.setattr(os, "ftruncate", truncate)
    with opened(directory, zero_freed=True) as store:
        assert whole(store, range(3)) == [0, 1, 2]
    assert [content[30_000:] for content in cut] == [bytes(5000)]
    assert path.stat().st_size == 30_000
