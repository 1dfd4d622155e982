"""What the HTTP face asks of a node, whichever role it plays.

Life of a node: `load` (blocking, in a thread, while `/ready` says 503) makes it, `start` puts its
tasks into the root TaskGroup, requests come, `drain` tells it to take no new work, `close` ends
every task and thread it owns. The implementations are `pd.PdNode`, `prefill.PrefillNode` and
`scheduler.SchedulerNode`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, Self

if TYPE_CHECKING:
    import asyncio
    from contextlib import AbstractAsyncContextManager

    from aiohttp import web

    from prfaas.cache.lookups import LookupCounts
    from prfaas.cache.store import StoreStats
    from prfaas.config.options import NodeConfig, Role
    from prfaas.scheduler.explaining import Explanation
    from prfaas.scheduler.view import PeerView
    from prfaas.server.explaining import RouteExplanation
    from prfaas.server.fleet_view import FleetView, MemberView, RoutingView
    from prfaas.server.metrics import Metrics
    from prfaas.text.chat_template import ChatTemplate
    from prfaas.text.tokenizer import Tokenizer
    from prfaas.transport.handshake import Identity
    from prfaas.transport.link_state import LinkView
    from prfaas.types import Request, RequestRecord, RouteName, TokenEvent

PageState = Literal["free", "referenced", "cached", "transfer"]
Progress = Callable[[str, int, int], None]
"""(stage, done, total) of a load; raises to stop the load, so call it often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """How busy a node is at one moment; cheap to make, read at every scrape."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    """Known tokens that the engine has not computed."""
    num_decoding: int = 0
    """Sequences that have one token to compute."""
    prefill_tokens_per_s: float | None = None
    """Of the engine of late; None before the first prefill."""
    decode_step_s: float | None = None
    """Of a step that only decodes; None before the first."""
    num_transfers: int = 0
    """KV transfers in flight, sent or received."""
    pages: Mapping[PageState, int] = field(default_factory=dict)
    peers_usable: Mapping[str, bool] = field(default_factory=dict)
    """Peer address -> whether the router would send a prefill there now."""
    peers: Mapping[str, PeerView] = field(default_factory=dict)
    """Peer address -> what the router knows of it."""
    routing: RoutingView | None = None
    """How it routes, if it does."""
    member: MemberView | None = None
    """Its place in a fleet, if it joins one."""
    fleet: FleetView | None = None
    """A scheduler's."""
    peers_by_http: Mapping[str, bool] = field(default_factory=dict)
    """Peer address -> whether KV comes as answers of HTTP from there, not over raw connections."""
    links: Mapping[str, LinkView] = field(default_factory=dict)
    """Node at the other end -> its link, while KV streams to it are open."""
    lookups: LookupCounts | None = None
    """What the prefix cache found."""
    num_evictions: int = 0
    store: StoreStats | None = None
    """The cache on disk, if there is one."""


class Generation(Protocol):
    """One running request; iterate it once, inside the `async with` that made it."""

    @property
    def record(self) -> RequestRecord:
        """The request's story: route and token counts are final before the first event."""
        ...

    @property
    def first_logits(self) -> bytes | None:
        """float32 little-endian logits of the first drawn token, if they were asked for."""
        ...

    def stop_choice(self, choice_index: int) -> None:
        """End one choice early: no more of its events follow, other choices go on.

        The iteration ends when every choice has finished or was stopped. Never blocks.
        """
        ...

    @property
    def has_next(self) -> bool:
        """What comes next, an event, an error or the end, is here: nobody waits for it."""
        ...

    def __aiter__(self) -> Self:
        """Yield events in the order drawn; each choice's last one has a finish_reason.

        Raises BadRequest or Overloaded before the first event, EngineError at any time.
        """
        ...

    async def __anext__(self) -> TokenEvent:
        """Return the next event; cancelling a wait loses none."""
        ...


class Node(Protocol):
    """A loaded node of any role."""

    @property
    def role(self) -> Role:
        """The role it plays."""
        ...

    @property
    def identity(self) -> Identity:
        """What a peer must share with it."""
        ...

    @property
    def is_ready(self) -> tuple[bool, str]:
        """(False, why) while the engine is dead or has made no step for too long."""
        ...

    def load(self) -> NodeLoad:
        """Return how busy it is."""
        ...

    def routes(self) -> Iterable[web.AbstractRouteDef]:
        """Return what it serves to other nodes, beside its API."""
        ...

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the engine thread and put background tasks into `tasks`."""
        ...

    def drain(self) -> None:
        """Take no new work from peers; running work goes on."""
        ...

    async def close(self) -> None:
        """Abort what still runs, stop the engine thread, end the background tasks. Idempotent."""
        ...


class ServingNode(Node, Protocol):
    """A node that answers completions: the roles pd and scheduler."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, or the plain transcript."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Prompt plus completion."""
        ...

    async def explain(
        self, request: Request, force_route: RouteName | None = None
    ) -> RouteExplanation | Explanation:
        """Return where the request would be prefilled and decoded now; nothing comes of it."""
        ...

    def generate(
        self,
        request: Request,
        *,
        force_route: RouteName | None = None,
        return_logits: bool = False,
    ) -> AbstractAsyncContextManager[Generation]:
        """Run `request`; leaving the block, for whatever reason, aborts it everywhere."""
        ...


NodeFactory = Callable[["NodeConfig", "Metrics", Progress], Node]
"""Load a node: blocking, called in a thread of its own. Raises ConfigError."""
