"""The nodes that one pd node exchanges KV with: those it was told to, and those it is directed to."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from prfaas.clock import Clock
from prfaas.scheduler.router import Router
from prfaas.server.peer import Peer
from prfaas.transport.address import PeerAddress, parse_address
from prfaas.transport.handshake import Identity
from prfaas.transport.link_state import LinkView
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a background task of the node."""


def parse_peers(text: str | None) -> tuple[PeerAddress, ...]:
    """Return the addresses in a comma-separated list, each once; raise ValueError for one that is none."""
    names = [] if text is None else [name.strip() for name in text.split(",")]
    return tuple(dict.fromkeys(parse_address(name) for name in names))


class Peers:
    """The peers by their names, each with a handshake now and then, and streams that are open.

    The router knows exactly these. Those given at the start stay; others come when they are wanted and go
    when nobody names them any more and nothing of ours is under way there.
    """

    def __init__(
        self,
        addresses: Iterable[PeerAddress],
        *,
        options: TransportOptions,
        identity: Identity,
        router: Router,
        clock: Clock,
        spawn: Spawn,
        security: ChannelSecurity | None = None,
    ) -> None:
        self._options = options
        self._identity = identity
        self._router = router
        self._clock = clock
        self._spawn = spawn
        self._security = security
        self._peers: dict[str, Peer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False
        self._given = tuple(map(str, addresses))
        for name in self._given:
            self.ensure(name)

    @property
    def all(self) -> tuple[Peer, ...]:
        """Every peer that there is now."""
        return tuple(self._peers.values())

    @property
    def first(self) -> Peer | None:
        """The first that was given at the start."""
        return self._peers[self._given[0]] if self._given else None

    @property
    def links(self) -> Mapping[str, LinkView]:
        """The links to them, by their names."""
        return {name: view for peer in self.all for name, view in peer.links.views.items()}

    def get(self, name: str) -> Peer | None:
        """Return a peer by its name."""
        return self._peers.get(name)

    def ensure(self, name: str) -> Peer:
        """Return the peer at "host:port"; a new one shakes hands at once.

        Raises ValueError for a name that is no address.
        """
        assert not self._is_closed, "closed"
        address = parse_address(name)
        peer = self._peers.get(str(address))
        if peer is None:
            peer = Peer(
                address,
                options=self._options,
                identity=self._identity,
                router=self._router,
                clock=self._clock,
                security=self._security,
            )
            self._router.add_peer(peer.name)
            self._peers[peer.name] = peer
            self._tasks[peer.name] = self._spawn(peer.run())
        return peer

    def keep(self, names: Iterable[str]) -> None:
        """Have the peers of these names, too, and no others than those and the ones given at the start.

        One that is in use goes with a later call. Names that are no addresses are passed over.
        """
        if self._is_closed:
            return
        kept = set(self._given)
        for name in names:
            try:
                kept.add(self.ensure(name).name)
            except ValueError:
                continue
        for name in [n for n, peer in self._peers.items() if n not in kept and not peer.num_users]:
            self._router.remove_peer(name)
            leaving = self._spawn(self._leave(self._peers.pop(name), self._tasks.pop(name)))
            leaving.set_name(f"leave {name}")

    async def _leave(self, peer: Peer, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait({task})
        await peer.close()

    def stop(self) -> None:
        """Shake no more hands. Nobody uses a peer from here on."""
        self._is_closed = True
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """Close the connections of all. Idempotent; their tasks have ended."""
        for peer in self.all:
            await peer.close()
