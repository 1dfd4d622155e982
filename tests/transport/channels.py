"""A prefill side that serves made-up pages, a client of it, and a consumer of what comes."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from aiohttp import web

from prfaas.clock import Clock, monotonic_s
from prfaas.transport.address import PeerAddress
from prfaas.transport.auth import PeerSide
from prfaas.transport.client import PeerClient
from prfaas.transport.flow import EgressBudget
from prfaas.transport.messages import (
    PeerStatus,
    TransferAccepted,
    TransferRequest,
    TransferTotals,
)
from prfaas.transport.options import TransportOptions
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.pieces import PagePlace
from prfaas.transport.pulling import Pulling
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.sending import outlive
from prfaas.transport.server import KvChannel
from prfaas.transport.transport_port import SLICE_BYTES
from prfaas.transport.wire import Frame, FrameHeader, FrameType
from tests.accepting import accept_no_more
from tests.transport.samples import ASKED, IDENTITY

OPTIONS = TransportOptions(connect_timeout_s=2.0, stall_timeout_s=2.0)
PAGE_BYTES = 3 * SLICE_BYTES + 11


class Service:
    """A TransferService whose pages are made of their block numbers."""

    def __init__(self, tasks: asyncio.TaskGroup, lease_s: float, page_bytes: int) -> None:
        self.channel: KvChannel
        self._tasks = tasks
        self._lease_s = lease_s
        self._page_bytes = page_bytes
        self.num_pages: int | None = None
        """Queued in every new transfer, and its end."""
        self.gate = asyncio.Event()
        """Requests are answered while it is set."""
        self.gate.set()
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
        await self.gate.wait()
        transfer = self.transfers[asked.transfer_id] = OutgoingTransfer(
            transfer_id=asked.transfer_id,
            page_view=lambda place: memoryview(bytes([place.block % 256]) * self._page_bytes),
            capability=asked.capability,
            credit_bytes=asked.credit_bytes,
            codec=asked.codec,
            deadline_s=asked.deadline_s,
        )
        if self.num_pages is not None:
            for block in range(self.num_pages):
                transfer.put_page(place(block))
            transfer.finish(tokens_computed=3)
        self._tasks.create_task(outlive(transfer, self._lease_s))
        return TransferAccepted(hit_tokens=16)

    def transfer(self, transfer_id: str) -> OutgoingTransfer | None:
        return self.transfers.get(transfer_id)

    def cancel(self, transfer_id: str) -> bool:
        transfer = self.transfers.get(transfer_id)
        if transfer is None or transfer.outcome is not None:
            return False
        transfer.close("cancelled")
        return True

    def count_sent(self, num_bytes: int) -> None:
        self.num_bytes_sent += num_bytes


@contextlib.asynccontextmanager
async def channel(
    lease_s: float = 5.0,
    *,
    gate: PeerSide | None = None,
    tls: ssl.SSLContext | None = None,
    asker: ChannelSecurity | None = None,
    page_bytes: int = PAGE_BYTES,
    budget: EgressBudget | None = None,
    clock: Clock = monotonic_s,
    via: Any = None,
    **options: Any,
) -> AsyncIterator[tuple[Service, PeerClient]]:
    """A served channel and a client of it, which keeps streams open.

    Args:
        via: a relay between the two, started and closed here.
    """
    async with asyncio.TaskGroup() as tasks:
        service = Service(tasks, lease_s, page_bytes)
        kv = service.channel = KvChannel(service, gate=gate, budget=budget, attach_wait_s=1.0)
        app = web.Application()
        app.add_routes(kv.routes())
        runner = web.AppRunner(app, shutdown_timeout=0.2, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        port = runner.addresses[0][1]
        if via is not None:
            await via.start(port)
            port = via.port
        client = PeerClient(
            PeerAddress("127.0.0.1", port), replace(OPTIONS, **options), security=asker, clock=clock
        )
        keeping = tasks.create_task(client.run())
        try:
            async with asyncio.timeout(30):
                yield service, client
        finally:
            for transfer in service.transfers.values():
                transfer.close("stopped")
            keeping.cancel()
            await client.close()
            kv.close()
            await accept_no_more(site._server)
            await runner.cleanup()
            if via is not None:
                await via.close()
            await asyncio.sleep(0.05)  # transports close their sockets some turns later


class Pages:
    """A FrameConsumer that keeps everything."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.pages: dict[int, bytearray] = {}
        self.frames: list[Frame] = []
        self.hit_tokens: int | None = None
        self.totals: TransferTotals | None = None

    @property
    def kinds(self) -> list[FrameType]:
        return [frame.header.type for frame in self.frames]

    def accepted(self, accepted: TransferAccepted) -> None:
        self.hit_tokens = accepted.hit_tokens

    def resolve(self, header: FrameHeader) -> memoryview:
        return memoryview(self.pages.setdefault(header.block, bytearray(self.page_bytes)))

    def take(self, frame: Frame) -> None:
        self.frames.append(frame)

    def ended(self, totals: TransferTotals) -> None:
        self.totals = totals

    def check(self, num_pages: int) -> None:
        """Every page came exactly once, with its bytes."""
        blocks = [f.header.block for f in self.frames if f.header.type is FrameType.PAGE]
        assert sorted(blocks) == list(range(num_pages))
        assert self.pages == {b: bytearray([b % 256]) * self.page_bytes for b in range(num_pages)}
        assert self.totals is not None
        assert self.totals.num_pages == num_pages


async def finish(pulling: Pulling) -> None:
    """Receive everything, and say so."""
    while not pulling.is_finished:
        await pulling.step()
    assert pulling.acknowledge()


async def pull_all(client: PeerClient, consumer: Pages, asked: TransferRequest = ASKED) -> Pulling:
    """Run a whole transfer."""
    async with client.pull(asked, consumer) as pulling:
        await finish(pulling)
    return pulling


async def warm(client: PeerClient, num_streams: int | None = None) -> None:
    """Return when so many streams are open; all of them by default."""
    client.streams.want()
    num_streams = client.streams.num_idle if num_streams is None else num_streams
    while client.streams.num_open < num_streams:  # noqa: ASYNC110  # it is about another end
        await asyncio.sleep(0.002)


async def ended(transfer: OutgoingTransfer) -> str | None:
    """Return the outcome once nobody reads the transfer's pages any more."""
    while not transfer.is_released:  # noqa: ASYNC110  # tests end a vain wait by their time-out
        await asyncio.sleep(0.002)
    return transfer.outcome


def place(block: int) -> PagePlace:
    return PagePlace(group=0, index=0, block=block, num_tokens=16)
