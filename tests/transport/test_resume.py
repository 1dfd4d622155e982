"""Streams that break, lie or fall silent in the middle of a transfer: what arrived is not sent again."""

import asyncio
import contextlib
from itertools import product

import pytest

from prfaas.errors import TransferError, TransferTimeout
from prfaas.transport.wire import HEADER_BYTES, FrameType
from tests.relay import Fault, Relay, tag_bytes
from tests.transport.certificates import Certificates
from tests.transport.channels import Pages, channel, ended, finish, place, warm
from tests.transport.guards import KEY, guarded
from tests.transport.samples import ASKED, IDENTITY

pytestmark = pytest.mark.usefixtures("no_leaks")
PAGE_BYTES = 3000
NUM_PAGES = 60
FRAME_BYTES = HEADER_BYTES + PAGE_BYTES


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("tls"))


EVERYWHERE = [0, 1, HEADER_BYTES, HEADER_BYTES + 1, FRAME_BYTES, 7 * FRAME_BYTES + 11]
SOMEWHERE = [1, 9 * FRAME_BYTES + 50]


@pytest.mark.parametrize(
    ("guard", "after_bytes", "kind", "num_streams"),
    [
        *product(["open"], EVERYWHERE, ["cut", "flip", "half_close", "twice"], [1, 3]),
        *product(["key", "tls"], SOMEWHERE, ["cut", "flip"], [3]),
    ],
)
async def test_a_transfer_goes_on_where_it_broke(num_streams, kind, guard, after_bytes, files):
    relay = Relay(tag_bytes(KEY if guard == "key" else None))
    async with channel(
        via=relay, page_bytes=PAGE_BYTES, streams=num_streams, **guarded(guard, files)
    ) as (service, client):
        await client.handshake(IDENTITY)
        relay.is_opaque = guard == "tls"
        await warm(client)
        service.num_pages = NUM_PAGES
        relay.fault = Fault(after_bytes, kind)
        held = Pages(PAGE_BYTES)
        async with client.pull(ASKED, held) as pulling:
            await finish(pulling)
            await relay.hurt()
        assert await ended(service.transfers[ASKED.transfer_id]) == "completed"
        held.check(NUM_PAGES)


async def test_at_most_what_was_under_way_is_sent_again():
    relay = Relay()
    async with channel(via=relay, page_bytes=PAGE_BYTES, streams=1) as (service, client):
        await warm(client)
        held = Pages(PAGE_BYTES)
        async with client.pull(ASKED, held) as pulling:
            transfer = service.transfers[ASKED.transfer_id]
            for block in range(NUM_PAGES):
                transfer.put_page(place(block))
            while len(held.frames) < NUM_PAGES:
                await pulling.step()
            relay.cut_streams()
            transfer.put_page(place(NUM_PAGES))
            transfer.finish(tokens_computed=0)
            sent_bytes = service.num_bytes_sent
            await finish(pulling)
            assert pulling.num_streams_lost >= 1
        held.check(NUM_PAGES + 1)
        assert service.num_bytes_sent <= sent_bytes + 2 * PAGE_BYTES


async def test_all_streams_lost_again_and_again_only_delay_a_transfer():
    relay = Relay()
    async with channel(via=relay, page_bytes=PAGE_BYTES, streams=3) as (service, client):
        await warm(client)
        held = Pages(PAGE_BYTES)
        async with client.pull(ASKED, held) as pulling:
            transfer = service.transfers[ASKED.transfer_id]
            for block in range(NUM_PAGES):
                transfer.put_page(place(block))
                if block % 10 == 9:
                    while len(held.frames) < block:
                        await pulling.step()
                    relay.cut_streams()
            transfer.put_urgent(FrameType.LOGITS, b"x")
            transfer.finish(tokens_computed=0)
            await finish(pulling)
        assert held.kinds.count(FrameType.LOGITS) == 1
        assert await ended(transfer) == "completed"


async def test_a_stream_that_swallows_its_last_pages_is_given_up_alone():
    relay = Relay()
    async with channel(via=relay, page_bytes=PAGE_BYTES, streams=2, stall_timeout_s=1.0) as (
        service,
        client,
    ):
        await warm(client)
        relay.fault = Fault(20 * FRAME_BYTES, "swallow")
        held = Pages(PAGE_BYTES)
        async with client.pull(ASKED, held) as pulling:
            transfer = service.transfers[ASKED.transfer_id]
            for block in range(NUM_PAGES):
                transfer.put_page(place(block))
            transfer.finish(tokens_computed=0)
            await finish(pulling)
            assert pulling.num_streams_lost == 1
        held.check(NUM_PAGES)


async def test_a_link_that_is_gone_ends_the_transfer_within_the_stall_timeout():
    relay = Relay()
    async with channel(via=relay, page_bytes=PAGE_BYTES, streams=2, stall_timeout_s=0.4) as (
        service,
        client,
    ):
        await warm(client)
        service.num_pages = NUM_PAGES
        relay.fault = Fault(20 * FRAME_BYTES, "gone")
        held = Pages(PAGE_BYTES)
        async with client.pull(ASKED, held) as pulling:
            with pytest.raises(TransferError):
                await finish(pulling)
        assert 0 < len(held.frames) < NUM_PAGES


async def test_a_link_that_swallows_everything_is_a_timeout():
    relay = Relay()
    async with channel(via=relay, page_bytes=PAGE_BYTES, streams=2, stall_timeout_s=0.4) as (
        service,
        client,
    ):
        await warm(client)
        service.num_pages = NUM_PAGES
        relay.fault = Fault(20 * FRAME_BYTES, "black_hole")
        async with client.pull(ASKED, Pages(PAGE_BYTES)) as pulling:
            with pytest.raises(TransferTimeout):
                await finish(pulling)


async def test_a_peer_that_breaks_every_stream_at_once_is_given_up():
    relay = Relay()
    async with (
        channel(via=relay, page_bytes=PAGE_BYTES, streams=1) as (_, client),
        client.pull(ASKED, Pages(PAGE_BYTES)) as pulling,
        asyncio.TaskGroup() as tasks,
    ):
        cutting = tasks.create_task(cut_always(relay))
        with pytest.raises(TransferError):
            await finish(pulling)
        cutting.cancel()


async def cut_always(relay: Relay) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            relay.cut_streams()
            await asyncio.sleep(0)
