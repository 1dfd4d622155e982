"""Every fault at every kind of frame boundary: a transfer goes on, or ends with an error in bounded time.

What goes on is whole, was not sent again beyond one frame a stream, and leaves streams that are warm.
"""

from dataclasses import replace

import pytest

from prfaas.errors import TransferError
from prfaas.transport import sending
from prfaas.transport.client import PeerClient
from prfaas.transport.seals import CHECKSUM_BYTES, MAC_BYTES
from prfaas.transport.tcpinfo import parse_tcp_info
from prfaas.transport.wire import UNTAGGED_BYTES, FrameType
from tests.frame_scanner import TLS_DATA, Spot
from tests.relay import Fault, Relay, tag_bytes
from tests.transport.certificates import Certificates
from tests.transport.channels import Pages, Service, channel, ended, finish, warm
from tests.transport.guards import KEY, guarded
from tests.transport.samples import ASKED, IDENTITY, asked

pytestmark = pytest.mark.usefixtures("no_leaks")
PAGE_BYTES = 3000
NUM_PAGES = 24
RUN_PAGES = 5
STALL_S = 1.0
LEASE_S = 2.0
WHERE = ["before", "in_header", "behind_header", "in_payload", "behind"]
SPOTS = [
    *(Spot(FrameType.PAGE, where, skip) for where in WHERE for skip in (0, 7)),
    *(Spot(FrameType.END, where) for where in WHERE),
]
WORDS = [
    *(Spot(FrameType.ATTACH, where) for where in WHERE),
    *(Spot(FrameType.ACK, where) for where in ("before", "in_header", "behind")),
]
RECORDS = [Spot(TLS_DATA, where, skip) for where in WHERE for skip in (0, 3)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("tls"))


def relay_of(guard: str) -> Relay:
    return Relay(tag_bytes(KEY if guard == "key" else None))


def frame_bytes(guard: str) -> int:
    return UNTAGGED_BYTES + (MAC_BYTES if guard == "key" else CHECKSUM_BYTES) + PAGE_BYTES


async def pull_through(client: PeerClient, number: int) -> None:
    """Run a transfer to its end: every page must come, once."""
    request = asked(transfer_id=f"{number:032d}")
    held = Pages(PAGE_BYTES)
    async with client.pull(request, held) as pulling:
        while not pulling.is_finished:
            await pulling.step()
        has_said = pulling.acknowledge()
    if not has_said:
        await client.acknowledge(request)
    held.check(NUM_PAGES)


async def all_ended(service: Service, client: PeerClient) -> None:
    """Return once no transfer is under way, and what carried them is warm and in nobody's hands."""
    for transfer in service.transfers.values():
        # The word that ends a transfer may be what was lost, or damaged.
        assert await ended(transfer) in ("completed", "expired")
        transfer.check()
    await warm(client)
    assert all(stream.is_idle for stream in service.channel.streams)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "flip", "half_close", "twice", "again", "delay", "hold"])
@pytest.mark.parametrize(("guard", "num_streams"), [("open", 1), ("key", 3), ("tls", 2)])
async def test_a_fault_at_any_place_of_what_is_sent_costs_at_most_a_frame_a_stream(
    guard, kind, num_streams, files
):
    relay = relay_of(guard)
    settings = guarded(guard, files)
    async with channel(
        LEASE_S, via=relay, page_bytes=PAGE_BYTES, streams=num_streams, **settings
    ) as (service, client):
        await client.handshake(IDENTITY)
        relay.is_opaque = guard == "tls"
        service.num_pages = NUM_PAGES
        number = 0
        for spot in RECORDS if guard == "tls" else SPOTS:
            if kind in ("flip", "twice", "again") and spot.where == "behind":
                continue  # that is before the next
            await warm(client)
            before, relay.fault = relay.page_bytes, Fault(0, kind, spot, seconds=0.01)
            await pull_through(client, number)
            await relay.hurt()
            number += 1
            if guard != "tls" and kind not in (
                "flip",
                "twice",
                "again",
            ):  # what is behind them is not verified
                again = relay.page_bytes - before - NUM_PAGES * frame_bytes(guard)
                assert again <= num_streams * frame_bytes(guard), spot
        relay.fault = None
        await all_ended(service, client)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams whose speed is known at once: one page, then runs of RUN_PAGES."""
    info = parse_tcp_info(bytes(256))
    assert info is not None
    fast = replace(info, delivery_rate_bytes_per_s=RUN_PAGES * PAGE_BYTES / sending.RUN_S)
    monkeypatch.setattr(sending, "read_tcp_info", lambda sock: fast)
    monkeypatch.setattr(sending, "LOOK_S", 0.0)
    monkeypatch.setattr(sending, "BATCH_BYTES", PAGE_BYTES)


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("kind", ["cut", "flip", "half_close", "twice", "again"])
async def test_a_fault_at_any_place_of_a_run_costs_at_most_a_run_a_stream(kind, files):
    guard, num_streams = "key", 2
    relay = relay_of(guard)
    run_bytes = frame_bytes(guard) + (RUN_PAGES - 1) * PAGE_BYTES + RUN_PAGES * 16 + 4
    async with channel(
        LEASE_S, via=relay, page_bytes=PAGE_BYTES, streams=num_streams, **guarded(guard, files)
    ) as (service, client):
        await client.handshake(IDENTITY)
        service.num_pages = NUM_PAGES
        for number, where in enumerate(WHERE[:-1]):
            await warm(client)
            before = relay.page_bytes
            relay.fault = Fault(0, kind, Spot(FrameType.PAGES, where, skip=1))
            await pull_through(client, number)
            await relay.hurt()
            if kind in ("cut", "half_close"):  # what is behind the others is not verified
                again = relay.page_bytes - before - NUM_PAGES * frame_bytes(guard)
                assert again <= num_streams * run_bytes, where
        relay.fault = None
        await all_ended(service, client)


@pytest.mark.parametrize("kind", ["cut", "flip", "half_close", "again", "delay"])
@pytest.mark.parametrize("guard", ["open", "key"])
async def test_a_fault_at_any_place_of_the_askers_words_loses_no_page(guard, kind, files):
    relay = relay_of(guard)
    async with channel(
        LEASE_S,
        via=relay,
        page_bytes=PAGE_BYTES,
        streams=2,
        stall_timeout_s=STALL_S,
        **guarded(guard, files),
    ) as (service, client):
        await client.handshake(IDENTITY)
        service.num_pages = NUM_PAGES
        for number, spot in enumerate(WORDS):
            await warm(client)
            relay.fault = Fault(0, kind, spot, direction="up", seconds=0.01)
            await pull_through(client, number)
            await relay.hurt()
        relay.fault = None
        await all_ended(service, client)


@pytest.mark.parametrize("kind", ["cut", "flip", "half_close", "twice", "again"])
@pytest.mark.parametrize("guard", ["open", "key"])
async def test_a_fault_at_the_word_of_a_loss_costs_one_connection_more(guard, kind, files):
    """The word goes over a stream that carries pages: nothing but it may be lost with that stream."""
    relay = relay_of(guard)
    async with channel(
        LEASE_S, via=relay, page_bytes=PAGE_BYTES, streams=3, **guarded(guard, files)
    ) as (service, client):
        await client.handshake(IDENTITY)
        service.num_pages = NUM_PAGES
        for number, where in enumerate(("in_header", "in_payload")):
            client.streams.num_idle = 3
            await warm(client)
            word = Fault(0, kind, Spot(FrameType.ATTACH, where), direction="up")
            relay.fault = Fault(0, "cut", Spot(FrameType.PAGE, "in_payload", 1), then=word)
            request, held = asked(transfer_id=f"{number:032d}"), Pages(PAGE_BYTES)
            async with client.pull(request, held) as pulling:
                client.streams.num_idle = 0  # no spare one is at hand
                await finish(pulling)
                await relay.hurt()
                assert pulling.num_streams_lost == 2
            held.check(NUM_PAGES)
            assert await ended(service.transfers[request.transfer_id]) == "completed"


@pytest.mark.parametrize("kind", ["black_hole", "gone"])
@pytest.mark.parametrize("guard", ["open", "key"])
async def test_what_cannot_go_on_ends_in_bounded_time_and_the_next_transfer_is_whole(
    guard, kind, files
):
    relay = relay_of(guard)
    async with channel(
        LEASE_S,
        via=relay,
        page_bytes=PAGE_BYTES,
        streams=2,
        stall_timeout_s=0.3,
        **guarded(guard, files),
    ) as (service, client):
        await client.handshake(IDENTITY)
        service.num_pages = NUM_PAGES
        await warm(client)
        relay.fault = Fault(0, kind, Spot(FrameType.PAGE, "before", 5))
        held = Pages(PAGE_BYTES)
        error: Exception | None = None
        try:
            async with client.pull(ASKED, held) as pulling:
                await finish(pulling)
        except TransferError as failure:
            error = failure
            await client.cancel(ASKED.transfer_id)
        assert error is not None
        await ended(service.transfers[ASKED.transfer_id])
        relay.fault = None
        relay.cut_streams()
        await client.handshake(IDENTITY)
        await warm(client)
        await pull_through(client, 1)


@pytest.mark.slow
async def test_a_stream_that_is_slow_carries_less_and_holds_nobody_up():
    relay = Relay()
    page_bytes, num_pages = 50_000, 200
    async with channel(via=relay, page_bytes=page_bytes, streams=2, stall_timeout_s=20.0) as (
        service,
        client,
    ):
        relay.receive_buffer_bytes = 1 << 14
        await warm(client)
        service.num_pages = num_pages
        relay.fault = Fault(0, "slow", Spot(FrameType.PAGE, "before"))
        held = Pages(page_bytes)
        async with client.pull(ASKED, held) as pulling:
            carriers = tuple(pulling._carriers)
            await finish(pulling)
        held.check(num_pages)
        shares = sorted(stream.num_bytes for stream in carriers)
        assert shares[0] < shares[1] / 2
