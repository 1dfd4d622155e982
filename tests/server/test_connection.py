import asyncio

import pytest

from tests.server.fake_node import FakeNode
from tests.server.http_face import CHAT, HttpFace, running, strict_json
from tests.server.openai_schema import check

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def until_closed(face: HttpFace, *parts: bytes) -> bytes:
    """What the server says to these bytes, sent one after another, until it closes.

    A server that closes with bytes unread resets the connection, and what it said may be lost.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
    answer = bytearray()
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        while chunk := await reader.read(65536):
            answer += chunk
        writer.close()
        await writer.wait_closed()
    except ConnectionError:
        writer.close()
    return bytes(answer)


@pytest.mark.parametrize(
    "parts",
    [(), (b"G",), (b"GET /health HTTP/1.1\r\n",), (b"GET /health HTTP/1.1\r\nHost: x\r\n",)],
)
async def test_a_head_that_does_not_come_ends_the_connection(parts):
    async with running(read_timeout_s=0.05) as face:
        assert await until_closed(face, *parts) == b""
        assert (await face.get("/health"))[0] == 200


async def test_a_second_head_that_does_not_come_ends_the_connection_too():
    async with running(read_timeout_s=0.05) as face:
        reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
        writer.write(GET)
        await reader.readuntil(b'{"status":"alive"}')
        writer.write(b"GET /health")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_an_idle_connection_outlives_the_head_time():
    async with running(read_timeout_s=0.05) as face:
        reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
        for _ in range(2):
            writer.write(GET)
            await reader.readuntil(b'{"status":"alive"}')
            await asyncio.sleep(0.15)
        writer.close()
        await writer.wait_closed()


async def test_a_long_answer_outlives_the_head_time():
    node = FakeNode()
    node.hold_at = 1
    async with running(node, read_timeout_s=0.05) as face, asyncio.TaskGroup() as tasks:
        chat = tasks.create_task(face.chat())
        await node.is_holding.wait()
        await asyncio.sleep(0.15)
        node.release.set()
        assert (await chat)[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"BREW /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64 + b"\r\n\r\n",
        b"NOT HTTP AT ALL\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 10_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_400_in_openais_shape_and_the_end(data):
    async with running() as face:
        answer = await until_closed(face, data)
        assert (await face.get("/health"))[0] == 200
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ", 2)[1] == b"400"
    assert b"application/json" in head
    check("ErrorResponse", strict_json(body))


async def test_pipelined_requests_are_all_answered():
    async with running() as face:
        last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        answer = await until_closed(face, GET * 499 + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 500


async def test_endless_trailers_are_cut_off_and_hurt_nobody():
    async with running(read_timeout_s=1) as face:
        await until_closed(
            face,
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\n" + b"X-Trailer: y\r\n" * 100_000 + b"\r\n",
        )
        assert face.node.requests == []
        assert (await face.post("/v1/chat/completions", CHAT))[0] == 200
