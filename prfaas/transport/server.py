"""The prefill side of the KV channel: HTTP routes for control, upgraded raw streams for bulk.

POST   /kv/v1/hello, /kv/v1/session   prove that we both have the cluster key (see auth)
POST   /kv/v1/handshake               who are you, and how busy
GET    /kv/v1/stream                  Upgrade: prfaas-kv, then ATTACH and frames, again and again
GET    /kv/v1/frames                  the same frames of one transfer as a chunked body
POST   /kv/v1/transfers               compute this prompt and keep its KV for me
POST   /kv/v1/transfers/{id}/ack      everything is verified, and no stream is left to say so
DELETE /kv/v1/transfers/{id}          I no longer want it
"""

import asyncio
import base64
import resource
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from prfaas.errors import (
    Overloaded,
    ProtocolError,
    TransferError,
    UntrustedPeer,
)
from prfaas.transport.accepting import take_port
from prfaas.transport.answers import REFUSALS, proven, read_body, refusal, refuse
from prfaas.transport.attach import parse_attach
from prfaas.transport.auth import Caller, PeerSide, is_same
from prfaas.transport.client import (
    ATTACH_HEADER,
    FRAMES_PATH,
    STREAM_HEADER,
    STREAM_PATH,
)
from prfaas.transport.decoder import FrameDecoder
from prfaas.transport.dialing import UPGRADE
from prfaas.transport.expected import ATTACH_WAIT_S, ExpectedTransfers
from prfaas.transport.fields import parse_object
from prfaas.transport.flow import EgressBudget
from prfaas.transport.gate import Gate
from prfaas.transport.handshake import parse_identity
from prfaas.transport.http_sending import send_frames
from prfaas.transport.messages import (
    PeerStatus,
    TransferAccepted,
    TransferRequest,
    capability_of,
    encode_accepted,
    encode_status,
    parse_transfer_request,
)
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.ports import StreamPort
from prfaas.transport.seals import FrameSeal
from prfaas.transport.sending import SendingStream
from prfaas.transport.stream_seals import StreamSeals, stream_seals
from prfaas.transport.wire import FrameType, refuse_pages

MAX_OPEN_STREAMS = 512
FILES_FRACTION = 0.25
"""Of the files that the process may open: so many streams, two files each, at most."""


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
        """Return a transfer that streams can be attached to, or None."""
        ...

    def cancel(self, transfer_id: str) -> bool:
        """End a transfer; False if there is none of this id."""
        ...

    def count_sent(self, num_bytes: int) -> None:
        """Take note of page bytes that the receiver's side has taken."""
        ...


class KvChannel:
    """The routes of the KV channel, to be mounted on the node's HTTP port, and the streams they open.

    With a gate nobody gets through who has not proven to it that they hold the cluster key.

    Args:
        attach_wait_s: a stream may be attached so long before its transfer is asked for.
        budget: what all transfers together may send; no stream is paced faster.
        congestion: names the congestion control of the streams; None leaves the system's.
        max_streams: open at once, idle or not; beyond them an upgrade is answered with 503.
    """

    def __init__(
        self,
        service: TransferService,
        *,
        gate: PeerSide | None = None,
        budget: EgressBudget | None = None,
        congestion: str | None = None,
        attach_wait_s: float = ATTACH_WAIT_S,
        max_streams: int | None = None,
    ) -> None:
        self.streams: set[SendingStream] = set()
        """Open ones, idle or not."""
        self._service = service
        self.gate = Gate(gate)
        self._budget = budget or EgressBudget(None, 1)
        self._congestion = congestion
        self._max_streams = _max_open_streams() if max_streams is None else max_streams
        self._expected = ExpectedTransfers(service.transfer, wait_s=attach_wait_s)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        transfer = "/kv/v1/transfers/{transfer_id}"
        return [
            *self.gate.routes(),
            web.post("/kv/v1/handshake", self.handshake),
            web.get(STREAM_PATH, self.stream, allow_head=False),
            web.get(FRAMES_PATH, self.frames, allow_head=False),
            web.post("/kv/v1/transfers", self.open),
            web.post(f"{transfer}/ack", self.acknowledge),
            web.delete(transfer, self.cancel),
        ]

    def settle(self, transfer_id: str) -> None:
        """Let go of streams that wait for a transfer: it was opened, or refused."""
        self._expected.settle(transfer_id)

    def open_ports(self) -> list[tuple[str, StreamPort]]:
        """Return the connection of every stream with the host of its asker."""
        return [(stream.asker, stream.port) for stream in self.streams]

    def close(self) -> None:
        """Close every stream."""
        self._expected.close()
        for stream in self.streams:
            stream.close()

    def caller(self, request: web.Request, body: bytes) -> Caller | None:
        """Return who asks, None where anybody may; raises UntrustedPeer."""
        return self.gate.caller(request, body)

    # ------------------------------------------------------------ what it wants

    async def handshake(self, request: web.Request) -> web.Response:
        """Say who this node is and how busy."""
        try:
            body = await read_body(request)
            caller = self.caller(request, body)
            parse_identity(parse_object(body).get("identity"))
        except (ProtocolError, UntrustedPeer, TimeoutError) as error:
            return refusal(error)
        return proven(200, encode_status(self._service.status()), caller)

    async def open(self, request: web.Request) -> web.Response:
        """Open a transfer; streams that were attached to it before begin to send."""
        try:
            body = await read_body(request)
            caller = self.caller(request, body)
            asked = parse_transfer_request(body)
            try:
                accepted = await self._service.open(asked)
            finally:
                self._expected.settle(asked.transfer_id)
            return proven(201, encode_accepted(accepted), caller)
        except REFUSALS as error:
            return refusal(error)

    async def acknowledge(self, request: web.Request) -> web.Response:
        """End a transfer whose every frame is verified."""
        try:
            body = await read_body(request)
            caller = self.caller(request, body)
            capability = capability_of(parse_object(body))
        except (ProtocolError, TimeoutError, UntrustedPeer) as error:
            return refusal(error)
        transfer = self._service.transfer(request.match_info["transfer_id"])
        if transfer is None:
            return refuse(404, "no such transfer")
        if not is_same(transfer.capability, capability):
            return refuse(403, "the transfer was promised to somebody else")
        transfer.acknowledge()
        return proven(200, b"{}", caller)

    async def cancel(self, request: web.Request) -> web.Response:
        """Drop a transfer."""
        try:
            self.caller(request, b"")
        except UntrustedPeer as error:
            return refusal(error)
        if self._service.cancel(request.match_info["transfer_id"]):
            return web.Response(status=204)
        return refuse(404, "no such transfer")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Make a raw stream of the connection, and serve transfers over it."""
        if request.headers.get("Upgrade", "").lower() != UPGRADE:
            return refuse(426, f"this resource needs Upgrade: {UPGRADE}", {"Upgrade": UPGRADE})
        stream_id = request.headers.get(STREAM_HEADER, "")
        try:
            caller = self.caller(request, stream_id.encode("utf-8", "surrogateescape"))
        except UntrustedPeer as error:
            return refusal(error)
        if len(self.streams) >= self._max_streams:
            return refusal(Overloaded(f"{len(self.streams)} streams are open, limit is as many"))
        transport = request.transport
        if transport is not None and not transport.get_write_buffer_size():
            # else gone, or pipelined behind an answer that is not sent yet
            await self._serve(request, transport, _seals(request, stream_id, caller))
        return web.Response()  # goes nowhere: the connection is closed

    async def frames(self, request: web.Request) -> web.StreamResponse:
        """Send the frames of the transfer that an ATTACH frame in a header names."""
        stream_id = request.headers.get(STREAM_HEADER, "")
        encoded = request.headers.get(ATTACH_HEADER, "")
        try:
            signed = f"{stream_id} {encoded}".encode("utf-8", "surrogateescape")
            caller = self.caller(request, signed)
            seals = _seals(request, stream_id, caller)
            attach = parse_attach(_frame_in(encoded, seals.asker))
            transfer = await self._expected.find(attach)
            lane = transfer.attach(attach, seals.peer)
        except UntrustedPeer as error:
            return refusal(error)
        except ProtocolError as error:
            return refuse(409, str(error))
        except TransferError as error:
            return refuse(404, str(error))
        response = web.StreamResponse(headers={"X-Accel-Buffering": "no"})
        response.content_type = "application/octet-stream"
        response.enable_chunked_encoding()
        try:
            await response.prepare(request)
        except BaseException:  # the asker has left: or nothing would ever be owed over this stream
            transfer.lose(lane)
            raise
        # A transfer that ends otherwise must not wait for an asker that does not read.
        abort = _aborting(request, transfer)
        transfer.on_end.add(abort)
        try:
            await send_frames(
                response,
                transfer,
                lane,
                budget=self._budget,
                count_sent=self._service.count_sent,
            )
        finally:
            transfer.on_end.discard(abort)
        return response

    async def _serve(
        self,
        request: web.Request,
        transport: asyncio.Transport,
        seals: StreamSeals,
    ) -> None:
        port = take_port(
            transport,
            congestion=self._congestion,
            pacing_bytes_per_s=self._budget.rate_bytes_per_s,
        )
        stream = SendingStream(
            port,
            find=self._expected.find,
            budget=self._budget,
            count_sent=self._service.count_sent,
            our_seal=seals.peer,
            asker_seal=seals.asker,
        )
        stream.asker = request.remote or ""
        self.streams.add(stream)
        try:
            # Not force_close(): it closes the transport, which cancels this handler where the server
            # runs with handler_cancellation.
            await stream.run()
        finally:
            self.streams.discard(stream)
            port.close()
            transport.abort()


def _max_open_streams() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_STREAMS
    return max(1, min(MAX_OPEN_STREAMS, int(FILES_FRACTION * soft)))


def _seals(request: web.Request, stream_id: str, caller: Caller | None) -> StreamSeals:
    session = None if caller is None else caller.session
    return stream_seals(session, stream_id, is_tls=request.secure)


def _frame_in(encoded: str, seal: FrameSeal) -> bytes:
    """Return the payload of the ATTACH frame in a header, or raise ProtocolError."""
    decoder = FrameDecoder(allowed=frozenset({FrameType.ATTACH}), resolve=refuse_pages, seal=seal)
    try:
        data = memoryview(base64.b64decode(encoded, validate=True))
    except ValueError as error:
        raise ProtocolError(f"header {ATTACH_HEADER} is not base64") from error
    while data:
        target = decoder.buffer()
        num_bytes = min(len(target), len(data))
        target[:num_bytes] = data[:num_bytes]
        data = data[num_bytes:]
        frame = decoder.received(num_bytes)
        if frame is not None and not data:
            return frame.payload
    raise ProtocolError(f"header {ATTACH_HEADER} is not one ATTACH frame")


def _aborting(request: web.Request, transfer: OutgoingTransfer) -> Callable[[], None]:
    def abort() -> None:
        if transfer.outcome not in (None, "completed") and request.transport is not None:
            request.transport.abort()

    return abort
