"""A scheduler's connections to the nodes of its fleet."""

from prfaas.errors import TransferError
from prfaas.transport.address import parse_address
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.signed_http import SignedHttp


class NodeLinks:
    """One client for each node that was asked for something."""

    def __init__(self, options: TransportOptions, security: ChannelSecurity) -> None:
        self._options = options
        self._security = security
        self._clients: dict[str, SignedHttp] = {}
        self._retired: list[SignedHttp] = []
        """Of nodes that have left, while they still answer what they were asked before."""

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
        """Ask a node that is gone for nothing more; `sweep` closes its connections."""
        client = self._clients.pop(node, None)
        if client is not None:
            self._retired.append(client)

    async def sweep(self) -> None:
        """Close the connections to forgotten nodes over which nothing runs."""
        idle = [client for client in self._retired if not client.num_answers]
        self._retired = [client for client in self._retired if client.num_answers]
        for client in idle:
            await client.close()

    async def close(self) -> None:
        """Close all connections, and with them what runs over them."""
        clients = [*self._clients.values(), *self._retired]
        self._clients.clear()
        self._retired.clear()
        for client in clients:
            await client.close()
