"""The prefill side of the KV channel: HTTP routes for control, an upgraded raw socket for bulk.

    POST   /kv/v1/hello, /kv/v1/session   prove that we both have the cluster key (see auth)
    POST   /kv/v1/handshake               who are you, and how busy
    POST   /kv/v1/transfers               compute this prompt and keep its KV for me
    GET    /kv/v1/transfers/{id}/stream   Upgrade: prfaas-kv, then frames
    DELETE /kv/v1/transfers/{id}          I no longer want it

A transfer is leased. The lease runs while the receiver owes something: to open the stream, to read
what was sent, to acknowledge the end. Every bit of progress renews it, and while there is nothing to
send it stands still. When it expires the stream is closed and the pages are let go.
"""

import asyncio
import secrets
from typing import Protocol

from aiohttp import web

from prfaas.errors import (
    BadRequest,
    IncompatiblePeer,
    Overloaded,
    ProtocolError,
    UntrustedPeer,
)
from prfaas.transport.auth import Caller, PeerSide, is_same
from prfaas.transport.client import (
    AUTH_HEADER,
    CAPABILITY_HEADER,
    HELLO_PATH,
    PROOF_HEADER,
    SESSION_PATH,
)
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
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.seals import CHECKSUM, FrameSeal, MacSeal
from prfaas.transport.sending import serve_stream, take_port
from prfaas.transport.stream import UPGRADE

BODY_TIMEOUT_S = 30.0
MAX_PROOF_BYTES = 64 << 10
"""Of what somebody says who has not proven anything."""


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


def routes(
    service: TransferService, *, lease_s: float, gate: PeerSide | None = None
) -> list[web.RouteDef]:
    """Return the routes of the KV channel, to be mounted on the node's HTTP port.

    With a gate nobody gets through who has not proven to it that they hold the cluster key.
    """
    handlers = _Handlers(service, lease_s, gate)
    return [
        web.post(HELLO_PATH, handlers.hello),
        web.post(SESSION_PATH, handlers.session),
        web.post("/kv/v1/handshake", handlers.handshake),
        web.post("/kv/v1/transfers", handlers.open),
        web.get("/kv/v1/transfers/{transfer_id}/stream", handlers.stream, allow_head=False),
        web.delete("/kv/v1/transfers/{transfer_id}", handlers.cancel),
    ]


class _Handlers:
    def __init__(self, service: TransferService, lease_s: float, gate: PeerSide | None) -> None:
        self._service = service
        self._lease_s = lease_s
        self._gate = gate

    # ------------------------------------------------------------ who it is

    async def hello(self, request: web.Request) -> web.Response:
        try:
            body, gate = await _read_proof(request), self._required_gate()
            return _json(200, gate.challenge(body, nonce=secrets.token_hex(32), now_s=_now_s()))
        except (IncompatiblePeer, ProtocolError, UntrustedPeer, TimeoutError) as error:
            return _refusal(error)

    async def session(self, request: web.Request) -> web.Response:
        try:
            body, gate = await _read_proof(request), self._required_gate()
            gate.admit(body, now_s=_now_s())
        except (ProtocolError, UntrustedPeer, TimeoutError) as error:
            return _refusal(error)
        return _json(200, b"{}")

    def _required_gate(self) -> PeerSide:
        if self._gate is None:
            raise UntrustedPeer(
                "this node has no cluster key, so it cannot prove that it has yours"
            )
        return self._gate

    def _caller(self, request: web.Request, body: bytes) -> Caller | None:
        """Return who asks, None where anybody may; raises UntrustedPeer."""
        if self._gate is None:
            return None
        signature = request.headers.get(AUTH_HEADER)
        if signature is None:
            raise UntrustedPeer("this node wants proof that you have its cluster key")
        return self._gate.check(signature, request.method, request.path, body)

    # ------------------------------------------------------------ what it wants

    async def handshake(self, request: web.Request) -> web.Response:
        try:
            body = await _read(request)
            caller = self._caller(request, body)
            parse_identity(parse_object(body).get("identity"))
        except (ProtocolError, UntrustedPeer, TimeoutError) as error:
            return _refusal(error)
        return _proven(200, encode_status(self._service.status()), caller)

    async def open(self, request: web.Request) -> web.Response:
        try:
            body = await _read(request)
            caller = self._caller(request, body)
            asked = parse_transfer_request(body)
            return _proven(201, encode_accepted(await self._service.open(asked)), caller)
        except (
            BadRequest,
            IncompatiblePeer,
            Overloaded,
            ProtocolError,
            TimeoutError,
            UntrustedPeer,
        ) as error:
            return _refusal(error)

    async def cancel(self, request: web.Request) -> web.Response:
        try:
            self._caller(request, b"")
        except UntrustedPeer as error:
            return _refusal(error)
        if self._service.cancel(request.match_info["transfer_id"]):
            return web.Response(status=204)
        return _refuse(404, "no such transfer")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() != UPGRADE:
            return _refuse(426, f"this resource needs Upgrade: {UPGRADE}", {"Upgrade": UPGRADE})
        capability = request.headers.get(CAPABILITY_HEADER, "")
        try:
            caller = self._caller(request, capability.encode("utf-8", "surrogateescape"))
        except UntrustedPeer as error:
            return _refusal(error)
        transfer = self._service.transfer(request.match_info["transfer_id"])
        if transfer is None:
            return _refuse(404, "no such transfer")
        if not is_same(transfer.capability, capability):
            return _refuse(403, "the transfer was promised to somebody else")
        ours, receivers = _seals(request, transfer, caller)
        if not transfer.try_attach(ours):
            return _refuse(409, "the transfer has a stream already")
        try:
            await self._serve(request, transfer, receivers)
        finally:
            transfer.detach()
        return web.Response()  # goes nowhere: the connection is closed

    async def _serve(
        self, request: web.Request, transfer: OutgoingTransfer, receivers: FrameSeal
    ) -> None:
        transport = request.transport
        if transport is None or transport.get_write_buffer_size():
            return  # gone, or pipelined behind an answer that is not sent yet
        port = take_port(transport)
        try:
            # Not force_close(): it closes the transport, which cancels this handler where the server
            # runs with handler_cancellation.
            await serve_stream(port, transfer, self._lease_s, self._service.count_sent, receivers)
        finally:
            port.close()
            transport.abort()


def _seals(
    request: web.Request, transfer: OutgoingTransfer, caller: Caller | None
) -> tuple[FrameSeal, FrameSeal]:
    """Return the seals of what we and the receiver send: MACs where nothing else guards the bytes."""
    if caller is None or request.secure:
        return CHECKSUM, CHECKSUM
    session, transfer_id = caller.session, transfer.transfer_id
    return (
        MacSeal(session.frame_key(transfer_id, "peer")),
        MacSeal(session.frame_key(transfer_id, "asker")),
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _read(request: web.Request) -> bytes:
    async with asyncio.timeout(BODY_TIMEOUT_S):
        return await request.read()


async def _read_proof(request: web.Request) -> bytes:
    num_bytes = request.content_length
    if num_bytes is None or num_bytes > MAX_PROOF_BYTES:
        raise ProtocolError(f"a body of {num_bytes} bytes, limit {MAX_PROOF_BYTES}")
    return await _read(request)


def _refusal(
    error: BadRequest
    | IncompatiblePeer
    | Overloaded
    | ProtocolError
    | TimeoutError
    | UntrustedPeer,
) -> web.Response:
    match error:
        case UntrustedPeer():
            return _refuse(401, str(error), {"WWW-Authenticate": AUTH_HEADER})
        case IncompatiblePeer():
            return _refuse(409, str(error))
        case ProtocolError():
            return _refuse(400, str(error))
        case BadRequest():
            return _refuse(422, str(error))  # 400 is for messages that we do not understand
        case Overloaded():
            return _refuse(503, str(error), {"Retry-After": f"{error.retry_after_s:g}"})
        case TimeoutError():
            return _refuse(408, f"no whole body within {BODY_TIMEOUT_S} s")


def _proven(status: int, body: bytes, caller: Caller | None) -> web.Response:
    """Return a success, signed for whoever has proven themselves."""
    if caller is None:
        return _json(status, body)
    return _json(
        status, body, {PROOF_HEADER: caller.session.sign_reply(caller.counter, status, body)}
    )


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _refuse(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return _json(status, dump({"error": error}), headers)
