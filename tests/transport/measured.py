"""A served channel that is there to be measured, a client of it, and a consumer of made-up pages."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from prfaas.transport.address import PeerAddress
from prfaas.transport.auth import PeerSide
from prfaas.transport.client import PeerClient
from prfaas.transport.measure_routes import MeasureRoutes
from prfaas.transport.measuring import Measurements
from prfaas.transport.messages import TransferAccepted, TransferTotals
from prfaas.transport.options import TransportOptions
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.server import KvChannel
from prfaas.transport.wire import Frame, FrameHeader
from tests.transport.channels import Service

PAGE_BYTES = 64 << 10


class Sink:
    """A FrameConsumer that keeps the pages."""

    def __init__(self) -> None:
        self.pages: dict[int, bytearray] = {}
        self.totals: TransferTotals | None = None

    def accepted(self, accepted: TransferAccepted) -> None:
        assert accepted.hit_tokens == 0

    def resolve(self, header: FrameHeader) -> memoryview:
        return memoryview(self.pages.setdefault(header.block, bytearray(PAGE_BYTES)))

    def take(self, frame: Frame) -> None:
        assert frame.is_placed

    def ended(self, totals: TransferTotals) -> None:
        self.totals = totals


class OnePage(Sink):
    """Keeps only the page that came last: enough where one stream brings them."""

    def resolve(self, header: FrameHeader) -> memoryview:
        return memoryview(self.pages.setdefault(0, bytearray(PAGE_BYTES)))


class MeasuredService(Service):
    """A service of no transfers but measurements."""

    measurements: Measurements

    def transfer(self, transfer_id: str) -> OutgoingTransfer | None:
        return self.measurements.transfer(transfer_id)

    def cancel(self, transfer_id: str) -> bool:
        return self.measurements.cancel(transfer_id)


@contextlib.asynccontextmanager
async def measured_node(
    *, gate: PeerSide | None = None, asker: ChannelSecurity | None = None
) -> AsyncIterator[tuple[MeasuredService, PeerClient]]:
    async with asyncio.TaskGroup() as tasks:
        service = MeasuredService(tasks, 5.0, PAGE_BYTES)
        service.measurements = Measurements("float32")
        kv = service.channel = KvChannel(service, gate=gate, attach_wait_s=1.0)
        app = web.Application()
        app.add_routes([*kv.routes(), *MeasureRoutes(kv, service.measurements).routes()])
        runner = web.AppRunner(app, shutdown_timeout=0.2, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = PeerClient(
            PeerAddress("127.0.0.1", runner.addresses[0][1]),
            TransportOptions(streams=2),
            security=asker,
        )
        keeping = tasks.create_task(client.streams.keep())
        try:
            async with asyncio.timeout(30):
                yield service, client
        finally:
            keeping.cancel()
            await client.close()
            service.measurements.close()
            kv.close()
            await runner.cleanup()
            await asyncio.sleep(0.05)
