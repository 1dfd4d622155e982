"""The two drivers against each other, and each against peers that break the rules."""

import asyncio
import contextlib
import json
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
from prfaas.transport.attach import Attach, encode_attach
from prfaas.transport.client import PeerClient
from prfaas.transport.flow import EgressBudget
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.messages import TransferAccepted, TransferRequest
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.pulling import Pulling
from prfaas.transport.seals import NumberedChecksumSeal
from prfaas.transport.sending import BATCH_BYTES
from prfaas.transport.stream import RawStream
from prfaas.transport.wire import FrameType, encode_frame, encode_progress
from tests.transport.channels import (
    OPTIONS,
    PAGE_BYTES,
    Pages,
    channel,
    ended,
    finish,
    place,
    pull_all,
    warm,
)
from tests.transport.samples import ASKED, IDENTITY, asked, progress_frame

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
        held = Pages()
        async with client.pull(ASKED, held) as pulling:
            transfer = service.transfers[ASKED.transfer_id]
            for block in range(5):
                transfer.put_page(place(block))
            transfer.put_urgent(FrameType.PROGRESS, encode_progress(1, 2))
            transfer.finish(tokens_computed=3)
            while not pulling.is_finished:
                await pulling.step()
            assert transfer.outcome is None
            assert pulling.acknowledge()
        assert await ended(transfer) == "completed"
        held.check(5)
        assert held.kinds.count(FrameType.PROGRESS) == 1
        assert held.totals is not None
        assert held.totals.tokens_computed == 3
        assert service.num_bytes_sent == 5 * PAGE_BYTES


async def test_what_was_attached_before_its_transfer_was_opened_waits_for_it():
    async with channel() as (service, client):
        await warm(client)
        service.num_pages = 9
        service.gate.clear()
        held = Pages()
        async with asyncio.TaskGroup() as tasks:
            pulling = tasks.create_task(pull_all(client, held))
            await asyncio.sleep(0.1)
            assert not pulling.done()
            service.gate.set()
        held.check(9)
        assert held.hit_tokens == 16


async def test_streams_are_used_again_and_a_request_costs_no_connection():
    async with channel(streams=3) as (service, client):
        service.num_pages = 12
        await warm(client)
        opened = await settled_streams(client)
        for number in range(1, 30):
            held = Pages()
            await pull_all(client, held, asked(transfer_id=f"{number:032d}"))
            held.check(12)
            await settled_streams(client)
        assert len(await settled_streams(client) - opened) <= 3  # spares for transfers that overlap


async def settled_streams(client: PeerClient) -> set[object]:
    streams = client.streams
    while streams._settling or streams.num_open < streams.num_idle:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return set(streams._idle)


async def test_work_is_spread_over_all_streams():
    async with channel(streams=4) as (service, client):
        service.num_pages = 200
        await warm(client)
        held = Pages()
        async with client.pull(ASKED, held) as pulling:
            carriers = tuple(pulling._carriers)
            await finish(pulling)
        assert len(carriers) == 4
        shares = [stream.num_bytes for stream in carriers]
        assert sum(shares) > 200 * PAGE_BYTES
        assert all(share > 5 * PAGE_BYTES for share in shares)
        held.check(200)


@pytest.mark.parametrize("page_bytes", [1, 31, 300, 5000, 40_000])
async def test_small_pages_arrive_whole(page_bytes):
    async with channel(page_bytes=page_bytes) as (service, client):
        service.num_pages = 700
        await warm(client)
        held = Pages(page_bytes)
        await pull_all(client, held)
        held.check(700)


async def test_transfers_at_once_do_not_mix():
    async with channel(streams=2, page_bytes=70_000) as (service, client):
        service.num_pages = 40
        await warm(client)
        holds = [Pages(70_000) for _ in range(6)]
        async with asyncio.TaskGroup() as tasks:
            for number, held in enumerate(holds):
                tasks.create_task(pull_all(client, held, asked(transfer_id=f"{number:032d}")))
        for held in holds:
            held.check(40)


async def test_leaving_a_pull_and_cancelling_ends_the_transfer():
    async with channel() as (service, client):
        async with client.pull(ASKED, Pages()) as pulling:
            transfer = service.transfers[ASKED.transfer_id]
            transfer.put_urgent(FrameType.PROGRESS, encode_progress(1, 2))
            await pulling.step()
        await client.cancel(ASKED.transfer_id)
        await client.cancel(ASKED.transfer_id)
        assert await ended(transfer) == "cancelled"


async def test_an_asker_that_leaves_without_a_word_loses_a_short_lease():
    async with channel(lease_s=0.8) as (service, client):
        async with client.pull(ASKED, Pages()):
            transfer = service.transfers[ASKED.transfer_id]
        assert await ended(transfer) == "expired"


async def test_a_transfer_nobody_attaches_to_loses_its_lease():
    async with channel(lease_s=0.2) as (service, client):
        await client.open(ASKED)
        assert await ended(service.transfers[ASKED.transfer_id]) == "expired"


async def test_a_stream_of_an_unknown_transfer_is_told_so():
    async with channel() as (_, client):
        await told(client, asked(transfer_id="f" * 32), "no such transfer")


async def test_a_stream_needs_the_capability_of_its_transfer():
    async with channel() as (service, client):
        await client.open(ASKED)
        await told(client, asked(capability="0" * 32), "promised to somebody else")
        assert service.transfers[ASKED.transfer_id].outcome is None


async def test_streams_that_come_to_a_transfer_that_has_ended_hear_so_once_and_serve_the_next():
    async with channel(streams=2, page_bytes=100) as (service, client):
        await warm(client)
        streams = set(service.channel.streams)
        await client.open(ASKED)
        service.transfers[ASKED.transfer_id].close("expired")
        assert await told(client, ASKED, "has ended: expired") == 0
        service.num_pages = 3
        held = Pages(100)
        await pull_all(client, held, asked(transfer_id="n" * 32))
        held.check(3)
        assert streams & service.channel.streams


async def told(client: PeerClient, request: TransferRequest, words: str) -> int:
    """Attach the open streams without asking for a transfer first, and hear these words.

    Returns how many streams were lost.
    """
    pulling = Pulling(
        asked=request,
        consumer=Pages(),
        streams=client.streams,
        dial=client.dial,
        stall_timeout_s=5,
        numbers=KvNumbers(),
    )
    with contextlib.closing(pulling):
        pulling.attach_warm()
        await pulling.begin(TransferAccepted(hit_tokens=0))
        with pytest.raises(TransferError, match=words):
            await finish(pulling)
    return pulling.num_streams_lost


async def test_a_stream_number_is_used_once():
    async with channel() as (service, client), client.pull(ASKED, Pages()) as pulling:
        transfer = service.transfers[ASKED.transfer_id]
        await told(client, ASKED, "stream 0 was attached before")
        transfer.finish(tokens_computed=0)
        await finish(pulling)


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
    async with (
        channel(stall_timeout_s=0.1) as (_, client),
        client.pull(ASKED, Pages()) as pulling,
    ):
        with pytest.raises(TransferTimeout):
            await finish(pulling)


async def test_an_error_frame_is_told_and_the_transfer_has_failed():
    async with channel() as (service, client):
        await warm(client)
        async with client.pull(ASKED, Pages()) as pulling:
            transfer = service.transfers[ASKED.transfer_id]
            transfer.fail("no more pages")
            with pytest.raises(TransferError, match="no more pages"):
                await finish(pulling)
        await client.cancel(ASKED.transfer_id)
        assert await ended(transfer) == "failed"


async def test_a_receiver_that_does_not_read_loses_its_lease():
    async with channel(lease_s=0.3) as (service, client):
        service.num_pages = 200
        async with client.pull(ASKED, Pages()) as pulling:
            for stream in pulling._carriers:
                stream.port.pause()
            assert await ended(service.transfers[ASKED.transfer_id]) == "expired"


async def test_a_receiver_that_does_not_acknowledge_loses_its_lease():
    async with channel(lease_s=0.3) as (service, client):
        service.num_pages = 2
        async with client.pull(ASKED, Pages()) as pulling:
            while not pulling.is_finished:
                await pulling.step()
            assert await ended(service.transfers[ASKED.transfer_id]) == "expired"


async def test_a_transfer_can_be_acknowledged_without_a_stream():
    async with channel() as (service, client):
        service.num_pages = 2
        async with client.pull(ASKED, Pages()) as pulling:
            while not pulling.is_finished:
                await pulling.step()
        with pytest.raises(TransferError, match="somebody else"):
            await client.acknowledge(asked(capability="0" * 32))
        await client.acknowledge(ASKED)
        assert await ended(service.transfers[ASKED.transfer_id]) == "completed"


async def test_a_lease_stands_still_while_the_sender_has_nothing_to_send():
    async with (
        channel(lease_s=0.1, stall_timeout_s=0.4) as (service, client),
        client.pull(ASKED, Pages()) as pulling,
    ):
        with pytest.raises(TransferTimeout):
            await finish(pulling)
        assert service.transfers[ASKED.transfer_id].outcome is None


async def test_a_receiver_that_sends_a_whole_frame_of_senders_has_ended_its_transfer():
    async with channel() as (service, client), client.pull(ASKED, Pages()) as pulling:
        transfer = service.transfers[ASKED.transfer_id]
        stream = await attached_stream(transfer, pulling)
        stream.port.send_now([encode_frame(FrameType.END, seal=stream._our_seal)])
        assert await ended(transfer) == "protocol_error"


async def test_what_is_no_frame_costs_a_receiver_its_stream_and_nothing_more():
    async with channel() as (service, client), client.pull(ASKED, Pages()) as pulling:
        transfer = service.transfers[ASKED.transfer_id]
        stream = await attached_stream(transfer, pulling)
        stream.port.send_now([b"hello sender, how are you? " * 4])
        transfer.put_page(place(0))
        transfer.finish(tokens_computed=0)
        await finish(pulling)
        assert not stream.is_open
        assert pulling.num_streams_lost == 1
        assert await ended(transfer) == "completed"


async def attached_stream(transfer: OutgoingTransfer, pulling: Pulling) -> RawStream:
    """Return the one stream of a transfer once frames come over it."""
    transfer.put_urgent(FrameType.PROGRESS, encode_progress(1, 2))
    (stream,) = pulling._carriers
    while not stream.num_bytes:
        await pulling.step()
    return stream


async def test_an_ack_before_the_end_is_a_protocol_error():
    async with channel() as (service, client), client.pull(ASKED, Pages()) as pulling:
        transfer = service.transfers[ASKED.transfer_id]
        stream = await attached_stream(transfer, pulling)
        assert stream.say(FrameType.ACK)
        assert await ended(transfer) == "protocol_error"


async def test_an_egress_limit_holds_for_all_transfers_together():
    budget = EgressBudget(20e6, 1 << 16)
    async with channel(budget=budget, page_bytes=50_000) as (service, client):
        service.num_pages = 40
        await warm(client)
        started_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for number in range(2):
                request = asked(transfer_id=f"{number:032d}")
                tasks.create_task(pull_all(client, Pages(50_000), request))
        took_s = asyncio.get_running_loop().time() - started_s
        assert took_s > (2 * 40 * 50_000 - (1 << 16) - BATCH_BYTES) / 20e6


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
        url = f"http://{client.address}/kv/v1/stream"
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
    "answer", [b"", b"HTTP/1.1 401 No\r\n\r\n", b"x" * 20_000, b"HTTP/1.1 101 Switching"]
)
async def test_a_peer_that_does_not_upgrade_is_a_transfer_error(answer):
    async with fake_peer(answer) as client:
        with pytest.raises(TransferError):
            await client.dial()
        assert not client.uses_http


async def test_a_peer_that_has_too_many_streams_is_overloaded():
    async with channel(streams=2) as (service, client):
        service.channel._max_streams = 2
        await warm(client)
        with pytest.raises(Overloaded, match="no room for another stream"):
            await client.dial()
        assert not client.uses_http
        service.num_pages = 3
        held = Pages()
        await pull_all(client, held)
        held.check(3)


@pytest.mark.parametrize("carries", [False, True])
async def test_a_stream_that_carries_nothing_is_closed(monkeypatch, carries):
    monkeypatch.setattr("prfaas.transport.sending.NEW_S", 30.0 if carries else 0.05)
    monkeypatch.setattr("prfaas.transport.sending.IDLE_S", 0.05 if carries else 30.0)
    async with channel(streams=1) as (service, client):
        service.num_pages = 3
        await warm(client, 1)
        first = next(iter(service.channel.streams))
        if carries:
            await pull_all(client, Pages())
        while first in service.channel.streams:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        held = Pages()
        await pull_all(client, held, asked(transfer_id="n" * 32))
        held.check(3)


async def test_words_for_transfers_that_do_not_exist_keep_no_stream(monkeypatch):
    monkeypatch.setattr("prfaas.transport.sending.NEW_S", 0.1)
    attach = Attach(transfer_id="x" * 32, capability="c" * 32, stream=0, resumes=((0, 0),))
    word = encode_attach(attach)
    async with channel(streams=0) as (service, client):
        reader, writer = await asyncio.open_connection(client.address.host, client.address.port)
        writer.write(b"GET /kv/v1/stream HTTP/1.1\r\nUpgrade: prfaas-kv\r\n")
        writer.write(b"Host: a\r\nConnection: Upgrade\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        seal, num_words = NumberedChecksumSeal(), 0
        while service.channel.streams:
            writer.write(encode_frame(FrameType.ATTACH, word, seal))
            num_words += 1
            await asyncio.sleep(0.02)
        assert num_words > 1
        writer.close()


async def test_a_peer_that_closes_instead_of_answering_may_want_tls():
    async with fake_peer(b"") as client:
        with pytest.raises(TransferError, match="does it speak TLS"):
            await client.handshake(IDENTITY)


UPGRADED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: prfaas-kv\r\n\r\n"


async def test_a_peer_that_sends_frames_nobody_asked_for_is_not_kept():
    async with fake_peer(UPGRADED + progress_frame(4, 2)) as client:
        stream = await client.dial()
        assert not stream.is_open


async def test_an_idle_stream_that_ends_is_replaced_once_the_peer_is_heard_of():
    async with channel(streams=2) as (service, client):
        await warm(client)
        for stream in service.channel.streams:
            stream.close()
        while client.streams.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await warm(client)
        service.num_pages = 3
        held = Pages()
        await pull_all(client, held)
        held.check(3)


async def test_a_peer_that_is_not_there_is_a_transfer_error():
    async with fake_peer(b"") as client:
        address = client.address
    client = PeerClient(address, OPTIONS)
    try:
        with pytest.raises(TransferError, match=str(address)):
            await client.open(ASKED)
        with pytest.raises(TransferError, match=str(address)):
            await client.dial()
    finally:
        await client.close()


@pytest.mark.parametrize(
    "text",
    [
        "", "host", ":80", "host:", "host:0", "host:65536", "host:x1", "host:9" * 3000, "[:]:1", "1:2:3:4", "u@h:1",
        "h/x:1", "h ost:1", "a..b:1", "x" * 64 + ":1", "x." * 127 + ":1", "[fe80::1%a@b]:1", "h:\u0661",
    ],
)  # fmt: skip
def test_an_address_without_host_or_port_is_refused(text):
    with pytest.raises(ValueError, match="not host:port"):
        parse_address(text)


@pytest.mark.parametrize(
    "text", ["127.0.0.1:8100", "node:1", "[::1]:65535", "[fe80::1%eth0]:1", "a-b.c_d.:2"]
)
def test_an_address_round_trips(text):
    assert str(parse_address(text)) == text
