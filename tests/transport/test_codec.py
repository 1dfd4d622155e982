"""What is called lossless is so on any bytes; what is damaged is refused before anything is allocated for it."""

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.transport.codec import LOSSLESS, decode_page, encode_page
from prfaas.transport.kv_numbers import PageNumbers
from prfaas.transport.wire import Codec

FLOATS = PageNumbers(dtype="float32")
ROWS = PageNumbers(dtype="float32", row_items=64)

codecs = st.sampled_from(sorted(LOSSLESS))
dtypes = st.sampled_from(["float32", "float16", "bfloat16", "bytes"])


def encoded_page(codec: Codec, page: bytes, numbers: PageNumbers = FLOATS) -> bytes:
    used, encoded = encode_page(codec, page, numbers)
    assert used is codec
    return bytes(encoded)


@given(codec=codecs, page=st.binary(max_size=3000), dtype=dtypes)
def test_any_bytes_come_out_of_a_lossless_codec_as_they_went_in(codec, page, dtype):
    numbers = PageNumbers(dtype=dtype, row_items=8)
    used, encoded = encode_page(codec, page, numbers)
    assert used in (codec, Codec.RAW)
    assert len(encoded) <= len(page)
    assert decode_page(used, bytes(encoded), len(page), numbers) == page


@given(codec=st.sampled_from(list(Codec)), page=st.binary(max_size=3000), dtype=dtypes)
def test_a_page_that_must_stay_exact_does_in_every_codec(codec, page, dtype):
    numbers = PageNumbers(dtype=dtype)
    used, encoded = encode_page(codec, page, numbers)
    assert used in LOSSLESS
    assert decode_page(used, bytes(encoded), len(page), numbers) == page


@given(codec=codecs, seed=st.integers(0, 99), num_items=st.integers(1, 5000))
def test_numbers_come_out_bit_by_bit(codec, seed, num_items):
    page = np.random.default_rng(seed).standard_normal(num_items).astype("<f4").tobytes()
    used, encoded = encode_page(codec, page, ROWS)
    assert decode_page(used, bytes(encoded), len(page), ROWS) == page


def test_numbers_of_one_size_shrink():
    page = np.random.default_rng(0).standard_normal(1 << 15).astype("<f4").tobytes()
    assert len(encoded_page(Codec.ZSTD, page)) < 0.86 * len(page)
    half = page[: 1 << 16]  # a page of 2-byte numbers shrinks by the plane that has the exponents
    brain = np.frombuffer(half, "<u4").astype("<u4") >> 16
    numbers = PageNumbers(dtype="bfloat16")
    encoded = encoded_page(Codec.ZSTD, brain.astype("<u2").tobytes(), numbers)
    assert len(encoded) < 0.75 * len(half) / 2
    assert len(zstandard.ZstdCompressor(level=1).compress(page)) > 0.9 * len(page)


@given(
    codec=st.sampled_from(list(Codec)),
    data=st.binary(max_size=300),
    num_bytes=st.integers(0, 300),
    dtype=dtypes,
    row_items=st.sampled_from([None, 1, 2, 16]),
)
def test_any_bytes_are_a_page_of_the_right_length_or_refused(
    codec, data, num_bytes, dtype, row_items
):
    numbers = PageNumbers(dtype=dtype, row_items=row_items)
    try:
        page = decode_page(codec, data, num_bytes, numbers)
    except ProtocolError:
        return
    assert len(page) == num_bytes


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_damaged_page_is_refused_or_of_the_right_length(position, bit):
    page = bytes(range(256)) * 8
    encoded = bytearray(encoded_page(Codec.ZSTD, page))
    encoded[position % len(encoded)] ^= 1 << bit
    try:
        assert len(decode_page(Codec.ZSTD, bytes(encoded), len(page), FLOATS)) == len(page)
    except ProtocolError:
        return


@pytest.mark.parametrize("num_bytes", [0, 1, 2047, 2049])
def test_a_page_of_another_length_is_refused(num_bytes):
    for codec in Codec:
        encoded = encoded_page(codec, bytes(2048), ROWS)
        with pytest.raises(ProtocolError):
            decode_page(codec, encoded, num_bytes, ROWS)


def test_what_follows_a_page_is_refused():
    for codec in Codec:
        encoded = encoded_page(codec, bytes(2048), ROWS)
        with pytest.raises(ProtocolError):
            decode_page(codec, encoded + b"x", 2048, ROWS)


@pytest.mark.parametrize("says_its_size", [True, False])
def test_a_bomb_costs_no_memory(says_its_size):
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=says_its_size)
    bomb = compressor.compress(bytes(64 << 20))
    data = len(bomb).to_bytes(4, "little") + bomb
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="does not say"):
            decode_page(Codec.ZSTD, data, 40_000, FLOATS)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
