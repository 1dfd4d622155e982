"""What a scheduler knows of its fleet, kept from what the nodes say: the driver of `Fleet` and the directory.

The first node decides what the fleet computes, until no node is left; another one that computes something
else is refused. Where a node is placed, whom it is told to know and which mode it takes is `Fleet`'s.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from prfaas.clock import Clock
from prfaas.errors import IncompatiblePeer, Overloaded
from prfaas.log import get_logger
from prfaas.scheduler.fleet import Fleet
from prfaas.scheduler.heartbeat import PERIOD_S
from prfaas.scheduler.placing import Wanted, no_bytes
from prfaas.server.fleet_prefixes import FleetPrefixes, PromptKeys
from prfaas.server.heartbeat_messages import HeartbeatMessage, HeartbeatReply
from prfaas.transport.handshake import Identity, check_compatible
from prfaas.types import Request, RouteName

if TYPE_CHECKING:
    from prfaas.cache.spec import CacheLayout

MAX_CONTEXT_TOKENS = 1 << 20
"""While no node has said how long a prompt may be."""

log = get_logger()


class FleetDriver:
    """The nodes of one fleet and what they compute.

    Args:
        tokenizer_fingerprint: of the scheduler's own tokenizer, which all nodes must share; so the template's.
        accept_approximate: nodes' numerics may differ.
        on_forgotten: told of each node that is known no longer.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        tokenizer_fingerprint: str,
        template_fingerprint: str,
        accept_approximate: bool,
        clock: Clock,
        on_forgotten: Callable[[str], None],
    ) -> None:
        self.fleet = fleet
        self.identity: Identity | None = None
        """What the fleet computes; None while there is no node."""
        self.layout: CacheLayout | None = None
        self._change = asyncio.Event()
        """Set, and replaced by the next one, once a node can decode again or has gone."""
        self.num_waiting = 0
        """Requests for which there is no node now."""
        self.num_conversions = 0
        """Modes that nodes were asked to take."""
        self._prefixes: FleetPrefixes | None = None
        self._own = (tokenizer_fingerprint, template_fingerprint)
        self._accept_approximate = accept_approximate
        self._clock = clock
        self._on_forgotten = on_forgotten
        self._said: dict[str, HeartbeatMessage] = {}
        """The latest of each known node."""
        self._refused: set[str] = set()
        """Nodes of which it was logged that they do not belong here."""
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="prfaas-directory")

    # ------------------------------------------------------------ what nodes say

    async def heard(self, message: HeartbeatMessage) -> HeartbeatReply:
        """Take note of a heartbeat and return what the node is to do.

        Raises IncompatiblePeer for a node that computes something else, Overloaded for one that is not
        taken: there are too many, or a later life of it was heard.
        """
        beat = message.heartbeat
        self._check_compatible(message)
        before = self._said.get(beat.node)
        was_known = before is not None and before.heartbeat.epoch == beat.epoch
        numerics = message.identity.numerics_fingerprint
        could_decode = self.fleet.can_decode(beat.node, self._clock())
        if not self.fleet.heard(beat, self._clock(), numerics=numerics):
            raise Overloaded(
                f"node {beat.node} is not taken into the fleet", retry_after_s=PERIOD_S
            )
        self._said[beat.node] = message
        if not could_decode and self.fleet.can_decode(beat.node, self._clock()):
            self._changed()
        self._refused.discard(beat.node)
        prefixes = self._join(message)
        if not was_known:
            log.info("node.joined", node=beat.node, role=beat.role, cluster=beat.cluster)
        wants_snapshot = await prefixes.told(
            beat.node, beat.epoch, message.changes, message.snapshot
        )
        return HeartbeatReply(
            is_known=was_known,
            wants_snapshot=wants_snapshot,
            mode=self.fleet.wanted_mode(beat.node),
            peers=self.fleet.peers_of(beat.node, self._clock()),
            period_s=PERIOD_S,
        )

    def _check_compatible(self, message: HeartbeatMessage) -> None:
        node, theirs = message.heartbeat.node, message.identity
        names = ("tokenizer_fingerprint", "template_fingerprint")
        try:
            for name, ours in zip(names, self._own, strict=True):
                if getattr(theirs, name) != ours:
                    raise IncompatiblePeer(  # noqa: TRY301  logged below, like what is raised elsewhere
                        f"{name} differs: {ours!r} here, {getattr(theirs, name)!r} there"
                    )
            if self.identity is not None:
                check_compatible(self.identity, theirs, accept_approximate=self._accept_approximate)
        except IncompatiblePeer as error:
            if node not in self._refused and len(self._refused) < len(self._said) + 1024:
                self._refused.add(node)
                log.warning("node.refused", node=node, reason=str(error))
            raise

    def _join(self, message: HeartbeatMessage) -> FleetPrefixes:
        if self._prefixes is None:
            self.identity, self.layout = message.identity, message.layout
            self._prefixes = FleetPrefixes(message.identity, message.layout, self._executor)
        return self._prefixes

    async def left(self, node: str, epoch: int) -> None:
        """Take note that a life of a node ends; one that is over already says nothing new."""
        said = self._said.get(node)
        if said is not None and said.heartbeat.epoch == epoch:
            self.fleet.left(node, self._clock())
            log.info("node.left", node=node)
            await self._forget(node)

    # ------------------------------------------------------------ what is asked of it

    @property
    def max_context_tokens(self) -> int:
        """Prompt plus completion, on any node."""
        return min(
            (said.max_context_tokens for said in self._said.values()), default=MAX_CONTEXT_TOKENS
        )

    @property
    def num_keys(self) -> int:
        """Blocks that some node has."""
        return 0 if self._prefixes is None else self._prefixes.num_keys

    @property
    def is_ready(self) -> tuple[bool, str]:
        """(False, why) while no node can decode, and none may soon: then requests are not let in."""
        num_pd = 0
        for said in self._said.values():
            if said.heartbeat.role == "pd":
                if not said.heartbeat.is_draining:
                    return True, ""
                num_pd += 1
        return False, f"all of {num_pd} pd nodes drain" if num_pd else "no pd node has joined"

    async def until_change(self, seconds: float) -> None:
        """Return when a node has come or is back, or after so long; counted as a request that waits."""
        self.num_waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._change.wait()
        finally:
            self.num_waiting -= 1

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def said(self, node: str) -> HeartbeatMessage | None:
        """Return the latest word of a node, None if it is unknown."""
        return self._said.get(node)

    def wanted(
        self,
        request: Request,
        hits: Mapping[str, int],
        *,
        num_drawn: int = 0,
        force: RouteName | None = None,
        numerics: str | None = None,
        excluded: frozenset[str] = frozenset(),
    ) -> Wanted:
        """Return what `Fleet` is to place: the request, as it stands in the fleet's caches.

        `num_drawn` tokens of the answer are prefilled with the prompt.
        """
        return Wanted(
            num_tokens=len(request.prompt_tokens) + num_drawn,
            hits=hits,
            kv_bytes=no_bytes if self.layout is None else self.layout.bytes_needed,
            tail_bytes=no_bytes if self.layout is None else self._tail_bytes,
            force=force,
            num_sequences=request.num_choices,
            max_tokens=max(1, request.sampling.max_tokens - num_drawn),
            numerics=numerics,
            excluded=excluded,
        )

    def _tail_bytes(self, num_tokens: int, held_tokens: int) -> int:
        """Return the KV that a prefill has only at its end: windows and states."""
        layout = self.layout
        if layout is None:
            return 0
        streamed_bytes = layout.streamed_bytes(num_tokens, held_tokens)
        return layout.bytes_needed(num_tokens, held_tokens) - streamed_bytes

    async def keys(self, request: Request) -> PromptKeys:
        """Return the keys that the request's prompt has on the fleet's nodes."""
        if self._prefixes is None:
            return {}
        numerics = {said.identity.numerics_fingerprint for said in self._said.values()}
        return await self._prefixes.keys(request.prompt_tokens, request.cache_salt, numerics)

    async def hits(self, keys: PromptKeys) -> dict[str, int]:
        """Return how many leading tokens of a prompt each node is believed to have."""
        return {} if self._prefixes is None else await self._prefixes.hits(keys)

    async def expect(self, nodes: Iterable[str], request: Request, keys: PromptKeys) -> None:
        """Take note that nodes have the prompt in their caches now; the keys are those of `keys`."""
        for node in nodes:
            said = self._said.get(node)
            if said is None or self._prefixes is None:
                continue
            of_node = keys.get(said.identity.numerics_fingerprint, ())
            await self._prefixes.expect(node, of_node, len(request.prompt_tokens))

    # ------------------------------------------------------------ its life

    async def look(self) -> None:
        """Forget nodes that are silent and decide about modes; to be called each second."""
        now_s = self._clock()
        for node in self.fleet.expire(now_s):
            log.warning("node.lost", node=node)
            await self._forget(node)
        for change in self.fleet.conversions(now_s):
            self.num_conversions += 1
            log.info("node.converting", node=change.node, mode=change.mode)

    async def _forget(self, node: str) -> None:
        self._said.pop(node, None)
        self._on_forgotten(node)
        self._changed()
        if self._said:
            if self._prefixes is not None:
                await self._prefixes.forget(node)
        else:  # whoever comes next decides what the fleet computes
            self.identity = self.layout = self._prefixes = None

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._executor.shutdown(cancel_futures=True)
