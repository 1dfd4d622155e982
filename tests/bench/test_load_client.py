"""What a client notes of an answer, and how each way to fail is called, against a server of our own."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from prfaas.bench.load import Sample
from prfaas.bench.load_client import MAX_EVENT_BYTES, CompletionClient, EventParser, load_server
from prfaas.bench.load_prompts import LoadPrompts, planned_requests
from prfaas.bench.load_report import to_json
from prfaas.config.traces import TraceRequest

Answer = Callable[["Server", web.StreamResponse], Awaitable[None]]


class Server:
    """Streams as a test says, on a clock that only its answers move."""

    def __init__(self, answer: Answer) -> None:
        self.now_s = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.connections: set[int] = set()
        self._answer = answer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.connections.add(request.transport.get_extra_info("peername")[1])
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        response = web.StreamResponse(
            headers={"X-Prfaas-Route": "remote", "X-Prfaas-Reason": "long: 1"}
        )
        await response.prepare(request)
        await self._answer(self, response)
        return response

    async def token(self, response: web.StreamResponse, after_s: float) -> None:
        self.now_s += after_s
        await send(response, {"choices": [{"index": 0, "text": "a"}], "usage": None})
        await asyncio.sleep(0.02)  # an event of its own for the client


async def send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@contextlib.asynccontextmanager
async def serving(handle: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def asked(url: str, server: Server | None = None, *, times: int = 1) -> Sample:
    sample = Sample(due_s=0.0, prompt_tokens=3)
    client = CompletionClient(url, api_key="secret", clock=lambda: server.now_s if server else 0.0)
    try:
        for _ in range(times):
            sample = Sample(due_s=0.0, prompt_tokens=3)
            await client.ask(b'{"prompt": [32, 33, 34]}', sample)
    finally:
        await client.close()
        await asyncio.sleep(0.01)  # transports close their sockets a turn later
    return sample


STORY = {
    "route": "local",
    "reason": "peer_stuck: nothing for 2.0 s",
    "peer": "peer:8100",
    "node": "node:8000",
    "tokens_reused": 1,
    "tokens_local": 2,
    "tokens_remote": 0,
    "bytes_received": 77,
    "predicted_ttft_s": 0.5,
}


async def whole(server: Server, response: web.StreamResponse) -> None:
    for after_s in (1.5, 0.25, 0.5):
        await server.token(response, after_s)
    await response.write(b": waiting\n\n")
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "prfaas": STORY}
    await send(response, {"choices": [], "usage": usage})
    await response.write(b"data: [DONE]\n\n")


async def test_each_token_has_its_time_and_the_answer_its_story():
    server = Server(whole)
    async with serving(server.handle) as url:
        sample = await asked(url + "/", server)
    assert sample.error is None
    assert sample.is_done
    assert (sample.first_s, sample.last_s, list(sample.gaps_s)) == (1.5, 2.25, [0.25, 0.5])
    assert (sample.route, sample.reason) == ("local", "peer_stuck")
    assert (sample.peer, sample.node, sample.bytes_received) == ("peer:8100", "node:8000", 77)
    assert (sample.tokens_reused, sample.tokens_local, sample.predicted_ttft_s) == (1, 2, 0.5)
    assert sample.completion_tokens == 3
    assert server.headers[0]["Authorization"] == "Bearer secret"


async def test_a_connection_is_used_again():
    server = Server(whole)
    async with serving(server.handle) as url:
        await asked(url, server, times=3)
    assert len(server.bodies) == 3
    assert len(server.connections) == 1


async def cut(server: Server, response: web.StreamResponse) -> None:
    await server.token(response, 1.0)


async def told(server: Server, response: web.StreamResponse) -> None:
    await server.token(response, 1.0)
    await send(response, {"error": {"message": "m", "type": "t", "code": "engine_error"}})


async def dropped(server: Server, response: web.StreamResponse) -> None:
    await server.token(response, 1.0)
    transport = response._req.transport if response._req else None
    assert transport is not None
    transport.abort()


async def garbled(server: Server, response: web.StreamResponse) -> None:
    await response.write(b"data: {oops\n\n")


async def endless(server: Server, response: web.StreamResponse) -> None:
    with contextlib.suppress(ConnectionError):
        await response.write(b"data: " + bytes(MAX_EVENT_BYTES + 100))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (cut, "cut_off"),
        (told, "error_event engine_error"),
        (dropped, "connection_lost"),
        (garbled, "bad_answer"),
        (endless, "bad_answer"),
    ],
)
async def test_a_stream_that_fails_is_named_and_not_asked_for_again(answer, error):
    server = Server(answer)
    async with serving(server.handle) as url:
        sample = await asked(url, server)
    assert sample.error == error
    assert not sample.is_done
    assert sample.route == "remote"
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (503, {"error": {"code": "overloaded", "type": "overloaded_error"}}, "http_503 overloaded"),
        (400, {"error": {"code": None, "type": "bad\nrequest"}}, "http_400 bad?request"),
        (502, "no gateway", "http_502"),
    ],
)
async def test_a_refusal_is_called_by_its_status_and_code(status, body, error):
    calls = []

    async def refuse(_request: web.Request) -> web.Response:
        calls.append(1)
        return web.json_response(body, status=status)

    async with serving(refuse) as url:
        sample = await asked(url)
    assert (sample.error, len(calls)) == (error, 1)


async def test_nobody_there_is_no_connection():
    async with serving(Server(whole).handle) as url:
        pass
    assert (await asked(url)).error == "no_connection"


async def test_a_whole_load_is_sent_and_counted():
    server = Server(whole)
    requests = [TraceRequest(0.0, 700, 3, (1, 2)), TraceRequest(0.001, 600, 3, (1, 3))]
    async with serving(server.handle) as url:
        load = await load_server(
            url, planned_requests(requests, LoadPrompts("key"), "tiny"), max_s=60.0
        )
    report = to_json(load, ttft_slo_s=60.0)
    assert report["requests"]["done"] == 2
    assert report["reasons"] == {"peer_stuck": 2}
    assert report["kv_bytes_received"] == 154
    first, second = (body["prompt"] for body in server.bodies)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]
    await asyncio.sleep(0.01)


EVENTS = [
    b"data: one\n\n",
    b": a comment\n\n",
    b"event: x\r\ndata:two\r\n\r\n",
    b"data: [DONE]\n\n",
]


@given(st.lists(st.integers(0, len(b"".join(EVENTS))), max_size=12))
def test_events_are_the_same_in_any_cuts(cuts):
    stream = b"".join(EVENTS)
    ends = [*sorted(cuts), len(stream)]
    found: list[bytes] = []
    parser, begin = EventParser(), 0
    for end in ends:
        found += parser.feed(stream[begin:end])
        begin = end
    assert found == [b"one", b"two", b"[DONE]"]
