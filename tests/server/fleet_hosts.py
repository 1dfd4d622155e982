"""A whole fleet in this process: a scheduler and nodes that replay profiles, each behind its HTTP face, its own relay before it."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.cache.options import CacheOptions
from prfaas.config.options import FleetOptions, HttpOptions, NodeConfig, Role
from prfaas.engine.options import EngineOptions
from prfaas.engine.replay_options import ReplayOptions
from prfaas.scheduler.fleet import Member
from prfaas.scheduler.heartbeat import Mode
from prfaas.scheduler.options import SchedulerOptions
from prfaas.server.app import Face
from prfaas.server.lifecycle import Lifecycle
from prfaas.server.listening import Listener, bind_socket
from prfaas.server.metrics import Metrics
from prfaas.server.node import Node, NodeFactory
from prfaas.server.pd import PdNode, load_pd_node
from prfaas.server.prefill import load_prefill_node
from prfaas.server.scheduler import SchedulerNode, load_scheduler_node
from prfaas.transport.options import TransportOptions
from tests.accepting import accept_no_more
from tests.relay import READ_BYTES, Relay, tag_bytes
from tests.server.fleet import until
from tests.server.http_face import parse_events, strict_json
from tests.server.real_nodes import is_held, no_progress
from tests.server.replay_nodes import LOCAL, REMOTE

MODEL = "replayed"
FACTORIES: dict[Role, NodeFactory] = {
    "pd": load_pd_node,
    "prefill": load_prefill_node,
    "scheduler": load_scheduler_node,
}


@dataclass
class Death:
    """Of the first node that has sent so many tokens of answers to the scheduler, once."""

    after_tokens: int | None = None


class MortalRelay(Relay):
    """A node behind it can die: nothing that it sends gets through any more, and nobody reaches it."""

    def __init__(self, tag_bytes: int, death: Death) -> None:
        super().__init__(tag_bytes)
        self.is_dead = False
        self._death = death
        self._num_tokens = 0

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                writer.write(self._until_death(data))
                await writer.drain()
                if self.is_dead:
                    self.die()
                    return

    def _until_death(self, data: bytes) -> bytes:
        limit = self._death.after_tokens
        if limit is None:
            return data
        places = [match.start() for match in re.finditer(rb'\{"token"', data)]
        left = limit - self._num_tokens
        self._num_tokens += len(places)
        if len(places) <= left:
            return data
        self.is_dead, self._death.after_tokens = True, None
        return data[: places[left]]

    def die(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()


@dataclass
class Hosted:
    """One node, at its own port and behind its relay."""

    node: Node
    port: int
    relay: MortalRelay | None

    @property
    def is_dead(self) -> bool:
        return self.relay is not None and self.relay.is_dead

    @property
    def name(self) -> str:
        """What the fleet calls it."""
        assert self.relay is not None
        return f"127.0.0.1:{self.relay.port}"


class FleetHosts:
    def __init__(self, scheduler: SchedulerNode, port: int, session: aiohttp.ClientSession) -> None:
        self.scheduler = scheduler
        self.port = port
        self.nodes: list[Hosted] = []
        self.death = Death()
        self._session = session

    async def complete(
        self, prompt: list[int], *, port: int | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Return the whole answer, of the scheduler or of the node at `port`."""
        async with self._session.post(self._url(port), json=_body(prompt, fields)) as response:
            answer = strict_json(await response.read())
            assert response.status == 200, answer
        assert isinstance(answer, dict)
        return answer

    async def stream(self, prompt: list[int], **fields: Any) -> AsyncGenerator[dict[str, Any]]:
        """Give the events as they come."""
        body = _body(prompt, fields) | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._session.post(self._url(None), json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    (event,) = parse_events(f"{line.decode().strip()}\n\ndata: [DONE]\n\n")
                    yield event

    async def get(self, path: str) -> Any:
        async with self._session.get(f"http://127.0.0.1:{self.port}{path}") as response:
            return strict_json(await response.read())

    def hosted(self, name: str) -> Hosted:
        (hosted,) = (hosted for hosted in self.nodes if hosted.name == name)
        return hosted

    def member(self, hosted: Hosted) -> Member | None:
        return next((m for m in self.scheduler.members() if m.node == hosted.name), None)

    async def joined(self, hosted: Hosted) -> None:
        """Return when the scheduler would use the node and knows what its cache has."""

        def is_in() -> bool:
            member = self.member(hosted)
            return member is not None and member.state == "ready"

        await until(is_in)

    async def at_rest(self) -> None:
        """Return when nobody holds anything; check every count on the way."""
        self.scheduler.driver.fleet.check()
        for hosted in self.nodes:
            cache = hosted.node._cache  # type: ignore[attr-defined]
            await until(lambda cache=cache: not is_held(cache))  # type: ignore[misc]
            cache.check()

    def _url(self, port: int | None) -> str:
        return f"http://127.0.0.1:{port or self.port}/v1/completions"


def _body(prompt: list[int], fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8, "seed": 5, **fields}


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def story_of(answer: dict[str, Any]) -> dict[str, Any]:
    story = answer["usage"]["prfaas"]
    assert isinstance(story, dict)
    return story


def _config(
    role: Role,
    profile: Path,
    *,
    speed: float,
    key_file: Path | None,
    egress_limit: int | None = None,
) -> NodeConfig:
    return NodeConfig(
        role=role,
        model=replace(NodeConfig().model, served_model_name=MODEL),
        engine=EngineOptions(kind="replay", profile=str(profile)),
        replay=ReplayOptions(speed=speed, bytes_scale=0.002),
        cache=CacheOptions(ram_bytes=64 << 20),
        transport=TransportOptions(
            connect_timeout_s=20.0,
            stall_timeout_s=20.0,
            cluster_key_file=None if key_file is None else str(key_file),
            egress_limit_bytes_per_s=egress_limit,
        ),
    )


@contextlib.asynccontextmanager
async def _hosted(config: NodeConfig, relay: MortalRelay | None) -> AsyncIterator[Hosted]:
    lifecycle, metrics = Lifecycle(), Metrics()
    listening = bind_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    node = await asyncio.to_thread(FACTORIES[config.role], config, metrics, no_progress)
    with Face(config, lifecycle, metrics) as face:
        async with asyncio.TaskGroup() as tasks, Listener(listening, config.http) as listener:
            await node.start(tasks)
            await listener.show(face.node_app(node))
            face.start_serving(node)
            if relay is not None:
                relay.target_port = port
            try:
                yield Hosted(node, port, relay)
            finally:
                await node.close()
                await accept_no_more(listener._server)


@contextlib.asynccontextmanager
async def fleet_hosts(
    *,
    modes: tuple[Mode, ...] = ("both", "both"),
    clusters: tuple[str, ...] = ("near", "near"),
    num_prefill: int = 1,
    egress_limit: int | None = None,
    speed: float = 200.0,
    key_file: Path | None = None,
    scheduler: SchedulerOptions | None = None,
) -> AsyncIterator[FleetHosts]:
    """Run a scheduler, a pd node of each mode in its cluster, and prefill nodes in another, with a limit on what they send."""
    base = _config("scheduler", LOCAL, speed=1.0, key_file=key_file)
    base = replace(base, replay=ReplayOptions(), scheduler=scheduler or SchedulerOptions())
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(120))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        front = await stack.enter_async_context(_hosted(base, None))
        assert isinstance(front.node, SchedulerNode)
        hosts = FleetHosts(front.node, front.port, session)
        wanted: list[tuple[Role, Path, Mode, str]] = [
            ("pd", LOCAL, mode, cluster) for mode, cluster in zip(modes, clusters, strict=True)
        ]
        wanted += [("prefill", REMOTE, "both", "far")] * num_prefill
        for role, profile, mode, cluster in wanted:
            relay = MortalRelay(tag_bytes(key_file), hosts.death)
            await relay.start(0)
            stack.push_async_callback(relay.close)
            config = replace(
                _config(
                    role,
                    profile,
                    speed=speed,
                    key_file=key_file,
                    egress_limit=egress_limit if role == "prefill" else None,
                ),
                http=HttpOptions(port=relay.port),
                fleet=FleetOptions(scheduler=f"127.0.0.1:{front.port}", cluster=cluster, mode=mode),
            )
            hosts.nodes.append(await stack.enter_async_context(_hosted(config, relay)))
        for hosted in hosts.nodes:
            await hosts.joined(hosted)
        yield hosts
        await hosts.at_rest()


def pd_node(hosted: Hosted) -> PdNode:
    assert isinstance(hosted.node, PdNode)
    return hosted.node
