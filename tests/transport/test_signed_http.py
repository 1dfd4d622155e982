"""Requests are of one session, survive its loss, and give up on answers that break or fall silent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
from aiohttp import web

from prfaas.errors import Overloaded, TransferError, TransferTimeout, UntrustedPeer
from prfaas.transport.address import PeerAddress
from prfaas.transport.answers import proven, read_body, refusal
from prfaas.transport.auth import AUTH_HEADER, PeerSide
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.gate import Gate
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity, asker_security, peer_security
from prfaas.transport.signed_http import SignedHttp
from prfaas.transport.signed_lines import LineSigner, line_key
from tests.accepting import accept_no_more
from tests.transport.certificates import Certificates
from tests.transport.samples import IDENTITY

KEY = ClusterKey(b"0123456789abcdef")
OPTIONS = TransportOptions(connect_timeout_s=20.0, stall_timeout_s=20.0)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Write = Callable[[web.StreamResponse, LineSigner], Awaitable[None]]


class Server:
    """One route that echoes, and one whose answer's lines a test writes."""

    def __init__(self, key: ClusterKey | None) -> None:
        self.key = key
        self.write: Write | None = None
        self.num_asked = 0
        self.num_forged = 0
        self.is_taken_over = False
        """Somebody without the key answers: no session is known or opened, what is not signed is answered."""
        self.redirects_with: int | None = None
        self.forget()

    def forget(self) -> None:
        """Know no session any more, as after a start."""
        side = None if self.key is None else PeerSide(self.key, identity=IDENTITY, epoch="e" * 64)
        self.gate = Gate(side)

    @web.middleware
    async def taken_over(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.redirects_with is not None:
            return web.Response(status=self.redirects_with, headers={"Location": "/echo"})
        if not self.is_taken_over:
            return await handler(request)
        if AUTH_HEADER in request.headers or request.path.startswith("/kv/v1/"):
            await asyncio.sleep(0.02)  # until all have come
            return web.Response(status=401 if AUTH_HEADER in request.headers else 500)
        self.num_forged += 1
        return web.Response(body=b"forged\n")

    async def hello(self, request: web.Request) -> web.Response:
        return await self.gate.hello(request)

    async def session(self, request: web.Request) -> web.Response:
        return await self.gate.session(request)

    async def echo(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        try:
            caller = self.gate.caller(request, body)
        except UntrustedPeer as error:
            return refusal(error)
        self.num_asked += 1
        return proven(200, body, caller)

    async def lines(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        try:
            caller = self.gate.caller(request, body)
            if body == b"full":
                return refusal(Overloaded("full", retry_after_s=3.0))
        except UntrustedPeer as error:
            return refusal(error)
        self.num_asked += 1
        response = web.StreamResponse()
        await response.prepare(request)
        assert self.write is not None
        await self.write(response, LineSigner(line_key(caller)))
        return response


@contextlib.asynccontextmanager
async def connected(
    key: ClusterKey | None = KEY, certificates: Certificates | None = None
) -> AsyncIterator[tuple[Server, SignedHttp]]:
    options = OPTIONS
    if certificates is not None:
        cert, cert_key = certificates.issue("node")
        options = replace(OPTIONS, tls_cert=cert, tls_key=cert_key, tls_ca=certificates.authority)
    server = Server(key)
    app = web.Application(middlewares=[server.taken_over])
    app.add_routes(
        [
            web.post("/kv/v1/hello", server.hello),
            web.post("/kv/v1/session", server.session),
            web.post("/echo", server.echo),
            web.post("/lines", server.lines),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    tls = None if certificates is None else peer_security(options).tls
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    address = PeerAddress("127.0.0.1", runner.addresses[0][1])
    security = ChannelSecurity(cluster_key=key, tls=asker_security(options).tls)
    http = SignedHttp(address, options, security)
    try:
        async with asyncio.timeout(30):
            yield server, http
    finally:
        await http.close()
        await accept_no_more(site._server)
        await runner.cleanup()


async def read(http: SignedHttp, body: bytes = b"ask", silence_s: float = 20.0) -> list[bytes]:
    got = []
    async with http.lines(
        "/lines", body, IDENTITY, silence_s=silence_s, max_line_bytes=1000
    ) as lines:
        while (text := await lines.next()) is not None:
            got.append(text)
    return got


async def failure_of(asked: Awaitable[object]) -> Exception | None:
    try:
        await asked
    except TransferError as error:
        return error
    return None


async def say_three(response: web.StreamResponse, signer: LineSigner) -> None:
    for text in (b"one", b"two", b"three"):
        await response.write(signer.seal(text))


@pytest.mark.parametrize(
    ("key", "is_tls"), [(None, False), (KEY, False), (KEY, True)], ids=["open", "keyed", "tls"]
)
async def test_replies_and_lines_come_and_the_connection_serves_again(key, is_tls, tmp_path):
    certificates = Certificates(tmp_path) if is_tls else None
    async with connected(key, certificates) as (server, http):
        server.write = say_three
        assert await http.post("/echo", b"x", IDENTITY) == b"x"
        for _ in range(3):
            assert await read(http) == [b"one", b"two", b"three"]
        assert http.num_answers == 0
        connector = http.http.connector
        assert connector is not None
        assert len(connector._conns) == 1


async def test_a_peer_that_has_forgotten_the_session_gets_another():
    async with connected() as (server, http):
        server.write = say_three
        await http.post("/echo", b"x", IDENTITY)
        first = http.trust.session
        server.forget()
        async with asyncio.TaskGroup() as tasks:  # all notice at once, one renews
            replies = [tasks.create_task(http.post("/echo", b"x", IDENTITY)) for _ in range(5)]
            answers = [tasks.create_task(read(http)) for _ in range(5)]
        assert {reply.result() for reply in replies} == {b"x"}
        assert all(answer.result() == [b"one", b"two", b"three"] for answer in answers)
        assert http.trust.session is not first
        assert server.num_asked == 11  # nothing was done twice


async def test_nothing_unproven_counts_while_no_session_can_be_opened():
    async with connected() as (server, http):
        await http.post("/echo", b"x", IDENTITY)
        server.is_taken_over = True
        async with asyncio.TaskGroup() as tasks:  # one renews and fails, the others come behind it
            asked = [tasks.create_task(failure_of(http.post("/echo", b"x", IDENTITY)))]
            asked += [tasks.create_task(failure_of(read(http))) for _ in range(3)]
        assert all(isinstance(each.result(), TransferError) for each in asked)
        assert server.num_forged == 0


async def test_a_request_is_sent_nowhere_else_because_an_answer_says_so():
    async with connected() as (server, http):
        await http.post("/echo", b"x", IDENTITY)
        for status in (302, 307, 308):
            server.redirects_with = status
            with pytest.raises(TransferError, match=f"status {status}"):
                await http.post("/echo", b"x", IDENTITY)
            with pytest.raises(TransferError, match=f"status {status}"):
                await read(http)
        assert server.num_asked == 1


async def test_an_answer_that_breaks_falls_silent_or_is_forged_is_an_error():
    async with connected() as (server, http):

        async def half(response: web.StreamResponse, signer: LineSigner) -> None:
            await response.write(signer.seal(b"one")[:-1])

        async def silence(response: web.StreamResponse, signer: LineSigner) -> None:
            await response.write(signer.seal(b"one"))
            await asyncio.Event().wait()

        async def plain(response: web.StreamResponse, _signer: LineSigner) -> None:
            await response.write(b"one\n")

        async def endless(response: web.StreamResponse, _signer: LineSigner) -> None:
            while True:
                await response.write(b"x" * 100)

        server.write = half
        with pytest.raises(TransferError, match="ends within a line"):
            await read(http)
        server.write = silence
        with pytest.raises(TransferTimeout):
            await read(http, silence_s=0.3)
        server.write = plain
        with pytest.raises(UntrustedPeer):
            await read(http)
        server.write = endless
        with pytest.raises(TransferError, match="longer than 1000 bytes"):
            await read(http)
        with pytest.raises(Overloaded) as full:
            await read(http, b"full")
        assert full.value.retry_after_s == 3.0
        server.write = say_three
        assert await read(http) == [b"one", b"two", b"three"]


async def test_leaving_an_answer_ends_the_work_at_the_other_end():
    async with connected() as (server, http):
        ended = asyncio.Event()

        async def work(response: web.StreamResponse, signer: LineSigner) -> None:
            try:
                while True:
                    await response.write(signer.seal(b"more"))
                    await asyncio.sleep(0.001)
            finally:
                ended.set()

        server.write = work

        async def leave() -> None:
            async with http.lines(
                "/lines", b"ask", IDENTITY, silence_s=20.0, max_line_bytes=1000
            ) as lines:
                assert await lines.next() == b"more"
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await leave()
        await ended.wait()
        assert http.num_answers == 0
