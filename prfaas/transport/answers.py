"""What the prefill side answers to requests of control, and how it reads them."""

import asyncio

from aiohttp import web

from prfaas.errors import (
    BadRequest,
    IncompatiblePeer,
    Overloaded,
    ProtocolError,
    UntrustedPeer,
)
from prfaas.transport.auth import AUTH_HEADER, PROOF_HEADER, Caller
from prfaas.transport.fields import dump, encodable

MAX_BODY_BYTES = 32 << 20
"""Of what nodes say to each other, at least, however short the API's bodies must be: the longest is a
heartbeat with a snapshot of 2^18 blocks and places, 23 MB."""
BODY_TIMEOUT_S = 30.0
MAX_PROOF_BYTES = 64 << 10
"""Of what somebody says who has not proven anything."""
Refusal = BadRequest | IncompatiblePeer | Overloaded | ProtocolError | TimeoutError | UntrustedPeer
REFUSALS = (BadRequest, IncompatiblePeer, Overloaded, ProtocolError, TimeoutError, UntrustedPeer)
"""What `refusal` has an answer to."""


async def read_body(request: web.Request) -> bytes:
    """Return a request's body; TimeoutError if it does not come."""
    async with asyncio.timeout(BODY_TIMEOUT_S):
        return await request.read()


async def read_proof(request: web.Request) -> bytes:
    """Return the short body of somebody who has not proven anything yet, or raise ProtocolError."""
    num_bytes = request.content_length
    if num_bytes is None or num_bytes > MAX_PROOF_BYTES:
        raise ProtocolError(f"a body of {num_bytes} bytes, limit {MAX_PROOF_BYTES}")
    return await read_body(request)


def refusal(error: Refusal) -> web.Response:
    """Return the answer to a request that failed."""
    match error:
        case UntrustedPeer():
            return refuse(401, str(error), {"WWW-Authenticate": AUTH_HEADER})
        case IncompatiblePeer():
            return refuse(409, str(error))
        case ProtocolError():
            return refuse(400, str(error))
        case BadRequest():
            return refuse(422, str(error))  # 400 is for messages that we do not understand
        case Overloaded():
            return refuse(503, str(error), {"Retry-After": f"{error.retry_after_s:g}"})
        case TimeoutError():
            return refuse(408, f"no whole body within {BODY_TIMEOUT_S} s")


def proven(status: int, body: bytes, caller: Caller | None) -> web.Response:
    """Return a success, signed for whoever has proven themselves."""
    if caller is None:
        return json_answer(status, body)
    return json_answer(
        status, body, {PROOF_HEADER: caller.session.sign_reply(caller.counter, status, body)}
    )


def refuse(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """Return an answer that says no."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": encodable(message), "type": kind, "param": None, "code": None}
    return json_answer(status, dump({"error": error}), headers)


def json_answer(status: int, body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    """Return an answer of JSON that nobody signs."""
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
