"""Who shows another's transfer, plays back or reflects what was said, or speaks another version gets nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from prfaas.errors import IncompatiblePeer, TransferError, UntrustedPeer
from prfaas.transport.address import PeerAddress
from prfaas.transport.attach import Attach, encode_attach
from prfaas.transport.auth import PeerSide
from prfaas.transport.client import PeerClient
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.handshake import PROTOCOL_VERSION, check_compatible
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.messages import TransferAccepted
from prfaas.transport.pulling import Pulling
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.sending import SWITCHING
from prfaas.transport.wire import FrameType
from tests.transport.channels import OPTIONS, Pages, channel, ended, finish, warm
from tests.transport.samples import ASKED, IDENTITY, asked

pytestmark = pytest.mark.usefixtures("no_leaks")
KEY = ClusterKey(b"k" * 16)
NUM_PAGES = 6


def gate() -> PeerSide:
    return PeerSide(KEY, identity=IDENTITY, epoch="e" * 64)


@contextlib.asynccontextmanager
async def another(address: PeerAddress) -> AsyncIterator[PeerClient]:
    """A second asker that has the cluster key, and a session of its own."""
    client = PeerClient(address, OPTIONS, security=ChannelSecurity(cluster_key=KEY))
    try:
        await client.handshake(IDENTITY)
        yield client
    finally:
        await client.close()


async def told(client: PeerClient, word: Attach, held: Pages) -> str:
    """Attach a stream with these words and return why nothing came."""
    pulling = Pulling(
        asked=asked(transfer_id=word.transfer_id, capability=word.capability),
        consumer=held,
        streams=client.streams,
        dial=client.dial,
        stall_timeout_s=2,
        numbers=KvNumbers(),
    )
    for _ in range(word.stream):
        pulling._incoming.new_stream()
    with contextlib.closing(pulling):
        await pulling.begin(TransferAccepted(hit_tokens=0))
        with pytest.raises(TransferError) as caught:
            await finish(pulling)
    return str(caught.value)


@pytest.mark.parametrize("with_key", [False, True])
async def test_another_asker_gets_no_page_of_a_transfer_that_is_not_its_own(with_key):
    security: dict[str, Any] = {}
    if with_key:
        security = {"gate": gate(), "asker": ChannelSecurity(cluster_key=KEY)}
    async with channel(streams=2, **security) as (service, client):
        await client.handshake(IDENTITY)
        await warm(client)
        service.num_pages = NUM_PAGES
        await client.open(ASKED)
        async with another(client.address) if with_key else contextlib.nullcontext(client) as thief:
            held = Pages()
            for capability, stream in (("0" * 32, 0), ("f" * 32, 1), ("C0FFEE42" * 4, 2)):
                word = Attach(transfer_id=ASKED.transfer_id, capability=capability, stream=stream)
                assert "promised to somebody else" in await told(thief, word, held)
            with pytest.raises(TransferError, match="somebody else"):
                await thief.acknowledge(asked(capability="0" * 32))
        assert not held.frames
        assert service.num_bytes_sent == 0
        transfer = service.transfers[ASKED.transfer_id]
        assert transfer.outcome is None
        transfer.check()


async def test_a_stream_number_that_is_taken_stays_with_whom_it_carries():
    """Even with the capability: two connections under one number would share what each has sent."""
    async with channel(streams=1) as (service, client):
        await warm(client)
        held = Pages()
        async with client.pull(ASKED, held) as pulling:
            transfer = service.transfers[ASKED.transfer_id]
            word = Attach(transfer_id=ASKED.transfer_id, capability=ASKED.capability, stream=0)
            second = Pages()
            assert "attached before" in await told(client, word, second)
            service.num_pages = NUM_PAGES
            transfer.finish(tokens_computed=0)
            await finish(pulling)
        assert not second.frames
        assert await ended(transfer) == "completed"


async def test_what_was_recorded_of_one_session_opens_nothing_in_another():
    """The signed upgrade and the sealed ATTACH of somebody's stream, played back byte by byte."""
    said: list[bytes] = []
    async with channel(
        gate=gate(), asker=ChannelSecurity(cluster_key=KEY), streams=1, page_bytes=3000
    ) as (
        service,
        client,
    ):
        await client.handshake(IDENTITY)
        stream = await client.dial()
        send = stream.port.send_now

        def record(buffers: Sequence[memoryview | bytes]) -> int:
            said.extend(bytes(data) for data in buffers)
            return send(buffers)

        stream.port.send_now = record  # type: ignore[method-assign]
        service.num_pages = NUM_PAGES
        await client.open(ASKED)
        word = Attach(transfer_id=ASKED.transfer_id, capability=ASKED.capability, stream=0)
        assert stream.say(FrameType.ATTACH, encode_attach(word))
        while not service.num_bytes_sent:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        stream.close()
        sent_bytes = service.num_bytes_sent
        async with another(client.address) as thief:
            theirs = await thief.dial()
            theirs.port.send_now(said)
            while theirs.is_open:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert service.num_bytes_sent == sent_bytes


async def test_a_peer_that_sends_our_own_words_back_is_refused():
    async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            writer.write(
                b"HTTP/1.1 201 Created\r\nConnection: close\r\nContent-Length: 16\r\n\r\n"
                b'{"hit_tokens":0}'
            )
        else:
            writer.write(SWITCHING)
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(reflect, "127.0.0.1", 0)
    address = PeerAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    client = PeerClient(address, OPTIONS)
    held = Pages()
    try:
        with pytest.raises(TransferError, match="unexpected ATTACH"):
            async with client.pull(ASKED, held) as pulling:
                await finish(pulling)
        assert not held.frames
    finally:
        await client.close()
        server.close()
        await server.wait_closed()
        await asyncio.sleep(0.05)


def test_a_peer_of_another_version_is_refused_with_both_named():
    with pytest.raises(IncompatiblePeer, match=rf"\b{PROTOCOL_VERSION} here, 2 there"):
        check_compatible(IDENTITY, replace(IDENTITY, protocol_version=2), accept_approximate=True)


async def test_whoever_has_no_key_learns_nothing_of_a_transfer():
    async with channel(gate=gate(), asker=ChannelSecurity(cluster_key=KEY)) as (service, client):
        await client.open(ASKED)
        stranger = PeerClient(client.address, OPTIONS)
        try:
            for attempt in (
                stranger.handshake(IDENTITY),
                stranger.open(asked(transfer_id="f" * 32)),
                stranger.acknowledge(ASKED),
            ):
                with pytest.raises(UntrustedPeer):
                    await attempt
            with pytest.raises(TransferError, match="401"):
                await stranger.dial()
            stranger._uses_http = True
            held = Pages()
            word = Attach(transfer_id=ASKED.transfer_id, capability=ASKED.capability, stream=0)
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(stranger.run())
                await asyncio.sleep(0)
                assert "proof" in await told(stranger, word, held)
                keeping.cancel()
        finally:
            await stranger.close()
        assert not held.frames
        assert service.transfers[ASKED.transfer_id].outcome is None
