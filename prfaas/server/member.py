"""A node as a member of a fleet: it tells the scheduler how it is, and does what the scheduler wants.

The node serves its peers and its own API all the while, whether or not a scheduler is there.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from prfaas.cache.changes import CacheSnapshot, ChangeLog, Changes
from prfaas.cache.spec import CacheLayout
from prfaas.clock import Clock, wall_s
from prfaas.config.advertised import advertised
from prfaas.config.options import NodeConfig
from prfaas.errors import IncompatiblePeer, Overloaded, TransferError, UntrustedPeer
from prfaas.log import get_logger
from prfaas.scheduler.heartbeat import Heartbeat, LinkReport, Mode, NodeRole
from prfaas.server.fleet_client import FleetClient
from prfaas.server.fleet_view import MemberState, MemberView
from prfaas.server.heartbeat_messages import MAX_MESSAGE_KEYS, HeartbeatMessage, HeartbeatReply
from prfaas.server.node import NodeLoad
from prfaas.transport.address import parse_address
from prfaas.transport.security import asker_security

if TYPE_CHECKING:
    from prfaas.transport.handshake import Identity

FIRST_BEAT_S = 0.1
"""After the start: by then the node's port shows what it serves."""
HURRY_S = 0.02
"""Until the next message where a scheduler waits for more: a snapshot, or changes beyond one message."""
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 1.0
"""A scheduler that is back hears of its fleet as soon as if it had never been away."""
REFUSED_S = 10.0
"""Between two tries of a node that does not belong to the fleet."""
LEAVE_TIMEOUT_S = 2.0
MAX_CHANGED_KEYS = 1 << 14
"""In one message."""


class FleetNode(Protocol):
    """What is asked of a node; `pd.PdNode` and `prefill.PrefillNode` are some."""

    @property
    def identity(self) -> "Identity":
        """What the fleet must share."""
        ...

    @property
    def layout(self) -> CacheLayout:
        """How its KV is cut into pages."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Prompt plus completion."""
        ...

    @property
    def is_ready(self) -> tuple[bool, str]:
        """(False, why) while it cannot serve."""
        ...

    @property
    def changes(self) -> ChangeLog | None:
        """Which blocks its cache can serve."""
        ...

    @property
    def mode(self) -> Mode:
        """What it does for others."""
        ...

    def set_mode(self, mode: Mode) -> None:
        """Do that from now on; what runs goes on."""
        ...

    def keep_peers(self, names: Iterable[str]) -> None:
        """Keep connections to these nodes, beside those that it was started with."""
        ...

    def load(self) -> NodeLoad:
        """Return how busy it is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Which fleet a node joins, and as what."""

    scheduler: str
    name: str
    role: NodeRole
    cluster: str
    max_running: int
    """Sequences that its batch has room for, or transfers that it serves."""

    @classmethod
    def of(cls, config: NodeConfig) -> "Membership | None":
        """Return what the settings say; None for a node on its own."""
        if config.fleet.scheduler is None or config.role == "scheduler":
            return None
        is_pd = config.role == "pd"
        return cls(
            scheduler=config.fleet.scheduler,
            name=advertised(config),
            role=config.role,
            cluster=config.fleet.cluster,
            max_running=(
                config.engine.max_batch_sequences if is_pd else config.transport.max_transfers
            ),
        )


def new_epoch(wall: Clock = wall_s) -> int:
    """Return a number that is greater in each life of a node's process, for its cache and heartbeats."""
    return int(wall() * 1000)


class Member:
    """The heartbeats of one node.

    Args:
        make_client: called by `run`, on its loop.
    """

    def __init__(
        self,
        node: FleetNode,
        membership: Membership,
        *,
        epoch: int,
        make_client: Callable[[], FleetClient],
    ) -> None:
        self.membership = membership
        self.state: MemberState = "joining"
        self.detail = ""
        self._node = node
        self._epoch = epoch
        self._make_client = make_client
        self._client: FleetClient | None = None
        self._hurry = asyncio.Event()
        self._is_draining = False
        self._wants_snapshot = False
        self._untold: Changes | None = None
        """Of a message that was not answered: said again, word for word."""
        self._backoff_s = FIRST_BACKOFF_S
        self._num_conversions = 0

    def view(self) -> MemberView:
        """Return the node's place in its fleet now."""
        return MemberView(
            scheduler=self.membership.scheduler,
            name=self.membership.name,
            cluster=self.membership.cluster,
            mode=self._node.mode,
            state=self.state,
            detail=self.detail,
            num_conversions=self._num_conversions,
        )

    async def run(self) -> None:
        """Tell the scheduler how the node is until cancelled; a scheduler that comes later is found."""
        client = self._client = self._make_client()
        pause_s = FIRST_BEAT_S
        while True:
            with contextlib.suppress(TimeoutError):  # it is time
                async with asyncio.timeout(pause_s):
                    await self._hurry.wait()
            self._hurry.clear()
            pause_s = await self._beat(client)

    def drain(self) -> None:
        """Say at once that nothing new shall come; what runs here goes on."""
        self._is_draining = True
        self._hurry.set()

    async def leave(self) -> None:
        """Say that the node goes, and close the connection. `run` has ended. Idempotent."""
        client, self._client = self._client, None
        if client is None:
            return
        try:
            if self.state == "joined":
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await client.leave(self.membership.name, self._epoch, self._node.identity)
        except (Overloaded, TransferError, TimeoutError) as error:  # it will miss the heartbeats
            get_logger().debug("fleet.leave_lost", error=str(error))
        finally:
            await client.close()

    async def _beat(self, client: FleetClient) -> float:
        """Send one heartbeat; return the seconds until the next."""
        message = await self._message()
        try:
            reply = await client.heartbeat(message)
        except IncompatiblePeer as error:
            self._enter("refused", str(error))
            return REFUSED_S
        except UntrustedPeer as error:
            self._enter("untrusted", str(error))
        except (Overloaded, TransferError) as error:
            self._enter("lost", str(error))
        else:
            return self._take(message, reply)
        pause_s, self._backoff_s = self._backoff_s, min(2 * self._backoff_s, MAX_BACKOFF_S)
        return pause_s

    def _take(self, message: HeartbeatMessage, reply: HeartbeatReply) -> float:
        """Do what the scheduler wants; return the seconds until the next heartbeat."""
        self._enter("joined", "")
        self._backoff_s = FIRST_BACKOFF_S
        self._untold = None
        self._wants_snapshot = reply.wants_snapshot
        if reply.mode is not None and reply.mode != self._node.mode:
            self._node.set_mode(reply.mode)
            self._num_conversions += 1
        self._node.keep_peers(peer for peer in reply.peers if peer != self.membership.name)
        if reply.wants_snapshot or _is_full(message.changes):
            return HURRY_S
        return reply.period_s

    async def _message(self) -> HeartbeatMessage:
        changes, snapshot = await self._told_of_cache()
        return HeartbeatMessage(
            heartbeat=self._heartbeat(),
            identity=self._node.identity,
            layout=self._node.layout,
            max_context_tokens=self._node.max_context_tokens,
            changes=changes,
            snapshot=snapshot,
        )

    async def _told_of_cache(self) -> tuple[Changes | None, CacheSnapshot | None]:
        """Return what to say of the cache; a large one is listed beside the loop."""
        log = self._node.changes
        if log is None:
            return None, None
        if self._wants_snapshot:
            self._untold = None  # the snapshot has it
            return None, _bounded(await asyncio.to_thread(log.snapshot))
        if self._untold is None:
            self._untold = await asyncio.to_thread(log.take, MAX_CHANGED_KEYS)
        return self._untold, None

    def _heartbeat(self) -> Heartbeat:
        node, load = self._node, self._node.load()
        is_ready, reason = node.is_ready
        num_pages = sum(load.pages.values())
        num_free = load.pages.get("free", 0) + load.pages.get("cached", 0)
        return Heartbeat(
            node=self.membership.name,
            role=self.membership.role,
            cluster=self.membership.cluster,
            mode=node.mode,
            epoch=self._epoch,
            is_ready=is_ready,
            reason=reason,
            is_draining=self._is_draining,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            max_running=self.membership.max_running,
            num_waiting_tokens=load.num_waiting_tokens,
            prefill_tokens_per_s=_finite(load.prefill_tokens_per_s),
            decode_step_s=_finite(load.decode_step_s),
            free_pages_fraction=num_free / num_pages if num_pages else 1.0,
            free_kv_bytes=num_free * node.layout.page_bytes if num_pages else None,
            links=_links(load),
            peers_usable=load.peers_usable,
        )

    def _enter(self, state: MemberState, detail: str) -> None:
        """Log a change of state, once."""
        if state != self.state:
            log = get_logger()
            scheduler = self.membership.scheduler
            if state == "joined":
                log.info("fleet.joined", scheduler=scheduler, node=self.membership.name)
            else:
                log.warning("fleet.lost", scheduler=scheduler, state=state, detail=detail)
        self.state, self.detail = state, detail


def _links(load: NodeLoad) -> dict[str, LinkReport]:
    """Return the ways from the peers that this node pulls from."""
    reports = {}
    for name, peer in load.peers.items():
        link = load.links.get(name)
        reports[name] = LinkReport(
            rtt_s=_finite(peer.rtt_s),
            bytes_per_s=_finite(1 / peer.byte_s if peer.byte_s else None),
            retransmit_fraction=None if link is None else _finite(link.loss_fraction),
        )
    return reports


def _finite(number: float | None) -> float | None:
    """Return a number that a message can have; None for one that is none, or less than nothing."""
    return number if number is not None and math.isfinite(number) and number >= 0 else None


def _is_full(changes: Changes | None) -> bool:
    """Return whether there may be more than fitted into one message."""
    if changes is None:
        return False
    keys = (changes.added, changes.removed, changes.places_added, changes.places_removed)
    return sum(map(len, keys)) >= MAX_CHANGED_KEYS


def _bounded(snapshot: CacheSnapshot) -> CacheSnapshot:
    """Return as much of a snapshot as a message takes."""
    return CacheSnapshot(
        epoch=snapshot.epoch,
        sequence=snapshot.sequence,
        keys=snapshot.keys[:MAX_MESSAGE_KEYS],
        places=snapshot.places[:MAX_MESSAGE_KEYS],
    )


def member_of(node: FleetNode, config: NodeConfig) -> Member | None:
    """Return the member that a node is by its settings, None for a node on its own.

    Raises:
        ConfigError: a file of the cluster key or of TLS cannot be used.
    """
    membership = Membership.of(config)
    if membership is None:
        return None
    address = parse_address(membership.scheduler)
    security = asker_security(config.transport)
    return Member(
        node,
        membership,
        epoch=new_epoch() if node.changes is None else node.changes.epoch,
        make_client=lambda: FleetClient(address, config.transport, security),
    )
