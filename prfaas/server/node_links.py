"""A scheduler's connections to the nodes of its fleet."""

from collections.abc import Callable, Coroutine
from typing import Any

from prfaas.errors import TransferError
from prfaas.transport.address import parse_address
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.signed_http import SignedHttp


class NodeLinks:
    """One client for each node that was asked for something.

    Args:
        spawn: runs what closes a client.
    """

    def __init__(
        self,
        options: TransportOptions,
        security: ChannelSecurity,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._options = options
        self._security = security
        self._spawn = spawn
        self._clients: dict[str, SignedHttp] = {}

    def to(self, node: str) -> SignedHttp:
        """Return the client of a node; raises TransferError for a name that is no address."""
        client = self._clients.get(node)
        if client is None:
            try:
                address = parse_address(node)
            except ValueError as error:
                raise TransferError(str(error)) from error
            client = SignedHttp(address, self._options, self._security, max_connections=None)
            self._clients[node] = client
        return client

    def forget(self, node: str) -> None:
        """Close the connections to a node that is gone, and with them what runs over them."""
        client = self._clients.pop(node, None)
        if client is not None:
            self._spawn(client.close())

    async def close(self) -> None:
        """Close all connections."""
        while self._clients:
            _, client = self._clients.popitem()
            await client.close()
