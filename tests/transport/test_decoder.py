"""Runs of pages: each page lands in its place, whole and verified, or the stream is lost."""

import random
import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.transport.decoder import FrameDecoder
from prfaas.transport.seals import CHECKSUM, FrameSeal, NumberedChecksumSeal
from prfaas.transport.wire import (
    FROM_SENDER,
    HEADER_BYTES,
    MAX_RUN_BYTES,
    MAX_RUN_PAGES,
    Codec,
    DamagedFrame,
    Frame,
    FrameHeader,
    FrameType,
    encode_frame,
    encode_run,
)

Span = tuple[int, int, int, int, int]
"""(group, index, block, num_tokens, length)"""
TABLE_AT = HEADER_BYTES


class Held:
    """Pages by (group, index, block); those of `dropped` blocks are here already."""

    def __init__(self, dropped: frozenset[int] = frozenset()) -> None:
        self.pages: dict[tuple[int, int, int], bytearray] = {}
        self.dropped = dropped

    def resolve(self, header: FrameHeader) -> memoryview | None:
        if header.block in self.dropped:
            return None
        assert header.type is FrameType.PAGE
        assert header.codec is Codec.RAW
        key = (header.group, header.index, header.block)
        return memoryview(self.pages.setdefault(key, bytearray(header.length)))


def scatter(decoder: FrameDecoder, data: bytes, cuts: list[int]) -> list[Frame]:
    """Give bytes to a decoder as a socket does: over as many of its buffers as they fill."""
    frames, at = [], 0
    for number in range(len(data)):
        if at == len(data):
            break
        buffers = decoder.buffers()
        assert all(buffers)
        num_bytes = min(cuts[number % len(cuts)], sum(map(len, buffers)), len(data) - at)
        left = num_bytes
        for part in buffers:
            filled = min(left, len(part))
            part[:filled] = data[at : at + filled]
            at, left = at + filled, left - filled
        frame = decoder.received(num_bytes)
        if frame is not None:
            frames.append(frame)
    return frames


def run_frame(
    pages: dict[tuple[int, int, int], bytes], seal: FrameSeal = CHECKSUM, num_tokens: int = 7
) -> bytes:
    headers = [FrameHeader(FrameType.PAGE, Codec.RAW, *key, num_tokens=num_tokens) for key in pages]
    payloads = [memoryview(page) for page in pages.values()]
    return encode_run(headers, payloads, seal) + b"".join(payloads)


def forged(spans: list[Span], num_pages: int | None = None, length: int | None = None) -> bytes:
    """Return a frame whose checks all fit, whatever it says."""
    table = b"".join(struct.pack("<HHIII", *span) for span in spans)
    table += struct.pack("<I", xxhash.xxh3_64_intdigest(table) & 0xFFFFFFFF)
    payload = bytes(sum(min(span[4], 100) for span in spans))
    fields = struct.pack(
        "<BBHHHIII",
        FrameType.PAGES,
        0,
        0,
        len(spans) if num_pages is None else num_pages,
        0,
        0,
        0,
        len(table) + len(payload) if length is None else length,
    )
    check = xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF
    tag = xxhash.xxh3_64_intdigest(fields + table + payload)
    return fields + struct.pack("<IQ", check, tag) + table + payload


keys = st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 9))
runs = st.dictionaries(keys, st.binary(min_size=1, max_size=90), min_size=1, max_size=8)
cut_sizes = st.lists(st.integers(1, 300), min_size=1, max_size=6)


@settings(max_examples=50)
@given(pages=st.lists(runs, max_size=3), text=st.binary(max_size=99), cuts=cut_sizes)
def test_runs_survive_any_cut_of_the_stream(pages, text, cuts):
    seal = NumberedChecksumSeal()
    data = b"".join(run_frame(run, seal) for run in pages)
    data += encode_frame(FrameType.ERROR, text, seal)
    for run in pages:
        held = Held()
        decoder = FrameDecoder(
            allowed=FROM_SENDER, resolve=held.resolve, seal=NumberedChecksumSeal()
        )
        (frame,) = scatter(decoder, run_frame(run, NumberedChecksumSeal()), cuts)
        assert held.pages == run
        assert [page.header.length for page in frame.pages] == [len(p) for p in run.values()]
        assert all(page.is_placed for page in frame.pages)
        assert {page.header.num_tokens for page in frame.pages} == {7}
    pages_of = Held(dropped=frozenset(range(10)))
    decoder = FrameDecoder(
        allowed=FROM_SENDER, resolve=pages_of.resolve, seal=NumberedChecksumSeal()
    )
    frames = scatter(decoder, data, cuts)
    decoder.ended()
    assert [len(frame.pages) for frame in frames] == [*map(len, pages), 0]
    assert frames[-1].payload == text


@settings(max_examples=50)
@given(pages=runs, cuts=cut_sizes, draw=st.randoms(use_true_random=False))
def test_every_flipped_bit_of_a_run_is_found_and_a_damaged_table_places_no_byte(pages, cuts, draw):
    data = bytearray(run_frame(pages))
    bit = draw.randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    held = Held()
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=held.resolve)
    with pytest.raises(ProtocolError):
        scatter(decoder, bytes(data), cuts)
    in_tag = HEADER_BYTES - 8 <= bit // 8 < HEADER_BYTES
    if bit // 8 < TABLE_AT + 16 * len(pages) + 4 and not in_tag:
        assert not held.pages


@settings(max_examples=50)
@given(pages=runs, cuts=cut_sizes, dropped=st.frozensets(st.integers(0, 9)))
def test_pages_of_a_run_that_are_here_already_are_verified_and_dropped(pages, cuts, dropped):
    held = Held(dropped)
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=held.resolve)
    (frame,) = scatter(decoder, run_frame(pages), cuts)
    assert [page.is_placed for page in frame.pages] == [key[2] not in dropped for key in pages]
    assert held.pages == {key: page for key, page in pages.items() if key[2] not in dropped}
    damaged = bytearray(run_frame(pages))
    damaged[-1] ^= 1
    with pytest.raises(DamagedFrame):
        scatter(FrameDecoder(allowed=FROM_SENDER, resolve=held.resolve), bytes(damaged), cuts)


GOOD: Span = (0, 0, 1, 5, 40)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (forged([GOOD, GOOD]), "brings a page twice"),
        (forged([GOOD, (0, 0, 2, 5, 0)]), "empty page"),
        (forged([GOOD, (0, 0, 2, 0, 40)]), "empty page"),
        (forged([]), "run of 0 pages"),
        (forged([GOOD], num_pages=0), "run of 0 pages"),
        (forged([GOOD] * 3, num_pages=MAX_RUN_PAGES + 1), f"run of {MAX_RUN_PAGES + 1} pages"),
        (forged([GOOD], num_pages=65_535), "run of 65535 pages"),
        (forged([GOOD], length=20), "in 20 bytes"),
        (forged([GOOD], length=99), "run of 40 bytes in a frame of 99"),
        (forged([(0, 0, 1, 5, 2**32 - 1)]), "run of 4294967295 bytes"),
        (forged([(0, 0, 1, 5, MAX_RUN_BYTES + 1)], length=MAX_RUN_BYTES + 21), "1048577 bytes"),
        (forged([GOOD], length=2**32 - 1), "limit"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_any_page_has_a_place(frame, message):
    held = Held()
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=held.resolve)
    with pytest.raises(ProtocolError, match=message):
        scatter(decoder, frame, [500])
    assert not held.pages
    assert scatter(FrameDecoder(allowed=FROM_SENDER, resolve=held.resolve), forged([GOOD]), [500])


def test_a_page_of_a_run_that_is_longer_than_its_place_is_refused_with_both_lengths():
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=lambda header: memoryview(bytearray(39)))
    with pytest.raises(ProtocolError, match="40 bytes, expected 39 bytes"):
        scatter(decoder, forged([GOOD]), [500])


@pytest.mark.parametrize("num_bytes", [0, HEADER_BYTES, TABLE_AT + 36, TABLE_AT + 37, 140])
def test_a_run_is_refused_once_the_places_of_its_pages_may_belong_to_others(num_bytes):
    frame = forged([GOOD, (0, 0, 2, 5, 60)])
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=Held().resolve)
    assert not scatter(decoder, frame[:num_bytes], [1000])
    is_safe = decoder.refuse_pages()
    assert is_safe == (num_bytes < TABLE_AT + 36)
    if is_safe:
        with pytest.raises(ProtocolError, match="was not asked for"):
            scatter(decoder, frame[num_bytes:], [1000])


def test_a_run_of_more_than_a_frame_may_have_is_our_own_mistake():
    page = random.Random(0).randbytes(MAX_RUN_BYTES // 2 + 1)
    with pytest.raises(ValueError, match="a run of 2 pages"):
        run_frame({(0, 0, 0): page, (0, 0, 1): page})
    with pytest.raises(ValueError, match="a run of 65 pages"):
        run_frame({(0, 0, block): b"x" for block in range(MAX_RUN_PAGES + 1)})
