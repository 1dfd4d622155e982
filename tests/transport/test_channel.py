"""The two drivers against each other, and each against peers that break the rules."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from prfaas.errors import (
    BadRequest,
    IncompatiblePeer,
    Overloaded,
    PromptRefused,
    ProtocolError,
    TransferError,
    TransferTimeout,
)
from prfaas.transport.address import PeerAddress, parse_address
from prfaas.transport.client import PeerClient
from prfaas.transport.ports import SocketPort
from prfaas.transport.stream import FrameStream
from prfaas.transport.wire import FrameType, encode_frame, encode_progress
from tests.transport.channels import OPTIONS, PAGE_BYTES, Pages, channel, place
from tests.transport.samples import ASKED, CAPABILITY, IDENTITY, asked, progress_frame

pytestmark = pytest.mark.usefixtures("no_leaks")


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
        async with client.stream(ASKED.transfer_id, CAPABILITY, held.resolve) as stream:
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
        async with client.stream(ASKED.transfer_id, CAPABILITY, Pages().resolve) as stream:
            transfer.put_urgent(FrameType.PROGRESS, encode_progress(1, 2))
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
        async with client.stream(ASKED.transfer_id, CAPABILITY, Pages().resolve) as first:
            with pytest.raises(TransferError, match="409"):
                async with client.stream(ASKED.transfer_id, CAPABILITY, Pages().resolve):
                    raise AssertionError("two streams")
            transfer.put_urgent(FrameType.PROGRESS, encode_progress(1, 2))
            assert await first.next_frame(5) is not None


async def test_a_stream_of_an_unknown_transfer_is_refused():
    async with channel() as (_, client):
        with pytest.raises(TransferError, match="404"):
            async with client.stream("f" * 32, CAPABILITY, Pages().resolve):
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
        async with client.stream(ASKED.transfer_id, CAPABILITY, Pages().resolve) as stream:
            with pytest.raises(TransferTimeout):
                await stream.next_frame(0.05)


@pytest.mark.parametrize("capability", ["0" * 32, "", "é", CAPABILITY[:-1]])
async def test_a_stream_needs_the_capability_of_its_transfer(capability):
    async with channel() as (service, client):
        await client.open(ASKED)
        url = f"http://{client.address}/kv/v1/transfers/{ASKED.transfer_id}/stream"
        headers = {"Upgrade": "prfaas-kv", "Prfaas-Capability": capability}
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
            assert answer.status == 403
        assert service.transfers[ASKED.transfer_id].outcome is None
        async with client.stream(ASKED.transfer_id, CAPABILITY, Pages().resolve):
            pass


async def test_an_error_frame_is_told_and_the_transfer_has_failed():
    async with channel() as (service, client):
        await client.open(ASKED)
        transfer = service.transfers[ASKED.transfer_id]
        transfer.fail("no more pages")
        async with client.stream(ASKED.transfer_id, CAPABILITY, Pages().resolve) as stream:
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
        async with client.stream(ASKED.transfer_id, CAPABILITY, Pages().resolve):
            await transfer.detached()
        assert transfer.outcome == "expired"


async def test_a_receiver_that_does_not_acknowledge_loses_its_lease():
    async with channel(lease_s=0.2) as (service, client):
        await client.open(ASKED)
        transfer = service.transfers[ASKED.transfer_id]
        transfer.finish(tokens_computed=0)
        async with client.stream(ASKED.transfer_id, CAPABILITY, Pages().resolve) as stream:
            assert await stream.next_frame(5) is not None
            assert await stream.next_frame(5) is None
        assert transfer.outcome == "expired"


async def test_a_lease_stands_still_while_the_sender_has_nothing_to_send():
    async with channel(lease_s=0.1) as (service, client):
        await client.open(ASKED)
        transfer = service.transfers[ASKED.transfer_id]
        async with client.stream(ASKED.transfer_id, CAPABILITY, Pages().resolve) as stream:
            with pytest.raises(TransferTimeout):
                await stream.next_frame(0.4)
            assert transfer.outcome is None


@pytest.mark.parametrize("data", [b"hello sender, how are you? " * 4, encode_frame(FrameType.END)])
async def test_a_receiver_that_sends_anything_but_an_ack_is_dropped(data):
    async with channel() as (service, client):
        await client.open(ASKED)
        transfer = service.transfers[ASKED.transfer_id]
        async with client.stream(ASKED.transfer_id, CAPABILITY, Pages().resolve) as stream:
            await stream._port.send(data, b"", 1)
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
            async with client.stream("f" * 32, CAPABILITY, Pages().resolve):
                raise AssertionError("not upgraded")


async def test_frames_that_come_with_the_upgrade_are_not_lost():
    upgraded = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: prfaas-kv\r\n\r\n"
    async with (
        fake_peer(upgraded + progress_frame(4, 2) + encode_frame(FrameType.ERROR, b"x")) as client,
        client.stream("f" * 32, CAPABILITY, Pages().resolve) as stream,
    ):
        frames = [await stream.next_frame(5), await stream.next_frame(5)]
        assert [f.header.type for f in frames if f] == [FrameType.PROGRESS, FrameType.ERROR]
        assert await stream.next_frame(5) is None


async def test_a_stream_that_never_runs_dry_lets_others_have_the_loop(monkeypatch):
    monkeypatch.setattr("prfaas.transport.stream.YIELD_BYTES", 500)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        frames = progress_frame(1, 2) * 100
        theirs.sendall(frames)
        stream = FrameStream(SocketPort(ours), b"", Pages().resolve, PeerAddress("here", 1))
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
        stream = FrameStream(SocketPort(ours), b"", Pages().resolve, PeerAddress("here", 1))

        async def trickle() -> None:
            for byte in progress_frame(1, 2):
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
            async with client.stream("f" * 32, CAPABILITY, Pages().resolve):
                raise AssertionError("connected to nothing")
    finally:
        await client.close()


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:0", "host:65536", "host:x1"])
def test_an_address_without_host_or_port_is_refused(text):
    with pytest.raises(ValueError, match="not host:port"):
        parse_address(text)


@pytest.mark.parametrize("text", ["127.0.0.1:8100", "node:1", "[::1]:65535"])
def test_an_address_round_trips(text):
    assert str(parse_address(text)) == text
