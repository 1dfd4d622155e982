"""Codecs are lossless on any bytes, and refuse what is damaged before they allocate for it."""

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.transport.codec import decode_page, encode_page
from prfaas.transport.wire import Codec

codecs = st.sampled_from(list(Codec))
items = st.sampled_from([2, 4])


@given(codec=codecs, page=st.binary(max_size=3000), item_bytes=items)
def test_any_bytes_come_out_as_they_went_in(codec, page, item_bytes):
    encoded = bytes(encode_page(codec, page, item_bytes))
    assert decode_page(codec, encoded, len(page), item_bytes) == page


@given(codec=codecs, seed=st.integers(0, 99), num_items=st.integers(1, 5000))
def test_numbers_come_out_bit_by_bit(codec, seed, num_items):
    page = np.random.default_rng(seed).standard_normal(num_items).astype("<f4").tobytes()
    assert decode_page(codec, bytes(encode_page(codec, page, 4)), len(page), 4) == page


def test_numbers_of_one_size_shrink():
    page = np.random.default_rng(0).standard_normal(1 << 15).astype("<f4").tobytes()
    assert len(encode_page(Codec.ZSTD, page, 4)) < 0.86 * len(page)
    half = page[: 1 << 16]  # a page of 2-byte numbers shrinks by the plane that has the exponents
    brain = np.frombuffer(half, "<u4").astype("<u4") >> 16
    assert len(encode_page(Codec.ZSTD, brain.astype("<u2").tobytes(), 2)) < 0.75 * len(half) / 2
    assert len(zstandard.ZstdCompressor(level=1).compress(page)) > 0.9 * len(page)


@given(data=st.binary(max_size=300), num_bytes=st.integers(0, 300))
def test_bytes_that_are_no_page_are_refused(data, num_bytes):
    try:
        page = decode_page(Codec.ZSTD, data, num_bytes, 4)
    except ProtocolError:
        return
    assert len(page) == num_bytes


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_damaged_page_is_refused_or_of_the_right_length(position, bit):
    page = bytes(range(256)) * 8
    encoded = bytearray(encode_page(Codec.ZSTD, page, 4))
    encoded[position % len(encoded)] ^= 1 << bit
    try:
        assert len(decode_page(Codec.ZSTD, bytes(encoded), len(page), 4)) == len(page)
    except ProtocolError:
        return


@pytest.mark.parametrize("num_bytes", [0, 1, 2047, 2049])
def test_a_page_of_another_length_is_refused(num_bytes):
    for codec in Codec:
        encoded = bytes(encode_page(codec, bytes(2048), 4))
        with pytest.raises(ProtocolError):
            decode_page(codec, encoded, num_bytes, 4)


def test_what_follows_a_page_is_refused():
    encoded = bytes(encode_page(Codec.ZSTD, bytes(2048), 4))
    with pytest.raises(ProtocolError):
        decode_page(Codec.ZSTD, encoded + b"x", 2048, 4)


@pytest.mark.parametrize("says_its_size", [True, False])
def test_a_bomb_costs_no_memory(says_its_size):
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=says_its_size)
    bomb = compressor.compress(bytes(64 << 20))
    data = len(bomb).to_bytes(4, "little") + bomb
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="does not say"):
            decode_page(Codec.ZSTD, data, 40_000, 4)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
