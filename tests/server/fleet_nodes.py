"""A scheduler in this process and nodes that draw by one rule, each on a port: what relays, retries and leaves is real."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from prfaas.cache.changes import CacheSnapshot, Changes
from prfaas.clock import monotonic_s
from prfaas.errors import (
    BadRequest,
    IncompatiblePeer,
    Overloaded,
    ProtocolError,
    UntrustedPeer,
)
from prfaas.scheduler.heartbeat import Heartbeat
from prfaas.scheduler.options import SchedulerOptions
from prfaas.server.fleet_client import FleetClient
from prfaas.server.heartbeat_messages import HeartbeatMessage, HeartbeatReply
from prfaas.server.scheduler import SchedulerNode
from prfaas.text.chat_template import ChatTemplate
from prfaas.transport.address import parse_address
from prfaas.transport.answers import read_body, refusal
from prfaas.transport.auth import PeerSide
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.fleet_messages import (
    GENERATE_PATH,
    STOP_PATH,
    Alive,
    Ended,
    GenerateLine,
    GenerateRequest,
    StopChoice,
    Story,
    encode_line,
    parse_generate_request,
    parse_stop_choice,
)
from prfaas.transport.gate import Gate
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.signed_lines import LineSigner, line_key
from prfaas.types import Request, RequestRecord, TokenEvent
from tests.accepting import accept_no_more
from tests.server.fake_node import TOKENIZER
from tests.server.fleet import IDENTITY, Answer, until
from tests.server.scripted_engine import HYBRID

TEMPLATE = ChatTemplate(None)
NODE_IDENTITY = replace(
    IDENTITY,
    tokenizer_fingerprint=TOKENIZER.fingerprint,
    template_fingerprint=TEMPLATE.fingerprint,
)
PATIENT = TransportOptions(connect_timeout_s=20.0, stall_timeout_s=20.0)
"""Tests share their processors; only a test of silence is impatient."""

_epochs = itertools.count(1)


def drawn(request: Request, choice: int) -> list[int]:
    """What every node draws for a choice."""
    seed = sum(request.prompt_tokens) + request.sampling.seed + 17 * choice
    return [(31 * seed + 7 * position) % 251 for position in range(request.sampling.max_tokens)]


class ScriptedNode:
    """A pd node, as the scheduler sees one."""

    def __init__(self, *, key: ClusterKey | None = None, numerics: str = "exact") -> None:
        self.identity = replace(NODE_IDENTITY, numerics_fingerprint=numerics)
        self.epoch = next(_epochs)
        self.asked: list[GenerateRequest] = []
        self.stopped: list[StopChoice] = []
        self.num_running = 0
        self.hold_at: int | None = None
        """The token before which it waits for `release`."""
        self.release = asyncio.Event()
        self.is_silent = False
        """While it waits it does not say that it is alive."""
        self.is_deaf = False
        """It takes a question and says nothing at all until `release`."""
        self.die_at: int | None = None
        """The token before which it breaks the connection."""
        self.end_at: int | None = None
        """The token before which it ends its answer without a word."""
        self.say_at: tuple[int, GenerateLine] | None = None
        """A line that it says before a token; the answer ends there."""
        self.forges = False
        """Its lines are signed with another key."""
        self.refuses: BadRequest | Overloaded | IncompatiblePeer | None = None
        self._gate = Gate(
            None if key is None else PeerSide(key, identity=self.identity, epoch="e" * 64)
        )
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self.name = ""

    def heal(self) -> None:
        """Fail no more."""
        self.die_at = self.end_at = self.say_at = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=32 << 20)
        app.add_routes(self._gate.routes())
        app.add_routes([web.post(GENERATE_PATH, self.generate), web.post(STOP_PATH, self.stop)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", port)
        await self._site.start()
        self.name = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        self.release.set()
        if self._runner is not None and self._site is not None:
            await accept_no_more(self._site._server)
            await self._runner.cleanup()

    def message(
        self,
        *,
        changes: Changes | None = None,
        snapshot: CacheSnapshot | None = None,
        max_context_tokens: int = 2048,
        **beat: Any,
    ) -> HeartbeatMessage:
        return HeartbeatMessage(
            heartbeat=Heartbeat(
                **{
                    "node": self.name,
                    "role": "pd",
                    "cluster": "default",
                    "epoch": self.epoch,
                    "max_running": 16,
                    "prefill_tokens_per_s": 1000.0,
                    "decode_step_s": 0.01,
                    **beat,
                }
            ),
            identity=self.identity,
            layout=HYBRID,
            max_context_tokens=max_context_tokens,
            changes=changes,
            snapshot=snapshot,
        )

    async def stop(self, http: web.Request) -> web.Response:
        body = await read_body(http)
        self._gate.caller(http, body)
        self.stopped.append(parse_stop_choice(body))
        return web.json_response({})

    async def generate(self, http: web.Request) -> web.StreamResponse:
        try:
            body = await read_body(http)
            caller = self._gate.caller(http, body)
            asked = parse_generate_request(body)
            self.asked.append(asked)
            if self.refuses is not None:
                raise self.refuses
        except (BadRequest, IncompatiblePeer, Overloaded, ProtocolError, UntrustedPeer) as error:
            return refusal(error)
        key = line_key(caller)
        if self.forges and key is not None:
            key = key.derive(b"another")
        signer = LineSigner(key)
        if self.is_deaf:
            await self.release.wait()
        response = web.StreamResponse()
        await response.prepare(http)
        self.num_running += 1
        try:
            await self._draw(http, response, signer, asked)
        finally:
            self.num_running -= 1
        return response

    async def _draw(
        self,
        http: web.Request,
        response: web.StreamResponse,
        signer: LineSigner,
        asked: GenerateRequest,
    ) -> None:
        async def say(*lines: GenerateLine) -> None:
            await response.write(b"".join(signer.seal(encode_line(line)) for line in lines))

        request = asked.request
        record = RequestRecord(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_tokens),
            reason=asked.reason,
            tokens_local=len(request.prompt_tokens),
        )
        await say(Story(record=record))
        before = asked.drawn_tokens or ((),) * request.num_choices
        for position in range(request.sampling.max_tokens):
            if position == self.hold_at:
                while not self.release.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await self.release.wait()
                    if not self.is_silent:
                        await say(Alive())
            if position == self.die_at:
                assert http.transport is not None
                http.transport.abort()
                return
            if position == self.end_at:
                return
            if self.say_at is not None and position == self.say_at[0]:
                await say(self.say_at[1])
                return
            is_last = position + 1 == request.sampling.max_tokens
            lines: list[GenerateLine] = [
                TokenEvent(
                    request_id=request.request_id,
                    choice_index=choice,
                    token_id=drawn(request, choice)[position],
                    finish_reason="length" if is_last else None,
                )
                for choice in range(request.num_choices)
                if position >= len(before[choice]) and choice not in self._ended(asked)
            ]
            if is_last:
                lines.append(Ended(record=record))
            await say(*lines)
            await asyncio.sleep(0)

    def _ended(self, asked: GenerateRequest) -> set[int]:
        told = {s.choice_index for s in self.stopped if s.request_id == asked.request.request_id}
        return told | set(asked.ended_choices)


class SchedulerHost:
    """A scheduler on a port."""

    def __init__(
        self, key: ClusterKey | None, options: TransportOptions, patience_s: float = 0.0
    ) -> None:
        self.key = key
        self.node = SchedulerNode(
            tokenizer=TOKENIZER,
            chat_template=TEMPLATE,
            options=options,
            scheduler=SchedulerOptions(placement_timeout_s=patience_s),
            clock=monotonic_s,
            security=ChannelSecurity(cluster_key=key),
        )
        self.address = parse_address("127.0.0.1:1")
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._clients: list[FleetClient] = []

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await self.node.start(tasks)
        app = web.Application(client_max_size=32 << 20)
        app.add_routes(self.node.routes())
        self._runner = web.AppRunner(app, shutdown_timeout=0.5)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await self._site.start()
        self.address = parse_address(f"127.0.0.1:{self._runner.addresses[0][1]}")

    def client(self, key: ClusterKey | None) -> FleetClient:
        client = FleetClient(self.address, PATIENT, ChannelSecurity(cluster_key=key))
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.node.close()
        if self._runner is not None and self._site is not None:
            await accept_no_more(self._site._server)
            await self._runner.cleanup()

    async def ask(self, asked: Request) -> Answer:
        events = []
        async with self.node.generate(asked) as generation:
            async for event in generation:
                events.append(event)
        tokens: list[list[int]] = [[] for _ in range(asked.num_choices)]
        for event in events:
            tokens[event.choice_index].append(event.token_id)
        return Answer(tokens, events, generation.record, generation.first_logits)


class ScriptedFleet:
    def __init__(self, host: SchedulerHost, nodes: Sequence[ScriptedNode]) -> None:
        self.host = host
        self.scheduler = host.node
        self.nodes = nodes
        self._client = host.client(host.key)

    async def beat(self, node: ScriptedNode, **said: Any) -> HeartbeatReply:
        return await self._client.heartbeat(node.message(**said))

    async def leave(self, node: ScriptedNode) -> None:
        await self._client.leave(node.name, node.epoch, node.identity)

    async def at_rest(self) -> None:
        """Return when no node works and nothing is in flight."""
        await until(lambda: not any(node.num_running for node in self.nodes))
        self.scheduler.driver.fleet.check()
        assert all(member.num_inflight == 0 for member in self.scheduler.members())
        assert self.scheduler.load().num_running == 0


@contextlib.asynccontextmanager
async def scripted_fleet(
    num_nodes: int = 2,
    *,
    key: ClusterKey | None = None,
    options: TransportOptions = PATIENT,
    numerics: Sequence[str] = (),
    patience_s: float = 0.0,
) -> AsyncIterator[ScriptedFleet]:
    """Run a scheduler and nodes that have said once that they are there.

    Requests for which there is no node wait `patience_s` for one that may be back.
    """
    names = [*numerics, *["exact"] * num_nodes][:num_nodes]
    nodes = [ScriptedNode(key=key, numerics=name) for name in names]
    host = SchedulerHost(key, options, patience_s)
    async with asyncio.TaskGroup() as tasks:
        await host.start(tasks)
        fleet = ScriptedFleet(host, nodes)
        try:
            async with asyncio.timeout(60):
                for node in nodes:
                    await node.start()
                    await fleet.beat(node)
                yield fleet
                await fleet.at_rest()
        finally:
            for node in nodes:
                await node.close()
            await host.close()
