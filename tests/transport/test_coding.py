"""Encoded pages on the channel: they land as they were, threads end, and what was not agreed on is refused."""

import asyncio
import socket

import numpy as np
import pytest

from prfaas.errors import ProtocolError
from prfaas.transport.address import PeerAddress
from prfaas.transport.codec import encode_page
from prfaas.transport.kv_numbers import PageNumbers
from prfaas.transport.ports import SocketPort
from prfaas.transport.stream import FrameStream
from prfaas.transport.wire import Codec, FrameHeader, FrameType, encode_header
from tests.transport.channels import Pages, channel, place
from tests.transport.samples import ASKED, CAPABILITY, asked

pytestmark = pytest.mark.usefixtures("no_leaks")
NUM_PAGES = 6
BOTH = frozenset(Codec)
FLOATS = PageNumbers(dtype="float32")


@pytest.mark.parametrize("codec", ["raw", "zstd", "auto"])
async def test_pages_arrive_as_they_were_whatever_the_codec(codec):
    async with channel() as (service, client):
        await client.open(asked(codec=codec))
        transfer, held = service.transfers[ASKED.transfer_id], Pages()
        for block in range(NUM_PAGES):
            transfer.put_page(place(block))
        transfer.finish(tokens_computed=3)
        lengths = []
        stream = client.stream(ASKED.transfer_id, CAPABILITY, held.resolve, codec=codec)
        async with stream as frames:
            while (frame := await frames.next_frame(5)) is not None:
                if frame.header.type is FrameType.END:
                    await frames.acknowledge(1)
                else:
                    lengths.append(frame.header.length)
        await transfer.detached()
        assert transfer.outcome == "completed"
        page_bytes = len(next(iter(held.pages.values())))
        assert held.pages == {b: bytearray([b]) * page_bytes for b in range(NUM_PAGES)}
        assert transfer.num_page_bytes_sent == sum(lengths)
        if codec == "zstd":
            assert max(lengths) < page_bytes / 100
        else:
            assert lengths == [page_bytes] * NUM_PAGES  # the link does not push back


async def test_pages_that_do_not_shrink_go_as_they_are():
    noise = np.random.default_rng(0).bytes(1000)
    async with channel() as (service, client):
        await client.open(asked(codec="zstd"))
        transfer = service.transfers[ASKED.transfer_id]
        transfer._page_view = lambda _: memoryview(noise)
        transfer.put_page(place(1))
        page = bytearray(len(noise))
        stream = client.stream(
            ASKED.transfer_id, CAPABILITY, lambda _: memoryview(page), codec="zstd"
        )
        async with stream as frames:
            frame = await frames.next_frame(5)
            assert frame is not None
            assert frame.header.codec is Codec.RAW
        assert page == noise


async def take(data: bytes, page: bytearray, codecs: frozenset[Codec] = BOTH) -> None:
    """Receive one frame into `page`."""
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        theirs.sendall(data)
        stream = FrameStream(
            SocketPort(ours),
            b"",
            lambda _: memoryview(page),
            PeerAddress("here", 1),
            codecs=codecs,
        )
        try:
            assert await stream.next_frame(5) is not None
        finally:
            stream.close()


def page_frame(payload: bytes) -> bytes:
    header = FrameHeader(type=FrameType.PAGE, codec=Codec.ZSTD, num_tokens=4)
    return encode_header(header, payload) + payload


@pytest.mark.parametrize("num_bytes", [4096, 100_000])
async def test_an_encoded_page_lands_in_its_place(num_bytes):
    page, sent = bytearray(num_bytes), b"abcd" * (num_bytes // 4)
    await take(page_frame(bytes(encode_page(Codec.ZSTD, sent, FLOATS)[1])), page)
    assert page == sent


async def test_a_codec_that_was_not_agreed_on_is_refused():
    payload = bytes(encode_page(Codec.ZSTD, bytes(4096), FLOATS)[1])
    with pytest.raises(ProtocolError, match="not agreed"):
        await take(page_frame(payload), bytearray(4096), frozenset({Codec.RAW}))


@pytest.mark.parametrize("num_bytes", [4096, 100_000])
async def test_a_damaged_encoded_page_is_refused_and_puts_nothing(num_bytes):
    page = bytearray(num_bytes)
    payload = bytes(encode_page(Codec.ZSTD, b"abcd" * (num_bytes // 4), FLOATS)[1])
    with pytest.raises(ProtocolError):
        await take(page_frame(payload[:-3]), page)
    assert not any(page)


async def test_an_encoded_page_is_no_longer_than_its_page():
    with pytest.raises(ProtocolError, match="expected 64 bytes"):
        await take(page_frame(bytes(64)), bytearray(64))


async def test_the_loop_runs_while_a_large_page_is_decoded():
    page = bytearray(8 << 20)
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(others())
        await take(page_frame(bytes(encode_page(Codec.ZSTD, b"abcd" * (2 << 20), FLOATS)[1])), page)
        task.cancel()
    assert num_turns > 3
