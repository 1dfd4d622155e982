"""The door of a node's own routes: who has proven that they hold the cluster key may come in.

POST /kv/v1/hello, /kv/v1/session   prove that we both have the cluster key (see auth)
"""

import asyncio
import secrets

from aiohttp import web

from prfaas.errors import IncompatiblePeer, ProtocolError, UntrustedPeer
from prfaas.transport.answers import json_answer, read_proof, refusal
from prfaas.transport.auth import AUTH_HEADER, HELLO_PATH, SESSION_PATH, Caller, PeerSide


class Gate:
    """Opens sessions and says whose a request is; without a `side`, which has the key, anybody may ask."""

    def __init__(self, side: PeerSide | None) -> None:
        self._side = side

    def routes(self) -> list[web.RouteDef]:
        """Return the routes by which sessions are opened."""
        return [web.post(HELLO_PATH, self.hello), web.post(SESSION_PATH, self.session)]

    async def hello(self, request: web.Request) -> web.Response:
        """Answer a hello with our proof."""
        try:
            body, side = await read_proof(request), self._required()
            return json_answer(
                200, side.challenge(body, nonce=secrets.token_hex(32), now_s=_now_s())
            )
        except (IncompatiblePeer, ProtocolError, UntrustedPeer, TimeoutError) as error:
            return refusal(error)

    async def session(self, request: web.Request) -> web.Response:
        """Open a session for an asker that has proven itself."""
        try:
            body, side = await read_proof(request), self._required()
            side.admit(body, now_s=_now_s())
        except (ProtocolError, UntrustedPeer, TimeoutError) as error:
            return refusal(error)
        return json_answer(200, b"{}")

    def _required(self) -> PeerSide:
        if self._side is None:
            raise UntrustedPeer(
                "this node has no cluster key, so it cannot prove that it has yours"
            )
        return self._side

    def caller(self, request: web.Request, body: bytes) -> Caller | None:
        """Return who asks, None where anybody may; raises UntrustedPeer."""
        if self._side is None:
            return None
        signature = request.headers.get(AUTH_HEADER)
        if signature is None:
            raise UntrustedPeer("this node wants proof that you have its cluster key")
        return self._side.check(signature, request.method, request.path, body)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
