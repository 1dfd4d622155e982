"""The prefill role: computes prompts for its peers and streams their KV out as it is made."""

import asyncio
from collections.abc import Iterable

from aiohttp import web

from prfaas.cache.changes import ChangeLog
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout
from prfaas.clock import Clock
from prfaas.config.options import NodeConfig, Role
from prfaas.scheduler.heartbeat import Mode
from prfaas.scheduler.profile import Prior
from prfaas.server.engine_thread import EngineThread, StepEngine
from prfaas.server.member import Member, member_of
from prfaas.server.node import NodeLoad, Progress
from prfaas.server.node_load import node_load
from prfaas.server.prefill_service import PrefillService
from prfaas.server.prefix_finder import PrefixFinder
from prfaas.server.prior import expected_tokens_per_s, read_prior
from prfaas.server.transfer_metrics import TransferMetrics
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.handshake import Identity
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import check_bind, peer_security
from prfaas.transport.tcpinfo import check_congestion


class PrefillNode:
    """A node of the prefill role: an engine, and the service that its peers ask."""

    role: Role = "prefill"

    def __init__(
        self,
        *,
        identity: Identity,
        cache: PrefixCache,
        engine: StepEngine,
        options: TransportOptions,
        vocab_size: int,
        max_context_tokens: int,
        metrics: TransferMetrics,
        clock: Clock,
        cluster_key: ClusterKey | None = None,
        prior: Prior | None = None,
    ) -> None:
        self.max_context_tokens = max_context_tokens
        self.mode: Mode = "prefill"
        self.member: Member | None = None
        """Its place in a fleet, if it is in one; set before it is started."""
        self._member_task: asyncio.Task[None] | None = None
        self._identity = identity
        self._cache = cache
        self._engine = EngineThread(engine, clock=clock, name="prefill-engine")
        self._finder = PrefixFinder(cache, clock=clock)
        self.service = PrefillService(
            identity=identity,
            cache=cache,
            engine=self._engine,
            finder=self._finder,
            options=options,
            vocab_size=vocab_size,
            max_context_tokens=max_context_tokens,
            metrics=metrics,
            clock=clock,
            cluster_key=cluster_key,
            expected_tokens_per_s=expected_tokens_per_s(prior),
        )

    @property
    def identity(self) -> Identity:
        """What a peer must share with this node."""
        return self._identity

    @property
    def layout(self) -> CacheLayout:
        """How the node's KV is cut into pages."""
        return self._cache.layout

    @property
    def changes(self) -> ChangeLog | None:
        """Which blocks its cache can serve; None where nobody wants to know."""
        return self._cache.changes

    def set_mode(self, mode: Mode) -> None:
        """Do nothing: the role has one mode."""

    def keep_peers(self, names: Iterable[str]) -> None:
        """Do nothing: peers come to it."""

    @property
    def is_ready(self) -> tuple[bool, str]:
        """(False, why) while prompts cannot be computed or are not taken."""
        return self.service.is_ready

    def load(self) -> NodeLoad:
        """Return how busy the node is."""
        return node_load(
            self._engine,
            self._cache,
            num_transfers=self.service.num_transfers,
            links=self.service.links,
            member=None if self.member is None else self.member.view(),
        )

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the KV channel."""
        return self.service.routes()

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the engine thread; transfers run in `tasks`."""
        self.service.start(tasks)
        self._engine.start()
        if self.member is not None:
            self._member_task = tasks.create_task(self.member.run())

    def drain(self) -> None:
        """Take no new prompts; running transfers go on."""
        if self.member is not None:
            self.member.drain()
        self.service.drain()

    async def close(self) -> None:
        """End all transfers and both threads. Idempotent."""
        if self.member is not None:
            if self._member_task is not None:
                self._member_task.cancel()
                await asyncio.wait({self._member_task})
            await self.member.leave()
        await self.service.close()
        await self._engine.stop()
        await self._finder.close()


def load_prefill_node(
    config: NodeConfig, metrics: TransferMetrics, progress: Progress
) -> PrefillNode:
    """Load a node of the prefill role. Blocking; raises ConfigError."""
    check_bind(config.http.host, config.transport)
    if config.transport.tcp_congestion is not None:
        check_congestion(config.transport.tcp_congestion)
    security = peer_security(config.transport)
    from prfaas.server.load_parts import load_parts  # slow to import

    parts = load_parts(config, progress)
    node = PrefillNode(
        identity=parts.identity,
        cache=parts.cache,
        engine=parts.runner,
        options=config.transport,
        vocab_size=parts.vocab_size,
        max_context_tokens=parts.runner.max_context_tokens,
        metrics=metrics,
        clock=parts.clock,
        cluster_key=security.cluster_key,
        prior=read_prior(config, parts.cache.layout),
    )
    node.member = member_of(node, config)
    return node
