"""Any bytes give frames or ProtocolError, in bounded memory."""

import random
import struct
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.transport.decoder import SCRATCH_BYTES, FrameDecoder
from prfaas.transport.wire import (
    FROM_RECEIVER,
    FROM_SENDER,
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameHeader,
    FrameType,
    decode_progress,
    encode_frame,
    encode_header,
    refuse_pages,
)
from tests.transport.samples import progress_frame

PAGE_BYTES = 64


class Pages:
    """Pages by (group, index, block), as a receiver would hold them."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.pages: dict[tuple[int, int, int], bytearray] = {}

    def resolve(self, header: FrameHeader) -> memoryview:
        key = (header.group, header.index, header.block)
        return memoryview(self.pages.setdefault(key, bytearray(self.page_bytes)))


def feed(decoder: FrameDecoder, data: bytes, sizes: Iterator[int]) -> list[Frame]:
    frames = []
    while data:
        target = decoder.buffer()
        assert 0 < len(target) <= 8 << 20
        num_bytes = min(next(sizes), len(target), len(data))
        target[:num_bytes] = data[:num_bytes]
        data = data[num_bytes:]
        frame = decoder.received(num_bytes)
        if frame is not None:
            frames.append(frame)
    return frames


def page_frame(payload: bytes, *, group: int = 0, index: int = 0, block: int = 0) -> bytes:
    header = FrameHeader(
        type=FrameType.PAGE, group=group, index=index, block=block, num_tokens=len(payload)
    )
    return encode_header(header, payload) + payload


sizes = st.lists(st.integers(1, 200), min_size=1, max_size=8)


def cycle(values: list[int]) -> Iterator[int]:
    while True:
        yield from values


@given(
    pages=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 60),
            st.integers(0, 9),
            st.binary(min_size=64, max_size=64),
        ),
        max_size=6,
    ),
    texts=st.lists(st.binary(max_size=300), max_size=4),
    cuts=sizes,
)
def test_frames_survive_any_cut_of_the_stream(pages, texts, cuts):
    data, expected = b"", {}
    for group, index, block, payload in pages:
        data += page_frame(payload, group=group, index=index, block=block)
        expected[(group, index, block)] = payload
    for text in texts:
        data += encode_frame(FrameType.ERROR, text)
    held = Pages()
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=held.resolve)
    frames = feed(decoder, data, cycle(cuts))
    decoder.ended()
    assert [frame.payload for frame in frames[len(pages) :]] == texts
    assert all(frame.is_placed and not frame.payload for frame in frames[: len(pages)])
    assert {key: bytes(page) for key, page in held.pages.items()} == expected


@given(
    payload=st.binary(min_size=PAGE_BYTES, max_size=PAGE_BYTES),
    bit=st.integers(0, (HEADER_BYTES + PAGE_BYTES) * 8 - 1),
    cuts=sizes,
)
def test_every_flipped_bit_is_found_and_a_damaged_header_places_no_byte(payload, bit, cuts):
    data = bytearray(page_frame(payload, group=1, index=2, block=3))
    data[bit // 8] ^= 1 << bit % 8
    held = Pages()
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=held.resolve)
    with pytest.raises(ProtocolError):
        feed(decoder, bytes(data), cycle(cuts))
    if bit < (HEADER_BYTES - 8) * 8:
        assert not held.pages
    with pytest.raises(ProtocolError):
        decoder.buffer()


@given(data=st.binary(max_size=400), cuts=sizes)
def test_any_bytes_give_frames_or_a_protocol_error(data, cuts):
    decoder = FrameDecoder(allowed=frozenset(FrameType), resolve=Pages().resolve)
    try:
        feed(decoder, data, cycle(cuts))
        decoder.ended()
    except ProtocolError:
        return
    assert not data


def _with_valid_checks(rng: random.Random) -> bytes:
    """Return random fields under right checksums, so that the checks behind them are reached."""
    fields = struct.pack(
        "<BBHHHIII",
        rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 255]),
        rng.choice([0, 0, 0, 1, 200]),
        rng.choice([0, 0, 5, 65535]),
        rng.choice([0, 0, 5]),
        rng.choice([0, 0, 0, 9]),
        rng.choice([0, 0, 7, 2**32 - 1]),
        rng.choice([0, 0, 1, 64]),
        rng.choice([0, 1, 16, 64, 65, 4096, 4097, 2**31, 2**32 - 1]),
    )
    check = xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF
    length = int.from_bytes(fields[16:20], "little")
    payload = rng.randbytes(length if length <= 64 and rng.random() < 0.8 else 16)
    return fields + struct.pack("<IQ", check, xxhash.xxh3_64_intdigest(fields + payload)) + payload


def test_random_headers_under_right_checksums_never_escape_the_bounds():
    rng = random.Random(5)
    outcomes = {"frame": 0, "error": 0}
    for _ in range(4000):
        held = Pages()
        decoder = FrameDecoder(allowed=frozenset(FrameType), resolve=held.resolve)
        try:
            frames = feed(decoder, _with_valid_checks(rng), cycle([rng.randint(1, 90)]))
            outcomes["frame"] += len(frames)
        except ProtocolError:
            outcomes["error"] += 1
        assert all(len(page) == PAGE_BYTES for page in held.pages.values())
    assert outcomes["frame"] > 20
    assert outcomes["error"] > 1000


def test_a_long_payload_is_refused_before_it_is_allocated():
    for frame_type, limit in MAX_PAYLOAD_BYTES.items():
        decoder = FrameDecoder(allowed=frozenset(FrameType), resolve=refuse_pages)
        head = encode_header(FrameHeader(type=frame_type), bytes(limit + 1))
        with pytest.raises(ProtocolError, match=f"limit {limit} bytes"):
            feed(decoder, head, cycle([HEADER_BYTES]))


def test_a_page_of_another_length_than_its_place_is_refused_with_both_lengths():
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=Pages(48).resolve)
    with pytest.raises(ProtocolError, match="64 bytes, expected 48 bytes"):
        feed(decoder, page_frame(bytes(64)), cycle([500]))


def test_a_redelivered_page_is_verified_and_dropped_in_bounded_memory():
    payload = random.Random(1).randbytes(3 * SCRATCH_BYTES + 5)
    damaged = bytearray(page_frame(payload))
    damaged[-1] ^= 1
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=lambda header: None)
    frames = feed(decoder, page_frame(payload), cycle([1 << 20]))
    assert [frame.is_placed for frame in frames] == [False]
    with pytest.raises(ProtocolError, match="checksum"):
        feed(decoder, bytes(damaged), cycle([1 << 20]))


def test_a_frame_of_the_wrong_direction_is_refused():
    with pytest.raises(ProtocolError, match="unexpected ACK"):
        feed(
            FrameDecoder(allowed=FROM_SENDER, resolve=refuse_pages),
            encode_frame(FrameType.ACK),
            cycle([99]),
        )
    with pytest.raises(ProtocolError, match="unexpected END"):
        feed(
            FrameDecoder(allowed=FROM_RECEIVER, resolve=refuse_pages),
            encode_frame(FrameType.END, b"{}"),
            cycle([99]),
        )


@pytest.mark.parametrize("length", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 3])
def test_a_stream_cut_inside_a_frame_is_told_from_one_that_ended(length):
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=refuse_pages)
    feed(decoder, encode_frame(FrameType.ERROR, b"four")[:length], cycle([99]))
    with pytest.raises(ProtocolError, match="inside a frame"):
        decoder.ended()


@given(done=st.integers(0, 2**64 - 1), ahead=st.integers(0, 2**64 - 1))
def test_progress_round_trips(done, ahead):
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=refuse_pages)
    (frame,) = feed(decoder, progress_frame(done, ahead), cycle([7]))
    assert decode_progress(frame.payload) == (done, ahead)


def test_a_progress_payload_of_another_size_is_refused():
    with pytest.raises(ProtocolError, match="3 bytes"):
        decode_progress(b"abc")


@pytest.mark.parametrize("num_bytes", [0, 20, HEADER_BYTES, HEADER_BYTES + 10])
def test_pages_are_refused_once_their_places_may_belong_to_others(num_bytes):
    pages, frame = Pages(48), page_frame(bytes(48))
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=pages.resolve)
    feed(decoder, frame[:num_bytes], cycle([7]))
    is_safe = decoder.refuse_pages()
    assert is_safe == (num_bytes < HEADER_BYTES)  # then no place was named yet
    if is_safe:
        with pytest.raises(ProtocolError, match="was not asked for"):
            feed(decoder, frame[num_bytes:], cycle([7]))
