"""A node's way to its scheduler: heartbeats, signed if there is a cluster key."""

import asyncio

from prfaas.server.heartbeat_messages import (
    INLINE_KEYS,
    HeartbeatMessage,
    HeartbeatReply,
    encode_heartbeat,
    encode_leave,
    parse_reply,
)
from prfaas.transport.address import PeerAddress
from prfaas.transport.fleet_messages import HEARTBEAT_PATH, LEAVE_PATH
from prfaas.transport.handshake import Identity
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.signed_http import SignedHttp


class FleetClient:
    """Talks to one scheduler. Every failure is a TransferError or Overloaded; the next beat makes it good."""

    def __init__(
        self,
        address: PeerAddress,
        options: TransportOptions,
        security: ChannelSecurity | None = None,
    ) -> None:
        self.address = address
        self._http = SignedHttp(address, options, security or ChannelSecurity())

    async def heartbeat(self, message: HeartbeatMessage) -> HeartbeatReply:
        """Return what the scheduler wants.

        Raises IncompatiblePeer for a node that computes something else than the fleet, UntrustedPeer
        if one of both has not proven that it has the cluster key, else TransferError.
        """
        if message.num_keys <= INLINE_KEYS:
            body = encode_heartbeat(message)
        else:
            body = await asyncio.to_thread(encode_heartbeat, message)
        return parse_reply(await self._http.post(HEARTBEAT_PATH, body, message.identity))

    async def leave(self, node: str, epoch: int, ours: Identity) -> None:
        """Say that this life of the node ends: nothing more is sent to it."""
        await self._http.post(LEAVE_PATH, encode_leave(node, epoch), ours)

    async def close(self) -> None:
        """Close the connections that are kept."""
        await self._http.close()
