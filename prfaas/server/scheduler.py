"""The scheduler role: a node that serves the API and whose engine is a fleet.

It tokenises once, says where each request is prefilled and decoded, and relays what the nodes draw. It
holds no KV and no weights.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from prfaas.clock import Clock, monotonic_s
from prfaas.config.options import NodeConfig, Role
from prfaas.errors import EngineError, PrfaasError
from prfaas.log import get_logger
from prfaas.models.store import resolve
from prfaas.scheduler.explaining import Explanation
from prfaas.scheduler.fleet import Fleet, Member
from prfaas.scheduler.heartbeat import PERIOD_S
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.standing import FleetLimits
from prfaas.server.fleet_driver import FleetDriver
from prfaas.server.fleet_routes import FleetRoutes
from prfaas.server.fleet_view import FleetView
from prfaas.server.generation import RunningGeneration
from prfaas.server.node import NodeLoad, Progress
from prfaas.server.node_links import NodeLinks
from prfaas.server.relay import Relay
from prfaas.server.transfer_metrics import TransferMetrics
from prfaas.text.byte_tokenizer import byte_tokenizer
from prfaas.text.chat_template import ChatTemplate
from prfaas.text.tokenizer import Tokenizer
from prfaas.transport.auth import PeerSide
from prfaas.transport.gate import Gate
from prfaas.transport.handshake import Identity
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity, asker_security
from prfaas.types import Request, RouteName

CLEANUP_TIMEOUT_S = 5.0
MAX_NODE_SESSIONS = 4096
"""Four times the nodes of the largest fleet: each one has one, and another after each of its starts."""


class SchedulerNode:
    """A node of the scheduler role."""

    role: Role = "scheduler"

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        options: TransportOptions,
        scheduler: SchedulerOptions,
        clock: Clock,
        security: ChannelSecurity | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._options = options
        self._scheduler = scheduler
        self._clock = clock
        security = security or ChannelSecurity()
        self._links = NodeLinks(options, security)
        self.driver = FleetDriver(
            fleet=Fleet(scheduler),
            tokenizer_fingerprint=tokenizer.fingerprint,
            template_fingerprint=chat_template.fingerprint,
            accept_approximate=options.accept_numerics == "approximate",
            clock=clock,
            on_forgotten=self._links.forget,
        )
        key = security.cluster_key
        side = None
        if key is not None:
            side = PeerSide(
                key,
                identity=self.identity,
                epoch=secrets.token_hex(32),
                max_sessions=MAX_NODE_SESSIONS,
            )
        self._routes = FleetRoutes(self.driver, Gate(side))
        self._tasks: asyncio.TaskGroup | None = None
        self._look_task: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._relays: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ a node's life

    @property
    def identity(self) -> Identity:
        """What the fleet computes; before it has a node, what the scheduler alone knows of that."""
        return self.driver.identity or Identity(
            model_fingerprint="",
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            template_fingerprint=self.chat_template.fingerprint,
            kv_dtype="",
            block_tokens=0,
            layout="",
            numerics_fingerprint="",
        )

    @property
    def max_context_tokens(self) -> int:
        """Prompt plus completion, on any node of the fleet."""
        return self.driver.max_context_tokens

    @property
    def is_ready(self) -> tuple[bool, str]:
        """(False, why) while no node of the fleet can decode, and none may soon."""
        return self.driver.is_ready

    def load(self) -> NodeLoad:
        """Return how many requests are on their way, and how the fleet is."""
        return NodeLoad(num_running=len(self._relays), fleet=self._fleet_view())

    def _fleet_view(self) -> FleetView:
        fleet, members = self.driver.fleet, self.members()
        clusters = {each.heartbeat.cluster for each in members if each.heartbeat.role == "pd"}
        return FleetView(
            members=members,
            threshold_tokens={each: fleet.threshold_tokens(each) for each in sorted(clusters)},
            policy=self._scheduler.policy_in_force,
            egress_target=self._scheduler.egress_target,
            num_keys=self.driver.num_keys,
            num_conversions=self.driver.num_conversions,
        )

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return the routes for the fleet's nodes."""
        return self._routes.routes()

    def members(self) -> tuple[Member, ...]:
        """Return what is known of every node now."""
        return self.driver.fleet.members(self._clock())

    async def explain(self, request: Request, force_route: RouteName | None = None) -> Explanation:
        """Return where the request would be placed now, and among which nodes; nothing is run."""
        keys = await self.driver.keys(request)
        hits = await self.driver.hits(keys)
        wanted = self.driver.wanted(request, hits, force=force_route)
        return self.driver.fleet.explain(wanted, self._clock())

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to look after the fleet; every task is put into `tasks`."""
        self._tasks = tasks
        self._look_task = self._spawn(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.driver.look()
            await self._links.sweep()

    def drain(self) -> None:
        """Nodes are heard on: what runs may still need them."""

    async def close(self) -> None:
        """Abort what still runs and end every task and thread. Idempotent."""
        for task in self._relays:
            task.cancel()
        if self._look_task is not None:
            self._look_task.cancel()
        while self._running:
            await asyncio.wait(set(self._running))
        await self._links.close()
        self.driver.close()

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
    ) -> AsyncIterator[RunningGeneration]:
        """Run `request` on the fleet; leaving the block, for whatever reason, aborts it everywhere."""
        generation = RunningGeneration(request, clock=self._clock)
        relay = Relay(
            generation,
            driver=self.driver,
            links=self._links,
            clock=self._clock,
            spawn=self._spawn,
            silence_s=self._options.stall_timeout_s,
            patience_s=self._scheduler.placement_timeout_s,
            force_route=force_route,
            return_logits=return_logits,
        )
        task = self._spawn(self._drive(generation, relay))
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)
        try:
            yield generation
        finally:
            if task.done():
                self._relays.discard(task)  # the callback has its turn later
            else:
                task.cancel()
                await asyncio.wait({task}, timeout=CLEANUP_TIMEOUT_S)
            generation.close()

    async def _drive(self, generation: RunningGeneration, relay: Relay) -> None:
        try:
            await relay.run()
        except asyncio.CancelledError:  # by `close`: whoever iterates must hear of it
            generation.fail(EngineError("the scheduler is closing"))
            raise
        except PrfaasError as error:
            generation.fail(error)
        except Exception:  # noqa: BLE001  # one request's bug must not end the node
            get_logger().exception("request.crashed", request_id=generation.request.request_id)
            generation.fail(EngineError("internal error"))


def load_scheduler_node(
    config: NodeConfig,
    metrics: TransferMetrics,
    progress: Progress,
) -> SchedulerNode:
    """Load a node of the scheduler role: tokenizer and template alone. Blocking; raises ConfigError."""
    security = asker_security(config.transport)
    if config.engine.kind == "replay":
        tokenizer, chat_template = byte_tokenizer(), ChatTemplate(None)
    else:
        progress("resolve model", 0, 1)
        model_dir = resolve(config.model.model, progress)
        progress("load tokenizer", 0, 1)
        tokenizer = Tokenizer.load(model_dir)
        override = config.model.chat_template
        chat_template = ChatTemplate.load(model_dir, None if override is None else Path(override))
    return SchedulerNode(
        tokenizer=tokenizer,
        chat_template=chat_template,
        # What a heartbeat is given an answer is given, too: a node that is only busy is not dead.
        options=replace(config.transport, stall_timeout_s=FleetLimits().dead_after_s),
        scheduler=config.scheduler,
        clock=monotonic_s,
        security=security,
    )
