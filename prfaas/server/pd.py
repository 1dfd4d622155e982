"""The pd role: short prompts are prefilled here, long ones by the peer; decoding is always here.

No request fails because a peer or a link did, and a token that the client has got is continued,
never drawn again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout
from prfaas.clock import Clock
from prfaas.config.options import NodeConfig, Role
from prfaas.engine.submission import FirstLogits, Submission
from prfaas.errors import BadRequest, EngineError, PrfaasError
from prfaas.log import get_logger
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.profile import Prior
from prfaas.scheduler.router import Router
from prfaas.server.directions import Directions
from prfaas.server.engine_thread import EngineThread, StepEngine
from prfaas.server.filling import PromptFiller, TableHold
from prfaas.server.generation import RunningGeneration
from prfaas.server.node import NodeLoad, Progress
from prfaas.server.node_load import node_load
from prfaas.server.peer import Peer
from prfaas.server.prefix_finder import PrefixFinder
from prfaas.server.prior import read_prior
from prfaas.server.remote_prefill import RemotePrefiller
from prfaas.server.routing import PromptRouter
from prfaas.server.transfer_metrics import TransferMetrics
from prfaas.text.chat_template import ChatTemplate
from prfaas.text.tokenizer import Tokenizer
from prfaas.transport.address import parse_address
from prfaas.transport.handshake import Identity
from prfaas.transport.messages import CodecName
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity, asker_security
from prfaas.transport.tcpinfo import check_congestion
from prfaas.types import Request, RequestEnded, RouteName, TokenEvent

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
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.max_context_tokens = max_context_tokens
        self.peer: Peer | None = None
        self._identity = identity
        self._cache = cache
        self._engine = EngineThread(engine, clock=clock, name="pd-engine")
        self._options = options
        self._vocab_size = vocab_size
        self._is_exact = is_exact
        self._security = security
        self._metrics = metrics
        self._clock = clock
        self._finder = PrefixFinder(cache, clock=clock)
        self._address = None if options.peer is None else parse_address(options.peer)
        self._prior = prior
        self._router = Router(
            peers=() if self._address is None else (str(self._address),),
            options=scheduler,
            expected_link=None if prior is None else prior.link,
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._filler: PromptFiller | None = None
        self._peer_task: asyncio.Task[None] | None = None
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
    def is_ready(self) -> tuple[bool, str]:
        """(False, why) while the engine cannot serve; a missing peer is no reason."""
        return self._engine.is_ready

    def load(self) -> NodeLoad:
        """Return how busy the node is."""
        peer = self.peer
        return node_load(
            self._engine,
            self._cache,
            num_transfers=0 if peer is None else self._router.peer(peer.name).num_inflight,
            peers_usable={} if peer is None else {peer.name: peer.is_usable},
            peers_by_http={} if peer is None else {peer.name: peer.client.uses_http},
            links={} if peer is None else peer.links.views,
        )

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the engine thread and the handshakes; every task is put into `tasks`."""
        self._tasks = tasks
        self._engine.start()
        prefiller = None
        if self._address is not None:
            self.peer = Peer(
                self._address,
                options=self._options,
                identity=self._identity,
                router=self._router,
                clock=self._clock,
                security=self._security,
            )
            self._peer_task = self._spawn(self.peer.run())
            prefiller = RemotePrefiller(
                peer=self.peer,
                identity=self._identity,
                layout=self._cache.layout,
                vocab_size=self._vocab_size,
                options=self._options,
                metrics=self._metrics,
                clock=self._clock,
                spawn=self._spawn,
            )
        self._filler = PromptFiller(
            finder=self._finder,
            router=PromptRouter(
                router=self._router,
                engine=self._engine,
                layout=self._cache.layout,
                clock=self._clock,
                prior=self._prior,
            ),
            peer=self.peer,
            prefiller=prefiller,
            codec=self._options.kv_codec,
        )

    def drain(self) -> None:
        """Let the engine work for its requests alone; this node takes no work from peers."""
        self._engine.drain()

    async def close(self) -> None:
        """Abort what still runs and end every task and thread. Idempotent."""
        for task in self._drivers:
            task.cancel()
        if self._peer_task is not None:
            self._peer_task.cancel()
        while self._running:  # a cancelled request may still tell the peer so
            await asyncio.wait(set(self._running))
        await self._engine.stop()
        await self._finder.close()
        if self.peer is not None:
            await self.peer.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "not started"
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    # ------------------------------------------------------------ a request's life

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
        per choice, were drawn elsewhere: the answer goes on behind them and does not repeat them. The prompt's and the answer's pages are let go before the block is left, except for those
        that the engine has in hand: within a step.
        """
        generation = RunningGeneration(
            self._within_context(request),
            clock=self._clock,
            is_exact=self._is_exact,
            drawn_tokens=drawn_tokens,
        )
        driver = self._spawn(self._drive(generation, force_route, return_logits, directions))
        self._drivers.add(driver)
        driver.add_done_callback(self._drivers.discard)
        try:
            yield generation
        finally:
            driver.cancel()
            await asyncio.wait({driver}, timeout=CLEANUP_TIMEOUT_S)

    def _within_context(self, request: Request) -> Request:
        """Return the request asking for no more than the context takes, for us and for a peer."""
        room_tokens = max(1, self.max_context_tokens - len(request.prompt_tokens))
        sampling = request.sampling
        if sampling.max_tokens <= room_tokens:
            return request
        return replace(request, sampling=replace(sampling, max_tokens=room_tokens))

    async def _drive(
        self,
        generation: RunningGeneration,
        force_route: RouteName | None,
        return_logits: bool,
        directions: Directions | None,
    ) -> None:
        try:
            self._check(generation)
            if generation.is_answered:  # elsewhere
                return
            assert self._filler is not None, "not started"
            with TableHold() as hold:
                salt = await self._filler.fill(
                    generation, hold, force_route=force_route, want_logits=return_logits
                )
                if not generation.is_answered:
                    await self._decode(generation, hold, salt, return_logits)
        except asyncio.CancelledError:  # by `close`: whoever iterates must hear of it
            generation.fail(EngineError("the node is closing"))
            raise
        except PrfaasError as error:
            generation.fail(error)
        except Exception:  # noqa: BLE001  # one request's bug must not end the node
            get_logger().exception("request.crashed", request_id=generation.request.request_id)
            generation.fail(EngineError("internal error"))

    def _check(self, generation: RunningGeneration) -> None:
        request = generation.request
        num_tokens = len(request.prompt_tokens)
        if num_tokens >= self.max_context_tokens:
            raise BadRequest(
                f"the prompt has {num_tokens} tokens; the context is "
                f"{self.max_context_tokens} tokens with at least one for the answer",
                code="context_length_exceeded",
            )
        if not num_tokens:
            raise BadRequest("the prompt is empty")
        drawn = [token for tokens in generation.drawn_tokens for token in tokens]
        if drawn and not 0 <= min(drawn) <= max(drawn) < self._vocab_size:
            raise BadRequest(f"a drawn token is outside 0..{self._vocab_size - 1}")

    async def _decode(
        self, generation: RunningGeneration, hold: TableHold, salt: bytes, return_logits: bool
    ) -> None:
        """Continue behind the table with the engine, from what was drawn already.

        `salt` is that of the table's keys.
        """
        request_id, record = generation.request.request_id, generation.record
        table = hold.hand_over()
        hit_tokens = table.hit_tokens
        stream = self._engine.submit(
            Submission(
                request=replace(generation.request, cache_salt=salt),
                table=table,
                forced_tokens=generation.drawn_tokens if generation.has_drawn else (),
                return_logits=return_logits and generation.first_logits is None,
            )
        )
        generation.on_stop_choice = lambda choice: self._engine.stop_choice(request_id, choice)
        try:
            for choice in generation.stopped_choices:
                self._engine.stop_choice(request_id, choice)
            async for event in stream:
                gained_tokens = table.hit_tokens - hit_tokens  # published while the prompt waited
                hit_tokens += gained_tokens
                record.tokens_reused += gained_tokens
                record.tokens_local -= gained_tokens
                match event:
                    case TokenEvent():
                        generation.put(event)
                    case FirstLogits():
                        generation.first_logits = event.logits
                    case RequestEnded():
                        break
        finally:
            generation.on_stop_choice = None
            self._engine.abort(request_id)
        if not generation.is_answered:
            raise EngineError("the request was aborted")


def load_pd_node(config: NodeConfig, metrics: TransferMetrics, progress: Progress) -> PdNode:
    """Load a node of the pd role. Blocking; raises ConfigError."""
    security = asker_security(config.transport)
    if config.transport.tcp_congestion is not None:
        check_congestion(config.transport.tcp_congestion)
    from prfaas.server.load_parts import load_parts  # slow to import

    parts = load_parts(config, progress)
    return PdNode(
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
    )
