import asyncio
import json
import socket

import aiohttp
from aiohttp import web

from prfaas.server.sse import ClientStalled, EventStream


async def serve(handler) -> tuple[web.AppRunner, int]:
    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, runner.addresses[0][1]


async def test_events_are_framed_one_line_each_and_end_with_done():
    begun: list[bool] = []

    async def handler(request):
        stream = EventStream(request, write_timeout_s=5)
        begun.append(stream.is_begun)
        stream.add({"text": "line\nbreak \u2028 é"})
        begun.append(stream.is_begun)
        await stream.send()
        await stream.comment()
        stream.add({"n": 1})
        await stream.end()
        return stream.response

    runner, port = await serve(handler)
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/") as got:
        data = await got.read()
    await runner.cleanup()
    assert begun == [False, True]
    assert got.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert got.headers["Cache-Control"] == "no-cache"
    first, comment, second, done, end = data.split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: ")) == {"text": "line\nbreak \u2028 é"}
    assert b"\n" not in first
    assert (comment, second, done, end) == (b": waiting", b'data: {"n":1}', b"data: [DONE]", b"")


async def test_a_comment_takes_with_it_what_was_added():
    async def handler(request):
        stream = EventStream(request, write_timeout_s=5)
        stream.add({"n": 1})
        await stream.comment()
        await stream.end()
        return stream.response

    runner, port = await serve(handler)
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/") as got:
        assert await got.read() == b'data: {"n":1}\n\n: waiting\n\ndata: [DONE]\n\n'
    await runner.cleanup()


async def test_a_client_that_reads_nothing_is_cut_off():
    stalled = asyncio.Event()

    async def handler(request):
        stream = EventStream(request, write_timeout_s=0.05)
        try:
            while True:
                stream.add({"text": "x" * 1_000_000})
                await stream.send()
        except ClientStalled:
            stalled.set()
        return stream.response

    runner, port = await serve(handler)
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await stalled.wait()
    await runner.cleanup()
    client.close()


async def test_events_that_were_added_go_out_in_one_write_and_the_end_with_the_last(monkeypatch):
    written: list[bytes] = []
    for name in ("write", "write_eof"):
        method = getattr(web.StreamResponse, name)

        async def noted(self, data=b"", method=method):
            written.append(bytes(data))
            await method(self, data)

        monkeypatch.setattr(web.StreamResponse, name, noted)

    async def handler(request):
        stream = EventStream(request, write_timeout_s=5)
        await stream.send()  # nothing: the stream has not begun
        for number in (1, 2):
            stream.add({"n": number})
        assert stream.is_begun
        assert not stream.response.prepared
        await stream.send()
        stream.add({"n": 3})
        await stream.end()
        return stream.response

    runner, port = await serve(handler)
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/") as got:
        data = await got.read()
    await runner.cleanup()
    both = b'data: {"n":1}\n\ndata: {"n":2}\n\n'
    last = b'data: {"n":3}\n\ndata: [DONE]\n\n'
    assert [each for each in written if each] == [both, last]
    assert data == both + last
