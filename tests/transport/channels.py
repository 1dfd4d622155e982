"""A prefill side that serves made-up pages, and a client of it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from aiohttp import web

from prfaas.transport.address import PeerAddress
from prfaas.transport.auth import PeerSide
from prfaas.transport.client import PeerClient
from prfaas.transport.messages import PeerStatus, TransferAccepted, TransferRequest
from prfaas.transport.options import TransportOptions
from prfaas.transport.outgoing import OutgoingTransfer, PagePlace
from prfaas.transport.ports import SLICE_BYTES
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.server import routes
from prfaas.transport.wire import FrameHeader
from tests.transport.samples import CAPABILITY, IDENTITY

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
            capability=CAPABILITY,
            codec=asked.codec,
        )
        return TransferAccepted(hit_tokens=16, capability=CAPABILITY)

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
async def channel(
    lease_s: float = 5.0,
    *,
    gate: PeerSide | None = None,
    tls: ssl.SSLContext | None = None,
    asker: ChannelSecurity | None = None,
) -> AsyncIterator[tuple[Service, PeerClient]]:
    service = Service()
    app = web.Application()
    app.add_routes(routes(service, lease_s=lease_s, gate=gate))
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    client = PeerClient(PeerAddress("127.0.0.1", runner.addresses[0][1]), OPTIONS, security=asker)
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
