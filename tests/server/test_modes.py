"""Pd nodes that serve KV: what each mode takes and refuses, and that nothing that runs is lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import pytest

from prfaas.clock import monotonic_s
from prfaas.errors import Overloaded
from prfaas.scheduler.options import SchedulerOptions
from prfaas.server.directions import Directions
from prfaas.server.pd import PdNode
from prfaas.types import Request, RequestRecord
from tests.server.fleet import (
    CONTEXT_TOKENS,
    IDENTITY,
    OPTIONS,
    CountedTransfers,
    PrefillHost,
    make_cache,
    request,
    until,
)
from tests.server.scripted_engine import HYBRID, VOCAB_SIZE, ScriptedEngine

if TYPE_CHECKING:
    from prfaas.server.prefill import PrefillNode
    from prfaas.text.chat_template import ChatTemplate
    from prfaas.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("no_leaks")


def pd_node(engine: ScriptedEngine) -> PdNode:
    return PdNode(
        identity=IDENTITY,
        cache=engine.cache,
        engine=engine,
        options=OPTIONS,
        scheduler=SchedulerOptions(threshold_tokens=24),
        vocab_size=VOCAB_SIZE,
        max_context_tokens=CONTEXT_TOKENS,
        metrics=CountedTransfers(),
        clock=monotonic_s,
        tokenizer=cast("Tokenizer", None),
        chat_template=cast("ChatTemplate", None),
        serves_kv=True,
    )


@dataclass
class Pair:
    """Two pd nodes; `asker` knows `server` by name alone."""

    asker: PdNode
    server: PdNode
    name: str
    server_engine: ScriptedEngine
    tasks: asyncio.TaskGroup

    def there(self, **directions: int | str) -> Directions:
        return Directions(prefill_at=self.name, reason="cluster", **directions)  # type: ignore[arg-type]


async def ask(
    node: PdNode, asked: Request, directions: Directions | None = None
) -> tuple[list[int], RequestRecord]:
    async with node.generate(asked, directions=directions) as generation:
        return [event.token_id async for event in generation], generation.record


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    engines = [ScriptedEngine(make_cache(HYBRID)) for _ in range(2)]
    asker, server = map(pd_node, engines)
    host = PrefillHost(lambda: cast("PrefillNode", server))
    async with asyncio.TaskGroup() as tasks:
        await host.start(tasks)
        await asker.start(tasks)
        try:
            async with asyncio.timeout(60):
                yield Pair(asker, server, f"127.0.0.1:{host.port}", engines[1], tasks)
                for node in (asker, server):
                    await until(lambda node=node: not node.load().num_transfers)  # type: ignore[misc]
                for engine in engines:
                    await until(lambda cache=engine.cache: not cache.counts().num_tables)  # type: ignore[misc]
                    engine.cache.check()
        finally:
            for engine in engines:
                engine.gate.set()
            await asker.close()
            await host.close()
            for engine in engines:
                engine.cache.close()


async def test_a_pd_node_computes_prompts_for_others_and_answers_its_own():
    async with pair() as nodes:
        here, record = await ask(nodes.asker, request(100), nodes.there())
        assert (record.route, record.peer, record.tokens_remote) == ("remote", nodes.name, 100)
        there, record = await ask(nodes.server, request(100))
        assert here == there
        assert record.tokens_reused == 96, "what was computed for others is its own, too"


async def test_a_node_that_prefills_alone_answers_nothing_new_and_ends_what_runs():
    async with pair() as nodes:
        nodes.server_engine.max_prefill_steps = 2
        running = nodes.tasks.create_task(ask(nodes.server, request(100)))
        await until(lambda: not nodes.server_engine.gate.is_set())
        nodes.server.set_mode("prefill")
        with pytest.raises(Overloaded, match="converting"):
            await ask(nodes.server, request(10))
        nodes.server_engine.gate.set()
        tokens, _ = await running
        assert len(tokens) == 6
        again, record = await ask(nodes.asker, request(100), nodes.there())
        assert (again, record.route) == (tokens, "remote")
        nodes.server.set_mode("both")
        assert (await ask(nodes.server, request(100)))[0] == tokens


async def test_a_node_that_decodes_alone_computes_nothing_for_others_and_ends_what_runs():
    async with pair() as nodes:
        nodes.server_engine.max_prefill_steps = 2
        running = nodes.tasks.create_task(ask(nodes.asker, request(100), nodes.there()))
        await until(lambda: not nodes.server_engine.gate.is_set())
        nodes.server.set_mode("decode")
        peer = nodes.asker.peers.get(nodes.name)
        assert peer is not None
        nodes.server_engine.gate.set()
        tokens, record = await running
        assert record.route == "remote", "what was opened goes on"
        asked = request(100, variant=1)
        _, record = await ask(nodes.asker, asked, nodes.there())
        assert record.route == "local"
        assert record.reason.startswith("peer_overloaded: ")
        assert record.reason.endswith("decodes alone")
        peer.doubt()
        await until(lambda: peer.state == "not_ready")
        assert peer.detail == "decodes alone"
        _, record = await ask(nodes.asker, request(100, variant=2), nodes.there())
        assert (record.route, record.reason) == ("local", "peer_down")
        assert (await ask(nodes.server, request(100)))[0] == tokens


async def test_a_node_that_decodes_alone_still_shares_its_prefixes():
    async with pair() as nodes:
        nodes.server.set_mode("decode")
        tokens, _ = await ask(nodes.server, request(150))
        directions = Directions(reason="near", prefix_from=nodes.name, prefix_tokens=144)
        got, record = await ask(nodes.asker, request(150), directions)
        assert got == tokens
        assert (record.tokens_reused, record.tokens_local) == (144, 6)


async def test_a_draining_node_takes_nothing_from_others():
    async with pair() as nodes:
        tokens, _ = await ask(nodes.server, request(150))
        nodes.server.drain()
        assert nodes.server.service is not None
        assert nodes.server.service.is_ready == (False, "draining")
        directions = replace(nodes.there(), prefix_from=nodes.name, prefix_tokens=144)
        got, record = await ask(nodes.asker, request(150), directions)
        assert (got, record.route, record.tokens_local) == (tokens, "local", 150)


async def test_a_node_computes_for_others_and_answers_at_once():
    async with pair() as nodes:
        async with asyncio.TaskGroup() as tasks:
            pairs = [
                (
                    tasks.create_task(ask(nodes.asker, request(100, variant=n), nodes.there())),
                    tasks.create_task(ask(nodes.server, request(100, variant=n))),
                )
                for n in range(3)
            ]
        for here, there in pairs:
            assert here.result()[0] == there.result()[0]
