"""Encoded pages on the channel: they land as they were, threads end, and what was not agreed on is refused."""

import asyncio
import socket

import numpy as np
import pytest

from prfaas.errors import ProtocolError
from prfaas.transport.attach import Attach
from prfaas.transport.codec import encode_page
from prfaas.transport.kv_numbers import PageNumbers
from prfaas.transport.ports import SocketPort
from prfaas.transport.stream import RawStream
from prfaas.transport.wire import Codec, Frame, FrameHeader, FrameType, encode_header
from tests.transport.channels import (
    PAGE_BYTES,
    Pages,
    channel,
    ended,
    finish,
    place,
    pull_all,
    warm,
)
from tests.transport.samples import ASKED, asked

pytestmark = pytest.mark.usefixtures("no_leaks")
NUM_PAGES = 6
BOTH = frozenset(Codec)
FLOATS = PageNumbers(dtype="float32")


@pytest.mark.parametrize("codec", ["raw", "zstd", "auto"])
async def test_pages_arrive_as_they_were_whatever_the_codec(codec):
    async with channel() as (service, client):
        service.num_pages = NUM_PAGES
        await warm(client)
        held = Pages()
        await pull_all(client, held, asked(codec=codec))
        held.check(NUM_PAGES)
        transfer = service.transfers[ASKED.transfer_id]
        assert await ended(transfer) == "completed"
        lengths = [f.header.length for f in held.frames if f.header.type is FrameType.PAGE]
        assert transfer.num_page_bytes_sent == sum(lengths)
        if codec == "zstd":
            assert max(lengths) < PAGE_BYTES / 100
        else:
            assert lengths == [PAGE_BYTES] * NUM_PAGES  # the link does not push back


async def test_pages_that_do_not_shrink_go_as_they_are():
    noise = np.random.default_rng(0).bytes(1000)
    async with channel(page_bytes=1000) as (service, client):
        held = Pages(1000)
        async with client.pull(asked(codec="zstd"), held) as pulling:
            transfer = service.transfers[ASKED.transfer_id]
            transfer._page_view = lambda _: memoryview(noise)
            transfer.put_page(place(1))
            transfer.finish(tokens_computed=0)
            await finish(pulling)
        assert held.frames[0].header.codec is Codec.RAW
        assert held.pages[1] == noise


class OneFrame:
    """A FrameTaker that waits for one frame, or for what broke the stream."""

    def __init__(self) -> None:
        self.result: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

    def take(self, stream: RawStream, frame: Frame) -> None:
        self.result.set_result(frame)

    def broken(self, stream: RawStream, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


async def take(data: bytes, page: bytearray, codecs: frozenset[Codec] = BOTH) -> None:
    """Receive one frame into `page`."""
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        stream, taker = RawStream(SocketPort(ours)), OneFrame()
        attach = Attach(transfer_id="t" * 32, capability="c" * 32, stream=0)
        try:
            stream.attach(attach, taker, lambda _: memoryview(page), codecs=codecs)
            stream.begin()
            theirs.sendall(data)
            await taker.result
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
