"""The prefill role: computes prompts for its peers and streams their KV out as it is made."""

import asyncio

from aiohttp import web

from prfaas.cache.prefix import PrefixCache
from prfaas.clock import Clock
from prfaas.config.options import NodeConfig, Role
from prfaas.scheduler.profile import Prior
from prfaas.server.engine_thread import EngineThread, StepEngine
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
        )

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the KV channel."""
        return self.service.routes()

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the engine thread; transfers run in `tasks`."""
        self.service.start(tasks)
        self._engine.start()

    def drain(self) -> None:
        """Take no new prompts; running transfers go on."""
        self.service.drain()
        self._engine.drain()

    async def close(self) -> None:
        """End all transfers and both threads. Idempotent."""
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
    return PrefillNode(
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
