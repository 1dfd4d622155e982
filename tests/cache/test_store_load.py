"""What is taken over at an open is what the index names and the files hold, and nothing else."""

import os
import tempfile
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.pool import PageKey
from prfaas.cache.segments import segment_files
from prfaas.cache.store_index import Record, encode_key, pack
from prfaas.cache.store_load import load
from prfaas.cache.store_scan import write_tables

NOW_S = 1_800_000_000.0
KEYS = st.tuples(
    st.integers(0, 65_535), st.binary(min_size=1, max_size=4) | st.binary(min_size=32, max_size=32)
)
RECORDS = st.builds(
    Record,
    segment=st.integers(1, 4),
    offset=st.integers(0, 60),
    length=st.integers(1, 60),
    checksum=st.integers(0, 2**64 - 1),
    created_s=st.floats(NOW_S - 100, NOW_S + 1),
    tenant=st.just(b""),
).map(lambda record: record._replace(tenant=b"t\0" * record.segment))


def entries_of(records: dict[PageKey, Record]) -> bytes:
    listing = BytesIO()
    named = [(encode_key(key), found) for key, found in records.items()]
    write_tables([(name, pack(name, found)) for name, found in named], listing)
    return listing.getvalue()


@given(
    records=st.dictionaries(KEYS, RECORDS, max_size=20),
    sizes=st.dictionaries(st.integers(1, 5), st.integers(0, 100)),
)
def test_a_record_is_known_if_its_file_reaches_its_end(records, sizes):
    with tempfile.TemporaryDirectory() as path, segment_files(Path(path)) as files:
        for number, size_bytes in sizes.items():
            descriptor = files.create(number)
            os.ftruncate(descriptor, size_bytes)
            os.close(descriptor)
            files.set_used_s(number, NOW_S - 50)
        loaded = load(files, entries_of(records), NOW_S)
        left = files.sizes()

    whole = {
        key: found
        for key, found in records.items()
        if found.offset + found.length <= sizes.get(found.segment, 0)
    }
    assert {key: segment.number for key, segment in loaded.where.items()} == {
        key: found.segment for key, found in whole.items()
    }
    assert loaded.stale == records.keys() - whole.keys()
    assert loaded.next_number > max(
        [*sizes, *(found.segment for found in records.values())], default=0
    )
    segments = {segment.number: segment for segment in loaded.account}
    assert left == {number: segment.size_bytes for number, segment in segments.items()}
    for number, segment in segments.items():
        held = {key: found for key, found in whole.items() if found.segment == number}
        assert sorted(segment.keys) == sorted(held)
        assert segment.size_bytes == max(found.offset + found.length for found in held.values())
        assert segment.live_bytes == sum(found.length for found in held.values())
        assert segment.tenant == b"t\0" * number
        assert segment.created_s == min(NOW_S, *(found.created_s for found in held.values()))
        assert segment.used_s <= NOW_S


@pytest.mark.parametrize("num_records", [0, 1, 300])
def test_keys_come_in_the_order_of_the_files(tmp_path, num_records):
    records = {
        (0, number.to_bytes(32, "little")): Record(number // 100 + 1, number % 100, 1, 0, 0.0, b"")
        for number in range(num_records)
    }
    with segment_files(tmp_path) as files:
        for number in range(1, 4):
            descriptor = files.create(number)
            os.ftruncate(descriptor, 100)
            os.close(descriptor)
        loaded = load(files, entries_of(records), NOW_S)
    assert list(loaded.where) == list(records)
