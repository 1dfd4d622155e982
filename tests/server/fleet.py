"""A pd node and a prefill node in one process, a relay between them, and what must hold afterwards."""

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from prfaas.cache.hashing import root_key
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout
from prfaas.clock import Clock, monotonic_s
from prfaas.scheduler.options import SchedulerOptions
from prfaas.server.directions import Directions
from prfaas.server.pd import PdNode
from prfaas.server.prefill import PrefillNode
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.handshake import Identity
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity
from prfaas.types import Request, RequestRecord, RouteName, SamplingParams, TokenEvent
from tests.accepting import accept_no_more
from tests.relay import Relay, tag_bytes
from tests.server.scripted_engine import BLOCK_TOKENS, HYBRID, VOCAB_SIZE, ScriptedEngine

if TYPE_CHECKING:
    from prfaas.text.chat_template import ChatTemplate
    from prfaas.text.tokenizer import Tokenizer

OPTIONS = TransportOptions(connect_timeout_s=1.0, stall_timeout_s=1.0, lease_s=2.0)
IDENTITY = Identity(
    model_fingerprint="scripted",
    tokenizer_fingerprint="t",
    template_fingerprint="t",
    kv_dtype="bytes",
    block_tokens=BLOCK_TOKENS,
    layout="scripted",
    numerics_fingerprint="exact",
)
THRESHOLD_TOKENS = 24
CONTEXT_TOKENS = 2048

_request_ids = itertools.count()


@dataclass
class CountedTransfers:
    """Counts like `metrics.Metrics`."""

    num_bytes: dict[str, int] = field(default_factory=lambda: {"received": 0, "sent": 0})
    outcomes: list[tuple[str, str]] = field(default_factory=list)

    def transfer_bytes(self, direction: str, num_bytes: int) -> None:
        self.num_bytes[direction] += num_bytes

    def transfer_finished(self, direction: str, outcome: str) -> None:
        self.outcomes.append((direction, outcome))


def prompt(num_tokens: int, variant: int = 0) -> tuple[int, ...]:
    return tuple((index * 7 + variant * 131 + 3) % (VOCAB_SIZE - 1) for index in range(num_tokens))


def request(
    num_tokens: int = 100,
    *,
    max_tokens: int = 6,
    num_choices: int = 1,
    seed: int = 11,
    variant: int = 0,
    salt: bytes = b"",
    prompt_tokens: tuple[int, ...] | None = None,
) -> Request:
    return Request(
        request_id=f"request-{next(_request_ids)}",
        prompt_tokens=prompt(num_tokens, variant) if prompt_tokens is None else prompt_tokens,
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed, num_logprobs=1),
        num_choices=num_choices,
        cache_salt=salt,
        arrival_s=monotonic_s(),
    )


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; the test's own timeout ends a vain wait."""
    while not condition():  # noqa: ASYNC110  # it is about threads and other nodes
        await asyncio.sleep(0.005)


@dataclass
class Answer:
    tokens: list[list[int]]
    events: list[TokenEvent]
    record: RequestRecord
    first_logits: bytes | None


class PrefillHost:
    """A prefill node behind a port, that can be killed and come back."""

    def __init__(self, make: Callable[[], PrefillNode], tls: ssl.SSLContext | None = None) -> None:
        self._make = make
        self._tls = tls
        self.node = make()
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await self.node.start(tasks)
        app = web.Application(client_max_size=32 << 20)
        app.add_routes(self.node.routes())
        self._runner = web.AppRunner(app, shutdown_timeout=0.5)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self.node.close()
        if self._runner is not None and self._site is not None:
            await accept_no_more(self._site._server)
            await self._runner.cleanup()

    async def restart(self, tasks: asyncio.TaskGroup) -> None:
        self.node = self._make()
        await self.start(tasks)


@dataclass
class Fleet:
    pd: PdNode
    pd_engine: ScriptedEngine
    pd_cache: PrefixCache
    prefill: PrefillHost
    prefill_engine: ScriptedEngine
    prefill_cache: PrefixCache
    relay: Relay
    pd_metrics: CountedTransfers
    prefill_metrics: CountedTransfers
    tasks: asyncio.TaskGroup

    async def ask(
        self,
        asked: Request,
        route: RouteName | None = None,
        *,
        return_logits: bool = False,
        directions: Directions | None = None,
        drawn_tokens: tuple[tuple[int, ...], ...] = (),
    ) -> Answer:
        events = []
        async with self.pd.generate(
            asked,
            force_route=route,
            return_logits=return_logits,
            directions=directions,
            drawn_tokens=drawn_tokens,
        ) as generation:
            async for event in generation:
                events.append(event)
        tokens: list[list[int]] = [[] for _ in range(asked.num_choices)]
        for event in events:
            tokens[event.choice_index].append(event.token_id)
        return Answer(tokens, events, generation.record, generation.first_logits)

    @property
    def peer_name(self) -> str:
        return f"127.0.0.1:{self.relay.port}"

    async def ask_locally(self, asked: Request) -> Answer:
        """The answer that this node gives alone, without any cache."""
        alone = replace(asked, request_id=f"{asked.request_id}-alone", cache_salt=b"alone")
        answer = await self.ask(alone, "local")
        assert answer.record.tokens_remote == 0
        return answer

    async def peer_up(self) -> None:
        """Return when the pd node would send prefills to its peer."""
        assert self.pd.peer is not None
        await until(lambda: self.pd.peer is not None and self.pd.peer.state == "up")

    async def at_rest(self) -> None:
        """Return when no node holds anything for any request; check every count on the way."""
        caches = (self.pd_cache, self.prefill_cache)
        await until(lambda: not any(cache.counts().num_tables for cache in caches))
        for cache in caches:
            cache.check()
            counts = cache.counts()
            assert (counts.num_referenced, counts.num_transfer) == (0, 0)
        await until(lambda: not self.prefill.node.load().num_transfers)
        assert self.pd.load().num_transfers == 0


def make_cache(
    layout: CacheLayout, *, num_pages: int = 4000, numerics: str = "exact"
) -> PrefixCache:
    return PrefixCache(
        layout=layout,
        ram_bytes=num_pages * layout.page_bytes,
        root=lambda salt: root_key(
            model_fingerprint="scripted",
            numerics_fingerprint=numerics,
            kv_dtype="bytes",
            layout=layout,
            salt=salt,
        ),
    )


def evict_all(cache: PrefixCache) -> None:
    """Make the cache forget everything that nobody holds."""
    table = cache.lookup((), 1)
    block = 0
    while table.try_allocate(0, block) is not None:
        block += 1
    table.release()


@contextlib.asynccontextmanager
async def fleet(
    *,
    layout: CacheLayout = HYBRID,
    prefill_identity: Identity = IDENTITY,
    pd_pages: int = 4000,
    prefill_pages: int = 4000,
    wait_for_peer: bool = True,
    pd_clock: Clock = monotonic_s,
    prefill_key: ClusterKey | None = None,
    pd_key: ClusterKey | None = None,
    **options: Any,
) -> AsyncIterator[Fleet]:
    transport = replace(OPTIONS, **options)
    prefill_cache = make_cache(layout, num_pages=prefill_pages)
    pd_cache = make_cache(layout, num_pages=pd_pages)
    prefill_engine, pd_engine = ScriptedEngine(prefill_cache), ScriptedEngine(pd_cache)
    prefill_metrics, pd_metrics = CountedTransfers(), CountedTransfers()

    def make_prefill() -> PrefillNode:
        return PrefillNode(
            identity=prefill_identity,
            cache=prefill_cache,
            engine=prefill_engine,
            options=transport,
            vocab_size=VOCAB_SIZE,
            max_context_tokens=CONTEXT_TOKENS,
            metrics=prefill_metrics,
            clock=monotonic_s,
            cluster_key=prefill_key,
        )

    host, relay = PrefillHost(make_prefill), Relay(tag_bytes(pd_key))
    async with asyncio.TaskGroup() as tasks:
        await host.start(tasks)
        await relay.start(host.port)
        pd = PdNode(
            identity=IDENTITY,
            cache=pd_cache,
            engine=pd_engine,
            options=replace(transport, peer=f"127.0.0.1:{relay.port}"),
            scheduler=SchedulerOptions(threshold_tokens=THRESHOLD_TOKENS),
            vocab_size=VOCAB_SIZE,
            max_context_tokens=CONTEXT_TOKENS,
            metrics=pd_metrics,
            clock=pd_clock,
            tokenizer=cast("Tokenizer", None),
            chat_template=cast("ChatTemplate", None),
            security=ChannelSecurity(cluster_key=pd_key),
        )
        await pd.start(tasks)
        nodes = Fleet(
            pd=pd,
            pd_engine=pd_engine,
            pd_cache=pd_cache,
            prefill=host,
            prefill_engine=prefill_engine,
            prefill_cache=prefill_cache,
            relay=relay,
            pd_metrics=pd_metrics,
            prefill_metrics=prefill_metrics,
            tasks=tasks,
        )
        try:
            async with asyncio.timeout(60):
                if wait_for_peer:
                    await nodes.peer_up()
                yield nodes
                await nodes.at_rest()
        finally:
            prefill_engine.gate.set()
            pd_engine.gate.set()
            await pd.close()
            await host.close()
            await relay.close()
            prefill_cache.close()
            pd_cache.close()
