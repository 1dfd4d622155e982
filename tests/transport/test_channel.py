"""The two drivers against each other, and each against peers that break the rules."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from prfaas.errors import (
    BadRequest,
    ConfigError,
    IncompatiblePeer,
    Overloaded,
    PromptRefused,
    ProtocolError,
    TransferError,
    TransferTimeout,
)
from prfaas.transport.client import FrameStream, PeerAddress, PeerClient, parse_address
from prfaas.transport.messages import PeerStatus, TransferAccepted, TransferRequest
from prfaas.transport.options import TransportOptions
from prfaas.transport.outgoing import OutgoingTransfer, PagePlace
from prfaas.transport.server import SLICE_BYTES, check_bind, routes
from prfaas.transport.wire import FrameHeader, FrameType, encode_frame, encode_progress
from tests.transport.samples import ASKED, IDENTITY, asked

pytestmark = pytest.mark.usefixtures("no_leaks")
OPTIONS = TransportOptions(connect_timeout_s=2.0, stall_timeout_s=2.0)
PAGE_BYTES = 3 * SLICE_BYTES + 11


class Service:
    """A TransferService whose pages are made of their block numbers."""

    def __init__(self) -> None:
        self.transfers: dict[str, OutgoingTransfer] = {}
        self.refusal: Exception | None = None
        self.num_bytes_sent = 0
        self.asked: TransferRequest | None = None

    def status(self) -> PeerStatus:
        return PeerStatus(
            identity=IDENTITY,
            is_ready=True,
            reason="",
            num_waiting_tokens=5,
            prefill_tokens_per_s=1.5,
        )

    async def open(self, asked: TransferRequest) -> TransferAccepted:
        if self.refusal is not None:
            raise self.refusal
        self.asked = asked
        self.transfers[asked.transfer_id] = OutgoingTransfer(
            transfer_id=asked.transfer_id,
            page_view=lambda place: memoryview(bytes([place.block]) * PAGE_BYTES),
        )
        return TransferAccepted(hit_tokens=16)

    def transfer(self, transfer_id: str) -> OutgoingTransfer | None:
        return self.transfers.get(transfer_id)

    def cancel(self, transfer_id: str) -> bool:
        transfer = self.transfers.pop(transfer_id, None)
        if transfer is None:
            return False
        transfer.close("cancelled")
        return True

    def count_sent(self, num_bytes: int) -> None:
        self.num_bytes_sent += num_bytes


@contextlib.asynccontextmanager
async def channel(lease_s: float = 5.0) -> AsyncIterator[tuple[Service, PeerClient]]:
    service = Service()
    app = web.Application()
    app.add_routes(routes(service, lease_s=lease_s))
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = PeerClient(PeerAddress("127.0.0.1", runner.addresses[0][1]), OPTIONS)
    try:
        async with asyncio.timeout(30):
            yield service, client
    finally:
        await client.close()
        await runner.cleanup()


class Pages:
    def __init__(self) -> None:
        self.pages: dict[int, bytearray] = {}

    def resolve(self, header: FrameHeader) -> memoryview:
        return memoryview(self.pages.setdefault(header.block, bytearray(PAGE_BYTES)))


def place(block: int) -> PagePlace:
    return PagePlace(group=0, index=0, block=block, num_tokens=16)


async def test_a_handshake_brings_the_peers_identity_and_load():
    async with channel() as (service, client):
        assert await client.handshake(IDENTITY) == service.status()


async def test_a_transfer_request_arrives_as_it_was_sent():
    async with channel() as (service, client):
        assert (await client.open(ASKED)).hit_tokens == 16
        assert service.asked == ASKED


async def test_pages_and_frames_arrive_whole_and_the_ack_completes_the_transfer():
    async with channel() as (service, client):
        await client.open(ASKED)
        transfer, held = service.transfers[ASKED.transfer_id], Pages()
        for block in range(5):
            transfer.put_page(place(block))
        transfer.finish(tokens_computed=3)
        kinds = []
        async with client.stream(ASKED.transfer_id, held.resolve) as stream:
            while (frame := await stream.next_frame(5)) is not None:
                kinds.append(frame.header.type)
                if frame.header.type is FrameType.END:
                    assert transfer.outcome is None
                    await stream.acknowledge(1)
        await transfer.detached()
        assert transfer.outcome == "completed"
        assert kinds == [FrameType.PAGE] * 5 + [FrameType.END]
        assert held.pages == {block: bytearray([block]) * PAGE_BYTES for block in range(5)}
        assert service.num_bytes_sent == 5 * PAGE_BYTES


async def test_leaving_the_stream_cancels_the_transfer():
    async with channel() as (service, client):
        await client.open(ASKED)
        transfer = service.transfers[ASKED.transfer_id]
        async with client.stream(ASKED.transfer_id, Pages().resolve) as stream:
            transfer.put_urgent(encode_progress(1, 2))
            await stream.next_frame(5)
        await transfer.detached()
        assert transfer.outcome == "cancelled"


async def test_a_transfer_is_cancelled_by_its_id_and_once():
    async with channel() as (service, client):
        await client.open(ASKED)
        transfer = service.transfers[ASKED.transfer_id]
        await client.cancel(ASKED.transfer_id)
        await client.cancel(ASKED.transfer_id)
        assert transfer.outcome == "cancelled"


async def test_a_second_stream_is_refused_and_does_not_hurt_the_first():
    async with channel() as (service, client):
        await client.open(ASKED)
        transfer = service.transfers[ASKED.transfer_id]
        async with client.stream(ASKED.transfer_id, Pages().resolve) as first:
            with pytest.raises(TransferError, match="409"):
                async with client.stream(ASKED.transfer_id, Pages().resolve):
                    raise AssertionError("two streams")
            transfer.put_urgent(encode_progress(1, 2))
            assert await first.next_frame(5) is not None


async def test_a_stream_of_an_unknown_transfer_is_refused():
    async with channel() as (_, client):
        with pytest.raises(TransferError, match="404"):
            async with client.stream("f" * 32, Pages().resolve):
                raise AssertionError("a stream of nothing")


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (IncompatiblePeer("model 'a' here, 'b' there"), IncompatiblePeer),
        (Overloaded("full", retry_after_s=7.5), Overloaded),
        (BadRequest("have_tokens"), PromptRefused),
        (ProtocolError("field seed"), TransferError),
    ],
)
async def test_a_refusal_reaches_the_asker_with_its_words(refusal, expected):
    async with channel() as (service, client):
        service.refusal = refusal
        with pytest.raises(expected, match=str(refusal)) as caught:
            await client.open(ASKED)
        if isinstance(caught.value, Overloaded):
            assert caught.value.retry_after_s == 7.5


async def test_a_silent_sender_is_a_timeout():
    async with channel() as (_, client):
        await client.open(ASKED)
        async with client.stream(ASKED.transfer_id, Pages().resolve) as stream:
            with pytest.raises(TransferTimeout):
                await stream.next_frame(0.05)


async def test_an_error_frame_is_told_and_the_transfer_has_failed():
    async with channel() as (service, client):
        await client.open(ASKED)
        transfer = service.transfers[ASKED.transfer_id]
        transfer.fail("no more pages")
        async with client.stream(ASKED.transfer_id, Pages().resolve) as stream:
            frame = await stream.next_frame(5)
        assert frame is not None
        assert frame.payload == b"no more pages"
        await transfer.detached()
        assert transfer.outcome == "failed"


async def test_a_receiver_that_does_not_read_loses_its_lease():
    async with channel(lease_s=0.2) as (service, client):
        await client.open(ASKED)
        transfer = service.transfers[ASKED.transfer_id]
        for block in range(60):
            transfer.put_page(place(block))
        async with client.stream(ASKED.transfer_id, Pages().resolve):
            await transfer.detached()
        assert transfer.outcome == "expired"


async def test_a_receiver_that_does_not_acknowledge_loses_its_lease():
    async with channel(lease_s=0.2) as (service, client):
        await client.open(ASKED)
        transfer = service.transfers[ASKED.transfer_id]
        transfer.finish(tokens_computed=0)
        async with client.stream(ASKED.transfer_id, Pages().resolve) as stream:
            assert await stream.next_frame(5) is not None
            assert await stream.next_frame(5) is None
        assert transfer.outcome == "expired"


async def test_a_lease_stands_still_while_the_sender_has_nothing_to_send():
    async with channel(lease_s=0.1) as (service, client):
        await client.open(ASKED)
        transfer = service.transfers[ASKED.transfer_id]
        async with client.stream(ASKED.transfer_id, Pages().resolve) as stream:
            with pytest.raises(TransferTimeout):
                await stream.next_frame(0.4)
            assert transfer.outcome is None


@pytest.mark.parametrize("data", [b"hello sender, how are you? " * 4, encode_frame(FrameType.END)])
async def test_a_receiver_that_sends_anything_but_an_ack_is_dropped(data):
    async with channel() as (service, client):
        await client.open(ASKED)
        transfer = service.transfers[ASKED.transfer_id]
        async with client.stream(ASKED.transfer_id, Pages().resolve) as stream:
            await asyncio.get_running_loop().sock_sendall(stream._sock, data)
            await transfer.detached()
        assert transfer.outcome == "protocol_error"


@pytest.mark.parametrize(
    "body", [b"", b"{x", b"[]", b"[" * 100_000, b'{"identity": 5}', b"\x80\x04\x95pickle"]
)
@pytest.mark.parametrize("path", ["/kv/v1/handshake", "/kv/v1/transfers"])
async def test_a_body_that_is_no_request_is_a_400_in_one_shape(path, body):
    async with channel() as (_, client), aiohttp.ClientSession() as session:
        async with session.post(f"http://{client.address}{path}", data=body) as response:
            assert response.status == 400
            error = json.loads(await response.read())["error"]
        assert set(error) == {"message", "type", "param", "code"}


async def test_a_stream_without_an_upgrade_is_told_what_it_needs():
    async with channel() as (_, client):
        url = f"http://{client.address}/kv/v1/transfers/{ASKED.transfer_id}/stream"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 426
            assert response.headers["Upgrade"] == "prfaas-kv"


@contextlib.asynccontextmanager
async def fake_peer(answer: bytes) -> AsyncIterator[PeerClient]:
    """A server that answers anything with these bytes and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = PeerClient(PeerAddress("127.0.0.1", server.sockets[0].getsockname()[1]), OPTIONS)
    try:
        async with asyncio.timeout(30):
            yield client
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        HEAD + b"not json",
        HEAD + b"{}",
        HEAD + b"x" * (2 << 20),
        b"HTTP/1.1 500 Oops\r\nConnection: close\r\n\r\n{}",
        b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n<html>",
    ],
)
async def test_a_peer_that_talks_nonsense_is_a_transfer_error(answer):
    async with fake_peer(answer) as client:
        with pytest.raises(TransferError):
            await client.open(asked())
        with pytest.raises(TransferError):
            await client.handshake(IDENTITY)


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 20_000, b"HTTP/1.1 101 Switching"]
)
async def test_a_peer_that_does_not_upgrade_is_a_transfer_error(answer):
    async with fake_peer(answer) as client:
        with pytest.raises(TransferError):
            async with client.stream("f" * 32, Pages().resolve):
                raise AssertionError("not upgraded")


async def test_frames_that_come_with_the_upgrade_are_not_lost():
    upgraded = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: prfaas-kv\r\n\r\n"
    async with (
        fake_peer(upgraded + encode_progress(4, 2) + encode_frame(FrameType.ERROR, b"x")) as client,
        client.stream("f" * 32, Pages().resolve) as stream,
    ):
        frames = [await stream.next_frame(5), await stream.next_frame(5)]
        assert [f.header.type for f in frames if f] == [FrameType.PROGRESS, FrameType.ERROR]
        assert await stream.next_frame(5) is None


async def test_a_stream_that_never_runs_dry_lets_others_have_the_loop(monkeypatch):
    monkeypatch.setattr("prfaas.transport.client.YIELD_BYTES", 500)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        frames = encode_progress(1, 2) * 100
        theirs.sendall(frames)
        stream = FrameStream(ours, b"", Pages().resolve, PeerAddress("here", 1))
        num_turns = 0

        async def others() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(others())
            for _ in range(100):
                assert await stream.next_frame(5) is not None
            task.cancel()
        assert num_turns >= len(frames) // 1000


async def test_a_deadline_holds_for_the_whole_frame_and_not_for_each_byte():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        stream = FrameStream(ours, b"", Pages().resolve, PeerAddress("here", 1))

        async def trickle() -> None:
            for byte in encode_progress(1, 2):
                theirs.send(bytes([byte]))
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(trickle())
            with pytest.raises(TransferTimeout):
                await stream.next_frame(0.1)
            task.cancel()


async def test_a_peer_that_is_not_there_is_a_transfer_error():
    async with fake_peer(b"") as client:
        address = client.address
    client = PeerClient(address, OPTIONS)
    try:
        with pytest.raises(TransferError, match=str(address)):
            await client.open(ASKED)
        with pytest.raises(TransferError, match=str(address)):
            async with client.stream("f" * 32, Pages().resolve):
                raise AssertionError("connected to nothing")
    finally:
        await client.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_leave(host):
    check_bind(host, allow_plaintext=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node7.example.com", ""])
def test_plaintext_leaves_loopback_only_with_leave(host):
    with pytest.raises(ConfigError, match="--allow-plaintext"):
        check_bind(host, allow_plaintext=False)
    check_bind(host, allow_plaintext=True)


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:0", "host:65536", "host:x1"])
def test_an_address_without_host_or_port_is_refused(text):
    with pytest.raises(ValueError, match="not host:port"):
        parse_address(text)


@pytest.mark.parametrize("text", ["127.0.0.1:8100", "node:1", "[::1]:65535"])
def test_an_address_round_trips(text):
    assert str(parse_address(text)) == text
