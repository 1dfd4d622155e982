"""The prefill side of the KV channel: HTTP routes for control, an upgraded raw socket for bulk.

    POST   /kv/v1/handshake               who are you, and how busy
    POST   /kv/v1/transfers               compute this prompt and keep its KV for me
    GET    /kv/v1/transfers/{id}/stream   Upgrade: prfaas-kv, then frames
    DELETE /kv/v1/transfers/{id}          I no longer want it

A transfer is leased. The lease runs while the receiver owes something: to open the stream, to read
what was sent, to acknowledge the end. Every bit of progress renews it, and while there is nothing to
send it stands still. When it expires the stream is closed and the pages are let go.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from prfaas.errors import (
    BadRequest,
    ConfigError,
    IncompatiblePeer,
    Overloaded,
    ProtocolError,
)
from prfaas.transport.client import UPGRADE, YIELD_BYTES
from prfaas.transport.handshake import parse_identity
from prfaas.transport.messages import (
    PeerStatus,
    TransferAccepted,
    TransferRequest,
    dump,
    encode_accepted,
    encode_status,
    parse_object,
    parse_transfer_request,
)
from prfaas.transport.outgoing import OutgoingTransfer, Piece
from prfaas.transport.wire import FROM_RECEIVER, FrameDecoder, refuse_pages

BODY_TIMEOUT_S = 30.0
_SWITCHING = (
    f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n"
).encode("ascii")
SLICE_BYTES = 256 << 10
"""The receiver renews the lease at least once per this many bytes."""


class TransferService(Protocol):
    """What the routes ask of the prefill node."""

    def status(self) -> PeerStatus:
        """Return who this node is and how busy."""
        ...

    async def open(self, asked: TransferRequest) -> TransferAccepted:
        """Reserve pages and queue the prompt.

        Raises IncompatiblePeer, BadRequest or Overloaded, and then holds nothing.
        """
        ...

    def transfer(self, transfer_id: str) -> OutgoingTransfer | None:
        """Return a transfer that can be streamed, or None."""
        ...

    def cancel(self, transfer_id: str) -> bool:
        """End a transfer; False if there is none of this id."""
        ...

    def count_sent(self, num_bytes: int) -> None:
        """Take note of page bytes that the receiver's side has taken."""
        ...


def check_bind(host: str, *, allow_plaintext: bool) -> None:
    """Raise ConfigError if the KV channel would leave loopback unencrypted without leave to."""
    if allow_plaintext or _is_loopback(host):
        return
    raise ConfigError(
        f"the KV channel is not encrypted and http.host = {host!r} is not loopback; "
        "pass --allow-plaintext if every network between the nodes is trusted"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def routes(service: TransferService, *, lease_s: float) -> list[web.RouteDef]:
    """Return the routes of the KV channel, to be mounted on the node's HTTP port."""
    handlers = _Handlers(service, lease_s)
    return [
        web.post("/kv/v1/handshake", handlers.handshake),
        web.post("/kv/v1/transfers", handlers.open),
        web.get("/kv/v1/transfers/{transfer_id}/stream", handlers.stream, allow_head=False),
        web.delete("/kv/v1/transfers/{transfer_id}", handlers.cancel),
    ]


class _Handlers:
    def __init__(self, service: TransferService, lease_s: float) -> None:
        self._service = service
        self._lease_s = lease_s

    async def handshake(self, request: web.Request) -> web.Response:
        try:
            parse_identity(parse_object(await _read(request)).get("identity"))
        except ProtocolError as error:
            return _refuse(400, str(error))
        except TimeoutError:
            return _refuse(408, f"no whole body within {BODY_TIMEOUT_S} s")
        return _json(200, encode_status(self._service.status()))

    async def open(self, request: web.Request) -> web.Response:
        try:
            asked = parse_transfer_request(await _read(request))
            return _json(201, encode_accepted(await self._service.open(asked)))
        except IncompatiblePeer as error:
            return _refuse(409, str(error))
        except ProtocolError as error:
            return _refuse(400, str(error))
        except BadRequest as error:
            return _refuse(422, str(error))  # 400 is for messages that we do not understand
        except Overloaded as error:
            return _refuse(503, str(error), {"Retry-After": f"{error.retry_after_s:g}"})
        except TimeoutError:
            return _refuse(408, f"no whole body within {BODY_TIMEOUT_S} s")

    async def cancel(self, request: web.Request) -> web.Response:
        if self._service.cancel(request.match_info["transfer_id"]):
            return web.Response(status=204)
        return _refuse(404, "no such transfer")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() != UPGRADE:
            return _refuse(426, f"this resource needs Upgrade: {UPGRADE}", {"Upgrade": UPGRADE})
        transfer = self._service.transfer(request.match_info["transfer_id"])
        if transfer is None:
            return _refuse(404, "no such transfer")
        if not transfer.try_attach():
            return _refuse(409, "the transfer has a stream already")
        try:
            await self._serve(request, transfer)
        finally:
            transfer.detach()
        return web.Response()  # goes nowhere: the connection is closed

    async def _serve(self, request: web.Request, transfer: OutgoingTransfer) -> None:
        transport = request.transport
        if transport is None or transport.get_write_buffer_size():
            return  # gone, or pipelined behind an answer that is not sent yet
        sock = _take_socket(transport)
        try:
            # Not force_close(): it closes the transport, which cancels this handler where the server
            # runs with handler_cancellation.
            await serve_stream(sock, transfer, self._lease_s, self._service.count_sent)
        finally:
            sock.close()
            transport.abort()


def _take_socket(transport: asyncio.Transport) -> socket.socket:
    """Return the connection as a socket of our own.

    The transport stops reading before the receiver hears that it may talk, or it would take the
    receiver's first bytes. The 101 goes through our socket: a transport may hold it back (uvloop
    does, to the end of the loop's turn), and a frame would overtake it.
    """
    transport.pause_reading()
    sock: socket.socket = transport.get_extra_info("socket").dup()
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


async def serve_stream(
    sock: socket.socket,
    transfer: OutgoingTransfer,
    lease_s: float,
    count_sent: Callable[[int], None],
) -> None:
    """Answer the upgrade and send frames until the transfer ends; leaves the socket open."""
    async with asyncio.TaskGroup() as tasks:
        jobs = [
            tasks.create_task(_send(sock, transfer, lease_s, count_sent)),
            tasks.create_task(_listen(sock, transfer)),
            tasks.create_task(transfer.closed()),
        ]
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        for job in jobs:
            job.cancel()


async def _send(
    sock: socket.socket,
    transfer: OutgoingTransfer,
    lease_s: float,
    count_sent: Callable[[int], None],
) -> None:
    try:
        await _send_piece(sock, Piece(header=_SWITCHING), lease_s)
        num_unyielded_bytes = 0
        while (piece := await transfer.next_piece()) is not None:
            await _send_piece(sock, piece, lease_s)
            if piece.is_page:
                count_sent(len(piece.payload))
            num_unyielded_bytes += len(piece.payload)
            if num_unyielded_bytes > YIELD_BYTES:
                num_unyielded_bytes = 0
                await asyncio.sleep(0)
        async with asyncio.timeout(lease_s):
            await transfer.closed()
    except TimeoutError:
        transfer.close("expired")
    except OSError:
        transfer.close("broken")


async def _send_piece(sock: socket.socket, piece: Piece, lease_s: float) -> None:
    """Write one frame; TimeoutError if the receiver takes no part of it for `lease_s`."""
    try:
        num_sent = sock.sendmsg([piece.header, piece.payload])
    except BlockingIOError:
        num_sent = 0
    # What the socket does not take at once, which is most of it on a slow link, waits with a timer.
    for part in (memoryview(piece.header), memoryview(piece.payload)):
        rest = part[num_sent:]
        num_sent = max(0, num_sent - len(part))
        for start in range(0, len(rest), SLICE_BYTES):
            async with asyncio.timeout(lease_s):
                await asyncio.get_running_loop().sock_sendall(
                    sock, rest[start : start + SLICE_BYTES]
                )


async def _listen(sock: socket.socket, transfer: OutgoingTransfer) -> None:
    """Wait for the receiver's ACK, or for its leaving."""
    loop = asyncio.get_running_loop()
    decoder = FrameDecoder(allowed=FROM_RECEIVER, resolve=refuse_pages)
    try:
        while num_bytes := await loop.sock_recv_into(sock, decoder.buffer()):
            if decoder.received(num_bytes) is not None:
                transfer.acknowledge()
                return
        transfer.close("cancelled")
    except ProtocolError:
        transfer.close("protocol_error")
    except OSError:
        transfer.close("broken")


async def _read(request: web.Request) -> bytes:
    async with asyncio.timeout(BODY_TIMEOUT_S):
        return await request.read()


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _refuse(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return _json(status, dump({"error": error}), headers)
