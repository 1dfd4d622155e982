"""The scheduler's routes for its nodes.

POST /fleet/v1/heartbeat            a node's word about itself; the answer says what it is to do
POST /fleet/v1/leave                nothing more is to be sent to it
POST /kv/v1/hello, /kv/v1/session   prove that we both have the cluster key (see transport.auth)
"""

import asyncio

from aiohttp import web

from prfaas.errors import IncompatiblePeer, Overloaded, ProtocolError, UntrustedPeer
from prfaas.server.fleet_driver import FleetDriver
from prfaas.server.heartbeat_messages import (
    INLINE_BYTES,
    HeartbeatMessage,
    encode_reply,
    parse_heartbeat,
    parse_leave,
)
from prfaas.transport.answers import proven, read_body, refusal
from prfaas.transport.fleet_messages import HEARTBEAT_PATH, LEAVE_PATH
from prfaas.transport.gate import Gate


class FleetRoutes:
    """The handlers; nobody is heard who has not come through the gate."""

    def __init__(self, driver: FleetDriver, gate: Gate) -> None:
        self._driver = driver
        self._gate = gate

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return the routes."""
        return [
            *self._gate.routes(),
            web.post(HEARTBEAT_PATH, self.heartbeat),
            web.post(LEAVE_PATH, self.leave),
        ]

    async def heartbeat(self, request: web.Request) -> web.Response:
        """Take note of a heartbeat."""
        try:
            body = await read_body(request)
            caller = self._gate.caller(request, body)
            reply = await self._driver.heard(await _parsed(body))
        except (IncompatiblePeer, Overloaded, ProtocolError, TimeoutError, UntrustedPeer) as error:
            return refusal(error)
        return proven(200, encode_reply(reply), caller)

    async def leave(self, request: web.Request) -> web.Response:
        """Take note that a node goes."""
        try:
            body = await read_body(request)
            caller = self._gate.caller(request, body)
            await self._driver.left(*parse_leave(body))
        except (ProtocolError, TimeoutError, UntrustedPeer) as error:
            return refusal(error)
        return proven(200, b"{}", caller)


async def _parsed(body: bytes) -> HeartbeatMessage:
    """Return the heartbeat in a body; that of a large cache is read beside the loop."""
    if len(body) <= INLINE_BYTES:
        return parse_heartbeat(body)
    return await asyncio.to_thread(parse_heartbeat, body)
