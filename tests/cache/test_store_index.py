"""The index keeps what it was told, all of a transaction or nothing, and believes no changed byte."""

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache import store_index
from prfaas.cache.store_index import Index, Record, decode_key, encode_key, open_index, pack, unpack
from prfaas.cache.store_scan import DamagedIndex, copy_index, main, renew_index, tables
from prfaas.errors import StoreError
from tests.cache.stores import key_of

pytestmark = pytest.mark.usefixtures("no_leaks")

KEYS = st.tuples(st.integers(0, 65_535), st.binary(min_size=1, max_size=64))
RECORDS = st.builds(
    Record,
    segment=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**64 - 1),
    length=st.integers(0, 2**32 - 1),
    checksum=st.integers(0, 2**64 - 1),
    created_s=st.floats(allow_nan=False),
    tenant=st.binary(max_size=16),
)


def record(number: int) -> Record:
    return Record(number, number * 2, number * 3, number * 4, number * 0.5, b"t")


def names(*numbers: int) -> list[bytes]:
    return [encode_key(key_of(number)) for number in numbers]


@pytest.fixture
def index(tmp_path):
    found = Index(tmp_path / "index.mdb")
    yield found
    found.close()


@given(key=KEYS, record=RECORDS)
def test_a_packed_record_is_unpacked_again(key, record):
    name = encode_key(key)
    assert decode_key(name) == key
    assert unpack(name, pack(name, record)) == record


@given(key=KEYS, record=RECORDS, bit=st.integers(0, 10_000), cut=st.integers(1, 200))
def test_no_changed_bit_of_a_name_or_value_is_believed(key, record, bit, cut):
    name = encode_key(key)
    both = bytearray(name + pack(name, record))
    position = bit % (8 * len(both))
    both[position // 8] ^= 1 << position % 8
    assert unpack(bytes(both[: len(name)]), bytes(both[len(name) :])) is None
    assert unpack(name, pack(name, record)[:-cut]) is None
    assert unpack(name, pack(name, record) + bytes(cut)) is None


def test_records_come_in_the_order_of_keys_and_all_of_them(index):
    keys = [key_of(number, number % 3) for number in range(2500)]
    index.apply(removals=[], additions=[(key, record(key[0])) for key in reversed(keys)])
    assert [key for key, _ in index.records()] == sorted(keys)
    index.apply(removals=keys[:2400], additions=[])
    assert [key for key, _ in index.records()] == sorted(keys[2400:])


def test_what_is_removed_and_added_at_once_is_there(index):
    index.apply(removals=[key_of(1)], additions=[(key_of(1), record(1))])
    index.apply(removals=[key_of(1)], additions=[(key_of(1), record(2))])
    assert index.get(key_of(1)) == record(2)


def test_a_transaction_that_fails_changes_nothing(index):
    index.apply(removals=[], additions=[(key_of(1), record(1))])
    too_long = (0, bytes(2000))
    with pytest.raises((StoreError, AssertionError)):
        index.apply(removals=[key_of(1)], additions=[(key_of(2), record(2)), (too_long, record(3))])
    assert index.get_many(names(1, 2)) == [record(1), None]


class Dawdling(list[bytes]):
    """Names whose first reader stops after one of them, inside its transaction."""

    def __init__(self, found: list[bytes], stop: Callable[[], None]) -> None:
        super().__init__(found)
        self.stops = [stop]

    def __iter__(self) -> Iterator[bytes]:
        for name in super().__iter__():
            yield name
            if self.stops:
                self.stops.pop()()


def test_a_read_is_of_one_moment_however_many_commits_want_its_pages(index):
    """Without LMDB's table of readers, only our own lock keeps those pages from being reused."""

    def write(version: int) -> None:
        changes = [(key_of(n), record(n + 1000 * version)) for n in range(500)]
        index.apply(removals=[], additions=changes)

    def write_often() -> None:
        for version in range(1, 20):
            write(version)

    write(0)
    writer = threading.Thread(target=write_often)

    def wait_for_the_writer() -> None:
        writer.start()
        writer.join(0.5)  # it waits for us; without the lock it would be done long before

    found = index.get_many(Dawdling(names(*range(500)), wait_for_the_writer))
    writer.join()
    assert found == [record(n) for n in range(500)]
    assert index.get_many(names(*range(500))) == [record(n + 19_000) for n in range(500)]


def test_a_full_map_fails_the_commit_and_leaves_reads_and_removals(tmp_path, monkeypatch):
    monkeypatch.setattr(store_index, "_MAP_BYTES", 256 << 10)
    index = Index(tmp_path / "index.mdb")
    index.apply(removals=[], additions=[(key_of(n), record(n)) for n in range(500)])
    with pytest.raises(StoreError, match="MAP_FULL"):
        index.apply(removals=[], additions=[(key_of(n), record(n)) for n in range(500, 5000)])
    assert index.is_usable
    assert dict(index.records()) == {key_of(n): record(n) for n in range(500)}
    index.apply(removals=[key_of(n) for n in range(400)], additions=[])
    assert dict(index.records()) == {key_of(n): record(n) for n in range(400, 500)}
    index.close()


def test_a_copy_holds_the_sound_entries_and_no_others(tmp_path):
    index = Index(tmp_path / "index.mdb")
    index.apply(removals=[], additions=[(key_of(number), record(number)) for number in range(3000)])
    index.close()
    with (
        open_index(tmp_path / "index.mdb") as raw,
        raw.begin(write=True) as transaction,
    ):
        transaction.put(encode_key(key_of(5)), b"nonsense")
        transaction.put(b"x", b"")
        transaction.put(encode_key((7, b"short")), pack(encode_key((7, b"short")), record(1)))
    listing = BytesIO()
    copy_index(tmp_path / "index.mdb", tmp_path / "copy.mdb", listing)
    expected = {key_of(n): record(n) for n in range(3000) if n != 5} | {(7, b"short"): record(1)}
    copy = Index(tmp_path / "copy.mdb")
    assert dict(copy.records()) == expected
    copy.close()
    told = {}
    for name_bytes, table in tables(listing.getvalue()):
        row_bytes = name_bytes + len(pack(b"", record(0)))
        for start in range(0, len(table), row_bytes):
            row = bytes(table[start : start + row_bytes])
            told[decode_key(row[:name_bytes])] = unpack(row[:name_bytes], row[name_bytes:])
    assert told == expected


def test_the_child_says_what_is_wrong_by_its_status(tmp_path, capfd):
    source, target = str(tmp_path / "index.mdb"), str(tmp_path / "new.mdb")
    assert main([source, target]) != 0
    (tmp_path / "index.mdb").write_bytes(b"noise" * 5000)
    assert main([source, target]) == 3
    assert capfd.readouterr().err


def test_no_index_needs_no_renewal(tmp_path):
    assert renew_index(tmp_path) == b""
    assert list(tmp_path.iterdir()) == []


def test_an_index_cut_in_its_middle_is_found_to_be_damaged_by_a_child_that_dies(tmp_path):
    index = Index(tmp_path / "index.mdb")
    index.apply(removals=[], additions=[(key_of(number), record(number)) for number in range(9000)])
    index.close()
    renew_index(tmp_path)
    size = (tmp_path / "index.mdb").stat().st_size
    with (tmp_path / "index.mdb").open("r+b") as file:
        file.truncate(size // 2 // 4096 * 4096)
    with pytest.raises(DamagedIndex, match=f"signal {signal.SIGBUS.value} "):
        renew_index(tmp_path)


def test_a_copy_that_cannot_be_written_is_told_from_a_damaged_index(tmp_path):
    index = Index(tmp_path / "index.mdb")
    index.apply(removals=[], additions=[(key_of(number), record(number)) for number in range(9000)])
    index.close()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(StoreError, match="Input/output") as caught:
            renew_index(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert type(caught.value) is StoreError, "neither damaged nor, with so much free, full"
    renew_index(tmp_path)
