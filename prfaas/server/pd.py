"""The pd role: short prompts are prefilled here, long ones by a peer; decoding is always here.

In a fleet it also serves its peers as a prefill node does, and its mode says which of both it does. No
request fails because a peer or a link did, and a token that the client has got is continued, never drawn again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from prfaas.cache.changes import ChangeLog
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout
from prfaas.clock import Clock
from prfaas.config.advertised import advertised
from prfaas.config.options import NodeConfig, Role
from prfaas.engine.options import EngineOptions
from prfaas.errors import Overloaded
from prfaas.log import get_logger
from prfaas.scheduler.heartbeat import Mode
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.profile import Prior
from prfaas.scheduler.router import Router
from prfaas.server.adapting import Adapting
from prfaas.server.directions import Directions
from prfaas.server.driver_parts import make_driver
from prfaas.server.engine_thread import EngineThread, StepEngine
from prfaas.server.explaining import RouteExplanation
from prfaas.server.fleet_view import RoutingView
from prfaas.server.generation import RunningGeneration
from prfaas.server.member import Member, member_of
from prfaas.server.node import NodeLoad, Progress
from prfaas.server.node_load import node_load
from prfaas.server.peer import Peer
from prfaas.server.peers import Peers, parse_peers
from prfaas.server.prefill_service import PrefillService
from prfaas.server.prefix_finder import PrefixFinder
from prfaas.server.prior import expected_tokens_per_s, read_prior
from prfaas.server.transfer_metrics import TransferMetrics
from prfaas.text.chat_template import ChatTemplate
from prfaas.text.tokenizer import Tokenizer
from prfaas.transport.gate import Gate
from prfaas.transport.handshake import Identity
from prfaas.transport.messages import CodecName
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity, asker_security, check_bind
from prfaas.transport.tcpinfo import check_congestion
from prfaas.types import Request, RouteName

if TYPE_CHECKING:
    from prfaas.server.request_driver import RequestDriver

CLEANUP_TIMEOUT_S = 5.0


class PdNode:
    """A node of the pd role."""

    role: Role = "pd"

    def __init__(
        self,
        *,
        identity: Identity,
        cache: PrefixCache,
        engine: StepEngine,
        options: TransportOptions,
        scheduler: SchedulerOptions,
        vocab_size: int,
        max_context_tokens: int,
        metrics: TransferMetrics,
        clock: Clock,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        is_exact: bool = True,
        security: ChannelSecurity | None = None,
        prior: Prior | None = None,
        serves_kv: bool = False,
        mode: Mode = "both",
        address: str | None = None,
        engine_options: EngineOptions | None = None,
    ) -> None:
        """Make a node that is not started.

        Args:
            identity: what its peers must share.
            cache: the engine's.
            engine: stepped by a thread of the node.
            options: of the KV channel, with its peers.
            scheduler: how it routes where nobody directs it.
            vocab_size: of the model.
            max_context_tokens: prompt plus completion.
            metrics: told of transfers.
            clock: the engine's and the router's.
            tokenizer: the model's.
            chat_template: the model's.
            is_exact: the same tokens give the same bits, whatever is computed beside them.
            security: what it shows to peers and demands of them.
            prior: what a profile says of its engine and its link.
            serves_kv: peers may ask it for KV.
            mode: what it does at first, if it serves KV.
            address: what other nodes call it.
            engine_options: the engine's; None are the defaults.
        """
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.max_context_tokens = max_context_tokens
        self.mode: Mode = mode
        """Whether it answers prompts, computes KV for its peers, or both."""
        self._identity = identity
        self._cache = cache
        self._engine = EngineThread(engine, clock=clock, name="pd-engine")
        self._options = options
        self._vocab_size = vocab_size
        self._is_exact = is_exact
        self._security = security or ChannelSecurity()
        self._metrics = metrics
        self._clock = clock
        self._finder = PrefixFinder(cache, clock=clock)
        self._given_peers = parse_peers(options.peer)
        self._prior = prior
        self._address = address
        self._router = Router(
            peers=tuple(map(str, self._given_peers)),
            options=scheduler,
            expected_link=None if prior is None else prior.link,
        )
        self.service: PrefillService | None = None
        """What its peers ask, if they may."""
        if serves_kv:
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
                cluster_key=self._security.cluster_key,
                expected_tokens_per_s=expected_tokens_per_s(prior),
                refusal=lambda: "decodes alone" if self.mode == "decode" else None,
            )
        self.member: Member | None = None
        """Its place in a fleet, if it is in one; set before it is started."""
        self._adapting = Adapting(
            router=self._router,
            engine=self._engine,
            engine_options=engine_options or EngineOptions(),
            layout=cache.layout,
            clock=clock,
            prior=prior,
        )
        self._background: list[asyncio.Task[None]] = []
        self._tasks: asyncio.TaskGroup | None = None
        self._driver: RequestDriver | None = None
        self._peers: Peers | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._drivers: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ a node's life

    @property
    def identity(self) -> Identity:
        """What a peer must share with this node."""
        return self._identity

    @property
    def kv_codec(self) -> CodecName:
        """How the peer may encode pages."""
        return self._options.kv_codec

    @property
    def layout(self) -> CacheLayout:
        """How the node's KV is cut into pages."""
        return self._cache.layout

    @property
    def changes(self) -> ChangeLog | None:
        """Which blocks its cache can serve; None where nobody wants to know."""
        return self._cache.changes

    @property
    def gate(self) -> Gate:
        """Who may use the routes that only its fleet may use. It serves KV."""
        assert self.service is not None, "a node on its own"
        return self.service.gate

    @property
    def is_ready(self) -> tuple[bool, str]:
        """(False, why) while the engine cannot serve; a missing peer is no reason."""
        return self._engine.is_ready

    @property
    def peers(self) -> Peers:
        """The nodes that it exchanges KV with. The node is started."""
        assert self._peers is not None, "not started"
        return self._peers

    @property
    def peer(self) -> Peer | None:
        """The first peer that it was given, once it is started."""
        return None if self._peers is None else self._peers.first

    def load(self) -> NodeLoad:
        """Return how busy the node is."""
        peers = () if self._peers is None else self._peers.all
        links = {} if self._peers is None else self._peers.links
        num_served = 0
        if self.service is not None:
            links = {**self.service.links, **links}
            num_served = self.service.num_transfers
        return node_load(
            self._engine,
            self._cache,
            num_transfers=num_served + sum(peer.num_transfers for peer in peers),
            peers_usable={peer.name: peer.is_usable for peer in peers},
            peers={peer.name: peer.view for peer in peers},
            routing=RoutingView(
                policy=self._router.options.policy_in_force,
                threshold_tokens=self._router.threshold_tokens,
                egress_target=self._router.options.egress_target,
                prefill_share=self._adapting.prefill_share,
            ),
            member=None if self.member is None else self.member.view(),
            peers_by_http={peer.name: peer.client.uses_http for peer in peers},
            links=links,
        )

    def routes(self) -> list[web.RouteDef]:
        """Return what it serves to other nodes: the KV channel, where it is in a fleet."""
        return [] if self.service is None else self.service.routes()

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the engine thread and the handshakes; every task is put into `tasks`."""
        self._tasks = tasks
        self._engine.start()
        if self.service is not None:
            self.service.start(tasks)
        self._peers = Peers(
            self._given_peers,
            options=self._options,
            identity=self._identity,
            router=self._router,
            clock=self._clock,
            spawn=self._spawn,
            security=self._security,
        )
        self._driver = make_driver(
            identity=self._identity,
            layout=self._cache.layout,
            options=self._options,
            vocab_size=self._vocab_size,
            max_context_tokens=self.max_context_tokens,
            engine=self._engine,
            finder=self._finder,
            adapting=self._adapting,
            peers=self._peers,
            metrics=self._metrics,
            clock=self._clock,
            spawn=self._spawn,
            router=self._router,
            prior=self._prior,
            address=self._address,
        )
        self._background = [self._spawn(self._adapting.run())]
        if self.member is not None:
            self._background.append(self._spawn(self.member.run()))

    def keep_peers(self, names: Iterable[str]) -> None:
        """Keep connections to these nodes, beside those that it was given."""
        self.peers.keep(names)

    def set_mode(self, mode: Mode) -> None:
        """Answer prompts, compute KV for peers, or both, from now on; what runs goes on to its end."""
        if mode != self.mode:
            get_logger().info("node.converted", mode=mode, was=self.mode)
        self.mode = mode

    def drain(self) -> None:
        """Let the engine work for its requests alone; this node takes no work from peers."""
        if self.member is not None:
            self.member.drain()
        if self.service is not None:
            self.service.drain()

    async def close(self) -> None:
        """Abort what still runs and end every task and thread. Idempotent."""
        for task in (*self._background, *self._drivers):
            task.cancel()
        if self.member is not None:
            if self._background:
                await asyncio.wait(self._background)
            await self.member.leave()
        if self._peers is not None:
            self._peers.stop()
        if self.service is not None:
            await self.service.close()
        while self._running:  # a cancelled request may still tell the peer so
            await asyncio.wait(set(self._running))
        await self._engine.stop()
        await self._finder.close()
        if self._peers is not None:
            await self._peers.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "not started"
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    # ------------------------------------------------------------ a request's life

    async def explain(
        self, request: Request, force_route: RouteName | None = None
    ) -> RouteExplanation:
        """Return where the request would be prefilled now, and what else there is; nothing comes of it."""
        assert self._driver is not None, "not started"
        return await self._driver.explain(request, force_route)

    @contextlib.asynccontextmanager
    async def generate(
        self,
        request: Request,
        *,
        force_route: RouteName | None = None,
        return_logits: bool = False,
        directions: Directions | None = None,
        drawn_tokens: tuple[tuple[int, ...], ...] = (),
    ) -> AsyncIterator[RunningGeneration]:
        """Run `request`; leaving the block, for whatever reason, aborts it everywhere.

        With `directions` they decide where it is prefilled, else this node's router does. `drawn_tokens`,
        per choice, were drawn elsewhere: the answer goes on behind them and does not repeat them. Raises
        Overloaded where the node's mode is to answer none. The pages of prompt and answer are let go before
        the block is left, except for those that the engine has in hand: within a step.
        """
        generation = RunningGeneration(
            self._within_context(request),
            clock=self._clock,
            is_exact=self._is_exact,
            drawn_tokens=drawn_tokens,
        )
        assert self._driver is not None, "not started"
        if self.mode == "prefill":
            raise Overloaded("converting: this node computes KV for other nodes")
        driver = self._spawn(
            self._driver.run(
                generation,
                force_route=force_route,
                return_logits=return_logits,
                directions=directions,
            )
        )
        self._drivers.add(driver)
        driver.add_done_callback(self._drivers.discard)
        try:
            yield generation
        finally:
            driver.cancel()
            await asyncio.wait({driver}, timeout=CLEANUP_TIMEOUT_S)
            generation.close()

    def _within_context(self, request: Request) -> Request:
        """Return the request asking for no more than the context takes, for us and for a peer."""
        room_tokens = max(1, self.max_context_tokens - len(request.prompt_tokens))
        sampling = request.sampling
        if sampling.max_tokens <= room_tokens:
            return request
        return replace(request, sampling=replace(sampling, max_tokens=room_tokens))


def load_pd_node(config: NodeConfig, metrics: TransferMetrics, progress: Progress) -> PdNode:
    """Load a node of the pd role. Blocking; raises ConfigError."""
    is_member = config.fleet.scheduler is not None
    if is_member:
        check_bind(config.http.host, config.transport)
    security = asker_security(config.transport)
    if config.transport.tcp_congestion is not None:
        check_congestion(config.transport.tcp_congestion)
    from prfaas.server.load_parts import load_parts  # slow to import

    parts = load_parts(config, progress)
    node = PdNode(
        identity=parts.identity,
        cache=parts.cache,
        engine=parts.runner,
        options=config.transport,
        scheduler=config.scheduler,
        vocab_size=parts.vocab_size,
        max_context_tokens=parts.runner.max_context_tokens,
        metrics=metrics,
        clock=parts.clock,
        tokenizer=parts.tokenizer,
        chat_template=parts.chat_template,
        is_exact=parts.is_exact,
        security=security,
        prior=read_prior(config, parts.cache.layout),
        serves_kv=is_member,
        mode=config.fleet.mode,
        address=advertised(config) if is_member else None,
        engine_options=config.engine,
    )
    node.member = member_of(node, config)
    return node
