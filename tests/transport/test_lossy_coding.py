"""Lossy pages on a stream: only pages that may lose something do, and a damaged one is never put anywhere."""

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.transport.codec import LOSSLESS, encode_page
from prfaas.transport.coding import CODECS, INLINE_BYTES, PageDecoder, PageEncoder, may_lose
from prfaas.transport.decoder import FrameDecoder
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.messages import CODEC_NAMES
from prfaas.transport.wire import (
    FROM_SENDER,
    Codec,
    Frame,
    FrameHeader,
    FrameType,
    encode_header,
)

pytestmark = pytest.mark.usefixtures("no_leaks")
NUMBERS = KvNumbers(dtype="float32", row_items=(64, None))
"""Group 0 is attention, group 1 a state."""
LOSSY_NAMES = ["fp16", "int8", "fp8"]


def page_of(num_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).standard_normal(num_bytes // 4).astype("<f4").tobytes()


def test_the_names_that_lose_something_are_those_with_a_lossy_codec():
    assert [name for name in CODEC_NAMES if may_lose(name)] == [*LOSSY_NAMES, "auto-lossy"]
    assert set(CODECS) == set(CODEC_NAMES)


@pytest.mark.parametrize("name", LOSSY_NAMES)
@pytest.mark.parametrize("num_bytes", [4096, 256 << 10])
async def test_attention_arrives_nearly_and_states_arrive_as_they_were(name, num_bytes):
    page = page_of(num_bytes)
    with PageEncoder(name, NUMBERS) as encoder, PageDecoder(NUMBERS) as decoder:
        for group in (0, 1):
            codec, encoded = await encoder.encode(memoryview(page), group)
            assert codec in CODECS[name]
            assert len(encoded) < len(page)
            arrived = bytearray(num_bytes)
            header = FrameHeader(type=FrameType.PAGE, codec=codec, group=group, num_tokens=1)
            frame = Frame(header=header, payload=bytes(encoded), target=memoryview(arrived))
            decoded = decoder.decode(frame)
            is_future = isinstance(decoded, asyncio.Future)
            assert is_future == (num_bytes > INLINE_BYTES)
            arrived[:] = await decoded if isinstance(decoded, asyncio.Future) else decoded
            before, after = (np.frombuffer(data, "<f4") for data in (page, arrived))
            if group == 1:
                assert codec in LOSSLESS
                assert arrived == page
            else:
                assert codec not in LOSSLESS
                assert 0 < np.abs(after - before).max() < 0.2


async def test_a_lossy_codec_in_a_state_is_refused():
    page = page_of(4096)
    used, encoded = encode_page(Codec.INT8, page, NUMBERS.of(0))
    assert used is Codec.INT8
    header = FrameHeader(type=FrameType.PAGE, codec=used, group=1, num_tokens=1)
    frame = Frame(header=header, payload=bytes(encoded), target=memoryview(bytearray(4096)))
    with PageDecoder(NUMBERS) as decoder, pytest.raises(ProtocolError, match="INT8"):
        decoder.decode(frame)


def feed(decoder: FrameDecoder, data: memoryview) -> Frame | None:
    """Return the first whole frame in the bytes, None if they end between two."""
    while data:
        room = decoder.buffer()
        part, data = data[: len(room)], data[len(room) :]
        room[: len(part)] = part
        frame = decoder.received(len(part))
        if frame is not None:
            return frame
    decoder.ended()
    return None


@given(
    codec=st.sampled_from([Codec.FP16, Codec.INT8, Codec.FP8]),
    position=st.integers(0, 1 << 30),
    bit=st.integers(0, 7),
)
def test_each_flipped_bit_of_a_lossy_frame_is_found_before_its_page_is(codec, position, bit):
    page = page_of(1024)
    used, payload = encode_page(codec, page, NUMBERS.of(0))
    header = FrameHeader(type=FrameType.PAGE, codec=used, num_tokens=1)
    data = bytearray(encode_header(header, payload) + bytes(payload))
    data[position % len(data)] ^= 1 << bit
    arrived = bytearray(1024)
    decoder = FrameDecoder(
        allowed=FROM_SENDER,
        resolve=lambda _: memoryview(arrived),
        codecs=frozenset(Codec),
    )
    with pytest.raises(ProtocolError):
        feed(decoder, memoryview(data))
    assert not any(arrived)


async def test_large_pages_are_encoded_beside_the_loop():
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    page = page_of(8 << 20)
    before = threading.active_count()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(others())
        with PageEncoder("int8", NUMBERS) as encoder:
            codec, _ = await encoder.encode(memoryview(page), 0)
            assert threading.active_count() > before
        task.cancel()
    assert codec is Codec.INT8
    assert num_turns > 3
