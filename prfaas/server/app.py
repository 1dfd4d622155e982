"""A node's whole life: the port, the load, the service, the drain.

Stop order: refuse, drain, flush, close. The first SIGTERM or SIGINT begins it, a second one ends the
drain at once.
"""

import asyncio
import secrets
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from prfaas import __version__
from prfaas.clock import Clock, monotonic_s, wall_s
from prfaas.config.options import NodeConfig
from prfaas.errors import BadRequest, ConfigError, Overloaded
from prfaas.log import get_logger
from prfaas.server.answering import Answerer
from prfaas.server.api_keys import api_keys
from prfaas.server.connection import tracking
from prfaas.server.failures import error_response, first_leaf
from prfaas.server.handlers import Handlers
from prfaas.server.jobs import JobMaker
from prfaas.server.lifecycle import Lifecycle
from prfaas.server.listening import Listener, bind_socket
from prfaas.server.loading import Loading
from prfaas.server.metrics import Metrics
from prfaas.server.middleware import (
    add_headers,
    answering_errors,
    answering_preflight,
    checking_key,
    counting,
    draw_request_id,
)
from prfaas.server.node import Node, NodeFactory, ServingNode
from prfaas.server.node_routes import DirectedNode, NodeRoutes
from prfaas.server.probes import Probes
from prfaas.server.records import RecordRing
from prfaas.transport.answers import MAX_BODY_BYTES
from prfaas.transport.fleet_messages import FLEET_PREFIX
from prfaas.transport.security import check_bind, peer_tls

DRAIN_POLL_S = 0.05
FLUSH_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 120.0
"""A node's own time-outs are shorter: this one is for a loop that would never end."""
NUM_TEXT_THREADS = 2
KV_PREFIX = "/kv/v1/"

log = get_logger()


class StopSignals:
    """SIGTERM and SIGINT: the first asks for a drain, the second for an end."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.on_first: Callable[[], None] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take both signals for the length of the block."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.receive)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def receive(self) -> None:
        """Take one signal."""
        if self.first.is_set():
            self.second.set()
            return
        self.first.set()
        if self.on_first is not None:
            self.on_first()


async def serve(
    node_factory: NodeFactory,
    config: NodeConfig,
    *,
    on_ready: Callable[[Node, Sequence[str]], None] | None = None,
    clock: Clock = monotonic_s,
    wall: Clock = wall_s,
) -> None:
    """Run a node until it is told to stop; returns after a clean stop.

    The port is bound before the node is loaded. `on_ready` is called on the loop once /ready says
    200, with the node and its routes as "METHOD /path".

    Raises:
        ConfigError: the port or the model cannot be used.
    """
    options = config.http
    if options.port is None:
        raise ConfigError("http.port is not set")
    tls = None
    if config.role != "pd" or config.fleet.scheduler is not None:  # other nodes come to this port
        check_bind(options.host, config.transport)
        # Who calls the API has no certificate: there it is the cluster key alone that proves a node.
        tls = peer_tls(config.transport, demands_certificate=config.role == "prefill")
    lifecycle = Lifecycle()
    metrics = Metrics(version=__version__, role=config.role)
    stop = StopSignals()
    face = Face(config, lifecycle, metrics, clock=clock, wall=wall)
    listener_socket = bind_socket(options.host, options.port)
    with face, stop.installed():
        async with Listener(listener_socket, options, tls) as listener:
            await listener.show(face.loading_app())
            loading = Loading(
                lambda progress: node_factory(config, metrics, progress), lifecycle.note_progress
            )
            stop.on_first = loading.stop
            node = cast("Node | None", await loading.run(stop_timeout_s=options.drain_timeout_s))
            if node is not None and stop.first.is_set():  # loaded, but too late to serve
                await node.close()
            elif node is not None:
                await _run(node, face, listener, stop, on_ready)
    log.info("node.stopped", role=config.role)


async def _run(
    node: Node,
    face: "Face",
    listener: Listener,
    stop: StopSignals,
    on_ready: Callable[[Node, Sequence[str]], None] | None,
) -> None:
    """Serve with a loaded node until a signal, then stop in order."""
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                await node.start(tasks)
                app = face.node_app(node)
                await listener.show(app)
                face.start_serving(node)
                log.info("node.ready", role=node.role)
                if on_ready is not None:
                    on_ready(node, route_names(app))
                await stop.first.wait()
                await face.drain(node, stop.second)
            finally:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await node.close()
            await face.flush()
    except BaseExceptionGroup as group:
        raise first_leaf(group) from None


class Face:
    """The applications that a node shows at the stages of its life, and the state they share."""

    def __init__(
        self,
        config: NodeConfig,
        lifecycle: Lifecycle,
        metrics: Metrics,
        *,
        clock: Clock = monotonic_s,
        wall: Clock = wall_s,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._clock = clock
        self._wall = wall
        self._draw_seed = draw_seed
        self._keys = api_keys(config.http)
        self._records = RecordRing()
        self._executor = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="prfaas-text")

    def __enter__(self) -> "Face":
        return self

    def __exit__(self, *error: object) -> None:
        """End the threads that tokenise."""
        self._executor.shutdown(cancel_futures=True)

    def loading_app(self) -> web.Application:
        """Return what is served while there is no node: probes, and 503 for the rest.

        Its connections end with each answer: the next one is the node's.
        """

        async def not_yet(_request: web.Request) -> web.Response:
            _, reason = self._lifecycle.readiness()
            return error_response(Overloaded(f"not ready: {reason}", retry_after_s=5.0))

        @web.middleware
        async def end_connection(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = await handler(request)
            response.force_close()
            return response

        return self._app([web.route("*", "/{path:.*}", not_yet)], end_connection)

    def node_app(self, node: Node) -> web.Application:
        """Return what is served with `node`."""
        if self._config.role == "prefill":
            api: list[web.AbstractRouteDef] = [web.route("*", "/v1/{path:.*}", self._wrong_role)]
        else:
            api = self._handlers(cast("ServingNode", node)).routes()
        if self._config.role == "pd" and self._config.fleet.scheduler is not None:
            api += self._node_routes(cast("DirectedNode", node)).routes()
        return self._app([*node.routes(), *api])

    def start_serving(self, node: Node) -> None:
        """Let requests in from now on; its application must be shown already."""
        self._metrics.watch(node.load)
        self._lifecycle.start_serving(lambda: node.is_ready)

    def _app(
        self, routes: Iterable[web.AbstractRouteDef], *outermost: Middleware
    ) -> web.Application:
        options = self._config.http
        middlewares = [
            *outermost,
            tracking,
            counting(self._metrics),
            answering_errors(draw_request_id),
            answering_preflight(options),
        ]
        if self._keys is not None:
            middlewares.append(checking_key(self._keys, (KV_PREFIX, FLEET_PREFIX)))
        # Handlers of the API hold their own limit; this is for what nodes say to each other.
        max_bytes = max(options.max_body_bytes, MAX_BODY_BYTES)
        app = web.Application(middlewares=middlewares, client_max_size=max_bytes)
        app.add_routes(Probes(self._lifecycle, self._metrics).routes())
        app.add_routes(routes)
        app.on_response_prepare.append(add_headers(options))
        return app

    def _node_routes(self, node: DirectedNode) -> NodeRoutes:
        return NodeRoutes(
            node,
            lifecycle=self._lifecycle,
            metrics=self._metrics,
            records=self._records,
            clock=self._clock,
            write_timeout_s=self._config.http.read_timeout_s,
        )

    def _handlers(self, node: ServingNode) -> Handlers:
        model_name = served_name(self._config)
        return Handlers(
            node=node,
            jobs=JobMaker(
                node=node, model_name=model_name, draw_seed=self._draw_seed, wall=self._wall
            ),
            answerer=Answerer(
                node=node,
                metrics=self._metrics,
                records=self._records,
                clock=self._clock,
                write_timeout_s=self._config.http.read_timeout_s,
                heartbeat_s=self._config.http.heartbeat_s,
            ),
            records=self._records,
            lifecycle=self._lifecycle,
            options=self._config.http,
            executor=self._executor,
            clock=self._clock,
            model_name=model_name,
            created_s=int(self._wall()),
        )

    async def _wrong_role(self, request: web.Request) -> web.Response:
        raise BadRequest(
            f"this node has the role {self._config.role}, which serves KVCache to other nodes;"
            " /v1 is served by nodes of the roles pd and scheduler",
            code="wrong_role",
            status=404,
        )

    async def drain(self, node: Node, forced: asyncio.Event) -> None:
        """Let nobody in; return when all are out, at the drain time-out, or when forced."""
        self._lifecycle.start_draining()
        node.drain()
        deadline_s = self._clock() + self._config.http.drain_timeout_s
        log.info("drain.started", num_requests=self._lifecycle.num_inside)
        while self._lifecycle.num_inside or node.load().num_transfers:
            if forced.is_set() or self._clock() >= deadline_s:
                log.warning("drain.cut_short", num_requests=self._lifecycle.num_inside)
                return
            try:
                async with asyncio.timeout(DRAIN_POLL_S):
                    await forced.wait()
            except TimeoutError:
                continue

    async def flush(self) -> None:
        """Give the answers that a closed node cut short the time to say so."""
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._lifecycle.wait_empty()
        except TimeoutError:
            log.warning("flush.cut_short", num_requests=self._lifecycle.num_inside)


def route_names(app: web.Application) -> list[str]:
    """Return the routes as "METHOD /path", without the HEAD that comes with each GET."""
    return [
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    ]


def served_name(config: NodeConfig) -> str:
    """Return what clients call the model; a replayed one by default as its profile's file."""
    options = config.model
    if options.served_model_name is not None:
        return options.served_model_name
    if config.engine.kind == "replay" and config.engine.profile is not None:
        return Path(config.engine.profile).stem
    path = Path(options.model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else options.model
