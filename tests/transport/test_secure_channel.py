"""The channel with a cluster key, with TLS, with both; and those who are let in with neither."""

import asyncio
import json
import ssl
from typing import Any, cast

import aiohttp
import pytest
import uvloop

from prfaas.errors import TransferError, UntrustedPeer
from prfaas.transport.accepting import UNSENT_BYTES
from prfaas.transport.attach import Attach, encode_attach
from prfaas.transport.auth import PeerSide
from prfaas.transport.client import PeerClient
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.options import TransportOptions
from prfaas.transport.seals import CHECKSUM, MacSeal
from prfaas.transport.security import ChannelSecurity, asker_security, peer_security
from prfaas.transport.stream_seals import StreamSeals
from prfaas.transport.tcpinfo import read_tcp_info
from prfaas.transport.transport_port import TransportPort
from prfaas.transport.wire import FrameType, encode_frame, refuse_pages
from tests.transport.certificates import Certificates
from tests.transport.channels import (
    Pages,
    Service,
    channel,
    ended,
    finish,
    place,
    pull_all,
    warm,
)
from tests.transport.samples import ASKED, IDENTITY, asked

pytestmark = pytest.mark.usefixtures("no_leaks")
KEY = ClusterKey(b"k" * 16)
NUM_PAGES = 8


def gate(key: ClusterKey = KEY) -> PeerSide:
    return PeerSide(key, identity=IDENTITY, epoch="e" * 64)


@pytest.fixture(scope="module", autouse=True)
def _uvloop_is_loaded():
    """Its first loop opens files that it keeps for the next."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("strangers"), "strangers")


def peer_tls(
    files: Certificates, subject: str = "127.0.0.1", authority: str | None = None
) -> ssl.SSLContext | None:
    cert, key = files.issue("peer", subject)
    return peer_security(TransportOptions(tls_cert=cert, tls_key=key, tls_ca=authority)).tls


def asker_tls(files: Certificates, signer: Certificates | None = None) -> ssl.SSLContext | None:
    cert, key = (None, None) if signer is None else signer.issue("asker")
    return asker_security(TransportOptions(tls_ca=files.authority, tls_cert=cert, tls_key=key)).tls


async def transfer_all(service: Service, client: PeerClient) -> None:
    """Run transfers whose pages, frames and ACK must arrive, over streams that are used again."""
    assert await client.handshake(IDENTITY) == service.status()
    await warm(client)
    for number in range(3):
        held, request = Pages(), asked(transfer_id=f"{number:032d}")
        async with client.pull(request, held) as pulling:
            transfer = service.transfers[request.transfer_id]
            for block in range(NUM_PAGES):
                transfer.put_page(place(block))
            transfer.put_urgent(FrameType.LOGITS, b"urgent")
            transfer.finish(tokens_computed=3)
            await finish(pulling)
        assert await ended(transfer) == "completed"
        assert held.kinds.count(FrameType.LOGITS) == 1
        held.check(NUM_PAGES)


@pytest.mark.parametrize("with_key", [False, True])
@pytest.mark.parametrize("tls", ["none", "one-sided", "mutual"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_transfer_arrives_whole(files, with_key, tls, loop):
    async def run() -> None:
        key = KEY if with_key else None
        peers = (
            None
            if tls == "none"
            else peer_tls(files, authority=files.authority if tls == "mutual" else None)
        )
        ours = None if tls == "none" else asker_tls(files, files if tls == "mutual" else None)
        asker = ChannelSecurity(cluster_key=key, tls=ours)
        async with channel(gate=gate() if with_key else None, tls=peers, asker=asker) as pair:
            await transfer_all(*pair)

    factory = uvloop.new_event_loop if loop == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


@pytest.mark.parametrize("peers_key", [None, ClusterKey(b"other" * 4)])
async def test_a_peer_that_has_not_our_key_is_not_trusted(peers_key):
    theirs = None if peers_key is None else gate(peers_key)
    async with channel(gate=theirs, asker=ChannelSecurity(cluster_key=KEY)) as (service, client):
        with pytest.raises(UntrustedPeer):
            await client.handshake(IDENTITY)
        with pytest.raises(UntrustedPeer):
            await client.open(ASKED)
        assert service.asked is None


async def test_an_asker_without_the_key_gets_nothing():
    async with channel(gate=gate()) as (service, client):
        for _ in range(2):
            with pytest.raises(UntrustedPeer, match="cluster key"):
                await client.handshake(IDENTITY)
        with pytest.raises(UntrustedPeer):
            await client.open(ASKED)
        with pytest.raises(TransferError, match="401"):
            await client.dial()
        assert service.asked is None


async def test_a_stranger_cannot_cancel():
    async with channel(gate=gate(), asker=ChannelSecurity(cluster_key=KEY)) as (service, client):
        await client.open(ASKED)
        url = f"http://{client.address}/kv/v1/transfers/{ASKED.transfer_id}"
        async with aiohttp.ClientSession() as session, session.delete(url) as answer:
            assert answer.status == 401
        assert service.transfers[ASKED.transfer_id].outcome is None
        await client.cancel(ASKED.transfer_id)
        assert service.transfers[ASKED.transfer_id].outcome == "cancelled"


async def test_a_request_that_is_sent_again_is_refused():
    async with channel(gate=gate(), asker=ChannelSecurity(cluster_key=KEY)) as (_, client):
        await client.handshake(IDENTITY)
        body = json.dumps({"identity": IDENTITY.to_json()}).encode()
        _, headers = client._http.trust.sign("POST", "/kv/v1/handshake", body)
        url = f"http://{client.address}/kv/v1/handshake"
        statuses = []
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.post(url, data=body, headers=headers) as answer:
                    statuses.append(answer.status)
        assert statuses == [200, 401]


async def test_a_session_serves_many_requests_and_a_new_one_follows_a_restart():
    async with channel(gate=gate(), asker=ChannelSecurity(cluster_key=KEY)) as (service, client):
        await client.handshake(IDENTITY)
        first = client._http.trust.session
        await client.open(ASKED)
        assert client._http.trust.session is first
        client._http.trust.session = None  # as if the peer had come back and forgotten us
        await client.open(asked(transfer_id="f" * 32))
        assert set(service.transfers) == {ASKED.transfer_id, "f" * 32}


async def test_a_session_that_the_peer_forgot_is_replaced_once():
    theirs = gate()
    async with channel(gate=theirs, asker=ChannelSecurity(cluster_key=KEY)) as (_, client):
        await client.handshake(IDENTITY)
        theirs._sessions.clear()
        assert (await client.open(ASKED)).hit_tokens == 16
        assert len(theirs._sessions) == 1


async def test_a_reply_that_the_peer_did_not_sign_does_not_count(monkeypatch):
    async with channel(gate=gate(), asker=ChannelSecurity(cluster_key=KEY)) as (_, client):
        await client.handshake(IDENTITY)
        monkeypatch.setattr("prfaas.transport.answers.PROOF_HEADER", "Nothing")
        with pytest.raises(UntrustedPeer, match="not signed"):
            await client.open(ASKED)


async def test_frames_without_a_mac_are_refused_where_there_must_be_one(monkeypatch):
    monkeypatch.setattr(
        "prfaas.transport.server._seals", lambda *_: StreamSeals(CHECKSUM, CHECKSUM)
    )
    async with channel(gate=gate(), asker=ChannelSecurity(cluster_key=KEY)) as (service, client):
        await client.handshake(IDENTITY)
        service.num_pages = 2
        held = Pages()
        with pytest.raises(TransferError):
            await pull_all(client, held)
        assert not held.frames


async def test_an_attach_that_was_changed_on_the_way_attaches_nothing(monkeypatch):
    async with channel(gate=gate(), asker=ChannelSecurity(cluster_key=KEY)) as (service, client):
        await client.open(ASKED)
        stream = await client.dial()
        other = ClusterKey(b"o" * 16)
        stream._our_seal = MacSeal(other)
        assert stream.say(FrameType.ATTACH, b"{}")
        while stream.is_open:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert service.transfers[ASKED.transfer_id].outcome is None


async def test_what_was_said_on_one_stream_means_nothing_on_another():
    """A recorded ATTACH, played back on a stream of its own, is of another key."""
    async with channel(gate=gate(), asker=ChannelSecurity(cluster_key=KEY)) as (service, client):
        service.num_pages = 1
        await client.open(ASKED)
        first, second = await client.dial(), await client.dial()
        attach = Attach(transfer_id=ASKED.transfer_id, capability=ASKED.capability, stream=0)
        second.port.send_now(
            [encode_frame(FrameType.ATTACH, encode_attach(attach), first._our_seal)]
        )
        while second.is_open:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        first.close()
        assert service.num_bytes_sent == 0


async def test_a_stream_over_tls_that_is_closed_can_still_be_asked_for_its_socket(files):
    asker = ChannelSecurity(tls=asker_tls(files))
    async with channel(tls=peer_tls(files), asker=asker) as (_, client):
        stream = await client.dial()
        assert read_tcp_info(stream.port.sock) is not None
        stream.close()
        await asyncio.sleep(0.05)
        assert read_tcp_info(stream.port.sock) is None


@pytest.mark.parametrize(("loop", "limit"), [("asyncio", 64 << 10), ("uvloop", UNSENT_BYTES)])
def test_what_waits_unsent_for_a_reader_over_tls_is_bounded(files, monkeypatch, loop, limit):
    for module in ("accepting", "sending"):
        monkeypatch.setattr(f"prfaas.transport.{module}.UNSENT_BYTES", limit)
    page_bytes, num_pages = 1 << 20, 60

    async def run() -> None:
        asker = ChannelSecurity(tls=asker_tls(files))
        async with channel(tls=peer_tls(files), asker=asker, page_bytes=page_bytes, streams=1) as (
            service,
            client,
        ):
            service.num_pages = num_pages
            request = asked(credit_bytes=num_pages * page_bytes)
            await client.open(request)
            stream = await client.dial()  # it reads nothing behind its first word
            word = Attach(transfer_id=ASKED.transfer_id, capability=ASKED.capability, stream=0)
            stream.attach(word, cast("Any", None), refuse_pages)
            transfer = service.transfers[ASKED.transfer_id]
            while not any(lane.is_blocked for lane in transfer._lanes.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            (sending,) = (s for s in service.channel.streams if not s.is_idle)
            assert isinstance(sending.port, TransportPort)
            assert sending.port._open_transport.get_write_buffer_size() <= 2 * limit
            stream.close()

    if loop == "asyncio":
        asyncio.run(run())
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())


async def test_a_certificate_of_a_stranger_is_refused(files, strangers):
    asker = ChannelSecurity(tls=asker_tls(files))
    async with channel(tls=peer_tls(strangers), asker=asker) as (service, client):
        with pytest.raises(TransferError, match="certificate"):
            await client.handshake(IDENTITY)
        with pytest.raises(TransferError, match="certificate"):
            await client.dial()
        assert service.asked is None


async def test_a_certificate_for_another_host_is_refused(files):
    tls = peer_tls(files, subject="elsewhere.example.com")
    async with channel(tls=tls, asker=ChannelSecurity(tls=asker_tls(files))) as (_, client):
        with pytest.raises(TransferError, match="certificate"):
            await client.handshake(IDENTITY)


@pytest.mark.parametrize("signed_by", ["nobody", "strangers"])
async def test_mutual_tls_lets_in_only_askers_of_its_authority(files, strangers, signed_by):
    tls = peer_tls(files, authority=files.authority)
    ours = asker_tls(files, strangers if signed_by == "strangers" else None)
    async with channel(tls=tls, asker=ChannelSecurity(tls=ours)) as (service, client):
        with pytest.raises(TransferError):
            await client.open(ASKED)
        assert service.asked is None


async def test_plain_text_is_refused_by_a_port_that_speaks_tls(files):
    async with channel(tls=peer_tls(files)) as (service, client):
        with pytest.raises(TransferError):
            await client.open(ASKED)
        assert service.asked is None


async def test_a_receiver_over_tls_that_does_not_read_loses_its_lease(files):
    asker = ChannelSecurity(tls=asker_tls(files))
    async with channel(0.3, tls=peer_tls(files), asker=asker) as (service, client):
        service.num_pages = 200
        async with client.pull(ASKED, Pages()) as pulling:
            for stream in pulling._carriers:
                stream.port.pause()
            assert await ended(service.transfers[ASKED.transfer_id]) == "expired"


async def test_a_stream_over_tls_that_is_left_is_noticed(files):
    asker = ChannelSecurity(tls=asker_tls(files))
    async with channel(0.8, tls=peer_tls(files), asker=asker) as (service, client):
        async with client.pull(ASKED, Pages()):
            pass
        assert await ended(service.transfers[ASKED.transfer_id]) == "expired"
