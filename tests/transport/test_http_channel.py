"""Frames as the body of an HTTP answer: by name, and by itself where a proxy lets no upgrade through."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable

import aiohttp
import pytest
import structlog
from aiohttp import web

from prfaas.transport.address import PeerAddress
from prfaas.transport.auth import PeerSide
from prfaas.transport.client import HTTP_FOR_S, PeerClient
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.flow import EgressBudget
from prfaas.transport.http_port import HttpPort
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.sending import RUN_S
from tests.relay import Fault, Relay
from tests.transport.channels import OPTIONS, Pages, channel, ended, pull_all, warm
from tests.transport.samples import IDENTITY, asked

pytestmark = pytest.mark.usefixtures("no_leaks")
KEY = ClusterKey(b"k" * 16)
NUM_PAGES = 40
PAGE_BYTES = 9000
HOP_BY_HOP = {"connection", "upgrade", "transfer-encoding", "keep-alive", "host", "content-length"}


async def pull_by_http(client: PeerClient, held: Pages, number: int = 0) -> int:
    """Run a whole transfer and return how many bodies broke on the way."""
    request = asked(transfer_id=f"{number:032d}")
    async with client.pull(request, held) as pulling:
        assert all(isinstance(stream.port, HttpPort) for stream in pulling._carriers)
        while not pulling.is_finished:
            await pulling.step()
        num_lost = pulling.num_streams_lost
        assert not pulling.acknowledge()
    await client.acknowledge(request)
    return num_lost


@pytest.mark.parametrize("with_key", [False, True])
async def test_a_transfer_arrives_whole(with_key):
    gate = PeerSide(KEY, identity=IDENTITY, epoch="e" * 64) if with_key else None
    asker = ChannelSecurity(cluster_key=KEY if with_key else None)
    async with channel(gate=gate, asker=asker, page_bytes=PAGE_BYTES, kv_channel="http") as (
        service,
        client,
    ):
        service.num_pages = NUM_PAGES
        for number in range(3):
            held = Pages(PAGE_BYTES)
            assert await pull_by_http(client, held, number) == 0
            held.check(NUM_PAGES)
            assert await ended(service.transfers[f"{number:032d}"]) == "completed"


@pytest.mark.parametrize("kind", ["cut", "flip"])
async def test_a_body_that_breaks_goes_on_where_it_broke(kind):
    relay = Relay()
    async with channel(via=relay, page_bytes=PAGE_BYTES, kv_channel="http") as (service, client):
        relay.is_opaque = True
        service.num_pages = NUM_PAGES
        relay.fault = Fault(20 * PAGE_BYTES, kind)
        held = Pages(PAGE_BYTES)
        assert await pull_by_http(client, held) == 1
        held.check(NUM_PAGES)


@pytest.mark.parametrize("attach", ["", "????", "AAAA", "A" * 44])
async def test_a_header_that_is_no_attach_frame_is_refused(attach):
    async with channel(kv_channel="http") as (_, client):
        url = f"http://{client.address}/kv/v1/frames"
        headers = {"Prfaas-Attach": attach}
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
            assert answer.status == 409


@contextlib.asynccontextmanager
async def proxy(target: PeerAddress) -> AsyncIterator[PeerAddress]:
    """An HTTP proxy that knows nothing of upgrades."""

    async def forward(request: web.Request) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP}
        url = f"http://{target}{request.path_qs}"
        body = await request.read()
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(request.method, url, headers=headers, data=body) as answer,
        ):
            response = web.StreamResponse(
                status=answer.status,
                headers={k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP},
            )
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, shutdown_timeout=0.2, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield PeerAddress("127.0.0.1", runner.addresses[0][1])
    finally:
        await runner.cleanup()
        await asyncio.sleep(0.05)


async def test_raw_streams_are_tried_again_a_minute_after_only_http_got_through(monkeypatch):
    now_s = [100.0]
    async with channel(page_bytes=PAGE_BYTES, clock=lambda: now_s[0]) as (service, client):
        service.num_pages = 3
        monkeypatch.setattr("prfaas.transport.client.STREAM_PATH", "/of/a/proxy/that/knows/no/such")
        for number in range(2):
            client.heard()
            while client.streams.num_idle:  # noqa: ASYNC110  # it is about another end
                await asyncio.sleep(0.002)
            await pull_by_http(client, Pages(PAGE_BYTES), number)
            now_s[0] += HTTP_FOR_S
        monkeypatch.undo()
        now_s[0] -= 0.01
        client.heard()
        assert client.streams.num_idle == 0
        now_s[0] += 0.01
        client.heard()
        await warm(client, OPTIONS.streams)
        held = Pages(PAGE_BYTES)
        pulling = await pull_all(client, held, asked(transfer_id="r" * 32))
        held.check(3)
        assert pulling.num_streams_lost == 0
        assert len(service.channel.streams) >= OPTIONS.streams


@pytest.mark.parametrize("status", [200, 302, 403, 404, 500, 502])
async def test_whatever_a_proxy_answers_to_an_upgrade_http_is_used_and_said_once(status):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} Whatever\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = PeerClient(PeerAddress("127.0.0.1", server.sockets[0].getsockname()[1]), OPTIONS)
    try:
        with structlog.testing.capture_logs() as entries:
            for _ in range(2):
                stream = await client.dial()
                assert isinstance(stream.port, HttpPort)
                stream.close()
        assert client.uses_http
        said = [(e["event"], e["channel"], e["status"]) for e in entries]
        assert said == [("peer.channel", "http", status)]
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


class NotingBudget(EgressBudget):
    """Notes the deadlines with which it was asked."""

    def __init__(self) -> None:
        super().__init__(1e6, 2 * NUM_PAGES * PAGE_BYTES)
        self.deadlines_s: set[float | None] = set()
        self.largest_bytes = 0

    def ask(
        self, transfer: Hashable, num_bytes: int, *, now_s: float, deadline_s: float | None = None
    ) -> float:
        self.deadlines_s.add(deadline_s)
        self.largest_bytes = max(self.largest_bytes, num_bytes)
        return super().ask(transfer, num_bytes, now_s=now_s, deadline_s=deadline_s)


@pytest.mark.parametrize("kv_channel", ["http", "stream"])
async def test_what_a_transfer_sends_is_due_by_its_deadline(kv_channel):
    budget = NotingBudget()
    async with channel(budget=budget, page_bytes=PAGE_BYTES, kv_channel=kv_channel) as (
        service,
        client,
    ):
        service.num_pages = NUM_PAGES
        held, request = Pages(PAGE_BYTES), asked(deadline_s=4.5)
        async with client.pull(request, held) as pulling:
            while not pulling.is_finished:
                await pulling.step()
        held.check(NUM_PAGES)
    assert budget.deadlines_s == {4.5}
    if kv_channel == "stream":  # more than 10 ms of the budget is not taken at once
        assert budget.largest_bytes < RUN_S * 1e6 + PAGE_BYTES


async def test_behind_a_proxy_that_strips_the_upgrade_http_is_used_by_itself():
    async with channel(page_bytes=PAGE_BYTES) as (service, near), proxy(near.address) as address:
        service.num_pages = NUM_PAGES
        client = PeerClient(address, OPTIONS)
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(client.run())
            assert await client.handshake(IDENTITY) == service.status()
            client.streams.want()
            for number in range(2):
                held = Pages(PAGE_BYTES)
                assert await pull_by_http(client, held, number) == 0
                held.check(NUM_PAGES)
            keeping.cancel()
        await client.close()
