"""The sending end of a transfer's stream: takes over the connection and feeds it with frames."""

import asyncio
import socket
from collections.abc import Callable

from prfaas.errors import ProtocolError
from prfaas.transport.coding import PageEncoder
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.ports import SocketPort, StreamPort, TransportPort
from prfaas.transport.seals import CHECKSUM, FrameSeal
from prfaas.transport.stream import UPGRADE, YIELD_BYTES
from prfaas.transport.wire import FROM_RECEIVER, FrameDecoder, refuse_pages

_SWITCHING = (
    f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n"
).encode("ascii")


def take_port(transport: asyncio.Transport) -> StreamPort:
    """Return the connection of an HTTP request as a port of our own.

    The transport stops reading before the receiver hears that it may talk, or it would take the
    receiver's first bytes. Without TLS we go on with a socket of our own, and the 101 through it: a
    transport may hold it back (uvloop does, to the end of the loop's turn), and a frame would
    overtake it.
    """
    if transport.get_extra_info("sslcontext") is not None:
        port = TransportPort(on_lost=transport.get_protocol())
        port.take(transport)
        return port
    transport.pause_reading()
    sock: socket.socket = transport.get_extra_info("socket").dup()
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return SocketPort(sock)


async def serve_stream(
    port: StreamPort,
    transfer: OutgoingTransfer,
    lease_s: float,
    count_sent: Callable[[int], None],
    receiver_seal: FrameSeal = CHECKSUM,
) -> None:
    """Answer the upgrade and send frames until the transfer ends; leaves the port open."""
    async with asyncio.TaskGroup() as tasks:
        jobs = [
            tasks.create_task(_send(port, transfer, lease_s, count_sent)),
            tasks.create_task(_listen(port, transfer, receiver_seal)),
            tasks.create_task(transfer.closed()),
        ]
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        for job in jobs:
            job.cancel()


async def _send(
    port: StreamPort,
    transfer: OutgoingTransfer,
    lease_s: float,
    count_sent: Callable[[int], None],
) -> None:
    try:
        await port.send(_SWITCHING, b"", lease_s)
        with PageEncoder(transfer.codec, transfer.numbers) as encoder:
            await _send_pieces(port, transfer, encoder, lease_s, count_sent)
        async with asyncio.timeout(lease_s):
            await transfer.closed()
    except TimeoutError:
        transfer.close("expired")
    except OSError:
        transfer.close("broken")


async def _send_pieces(
    port: StreamPort,
    transfer: OutgoingTransfer,
    encoder: PageEncoder,
    lease_s: float,
    count_sent: Callable[[int], None],
) -> None:
    loop = asyncio.get_running_loop()
    num_unyielded_bytes = 0
    while (piece := await transfer.next_piece(encoder.encode)) is not None:
        started_s = loop.time()
        await port.send(piece.header, piece.payload, lease_s)
        if piece.is_page:
            encoder.sent(len(piece.payload), loop.time() - started_s)
            count_sent(len(piece.payload))
        num_unyielded_bytes += len(piece.payload)
        if num_unyielded_bytes > YIELD_BYTES:
            num_unyielded_bytes = 0
            await asyncio.sleep(0)


async def _listen(port: StreamPort, transfer: OutgoingTransfer, receiver_seal: FrameSeal) -> None:
    """Wait for the receiver's ACK, or for its leaving."""
    decoder = FrameDecoder(allowed=FROM_RECEIVER, resolve=refuse_pages, seal=receiver_seal)
    try:
        while num_bytes := await port.receive(decoder.buffer()):
            if decoder.received(num_bytes) is not None:
                transfer.acknowledge()
                return
        transfer.close("cancelled")
    except ProtocolError:
        transfer.close("protocol_error")
    except OSError:
        transfer.close("broken")
