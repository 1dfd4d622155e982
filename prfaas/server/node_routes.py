"""How a scheduler has a pd node answer requests: the node's side of `fleet_messages`.

POST /fleet/v1/generate   run this request as directed; lines follow until it has ended
POST /fleet/v1/stop       one choice of a running request has all it needs

Until the first line, which comes within ALIVE_S, a refusal is an HTTP status. A scheduler that closes the
connection has the request aborted within a step.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Protocol

from aiohttp import web

from prfaas.clock import Clock
from prfaas.errors import (
    BadRequest,
    EngineError,
    Overloaded,
    PrfaasError,
    ProtocolError,
    UntrustedPeer,
)
from prfaas.log import get_logger
from prfaas.server.directions import Directions
from prfaas.server.failures import failure_reason
from prfaas.server.lifecycle import Lifecycle
from prfaas.server.merging import MergedGenerations, generate_all
from prfaas.server.metrics import Metrics
from prfaas.server.node import Generation
from prfaas.server.records import RecordRing
from prfaas.server.sse import ClientStalled
from prfaas.server.story_counts import StoryCounts
from prfaas.transport.answers import REFUSALS, proven, read_body, refusal
from prfaas.transport.fleet_messages import (
    ALIVE_S,
    GENERATE_PATH,
    STOP_PATH,
    Alive,
    Ended,
    GenerateLine,
    GenerateRequest,
    Logits,
    Story,
    encode_line,
    parse_generate_request,
    parse_stop_choice,
    refused,
)
from prfaas.transport.gate import Gate
from prfaas.transport.handshake import Identity, check_compatible
from prfaas.transport.signed_lines import LineSigner, line_key
from prfaas.types import Request, RequestRecord, TokenEvent

INLINE_BYTES = 1 << 17
"""A longer request is read beside the loop."""

log = get_logger()


class DirectedGeneration(Generation, Protocol):
    """A generation that also says what a scheduler learns from."""

    @property
    def hit_tokens(self) -> int:
        """Leading prompt tokens that were here before anything was fetched."""
        ...

    @property
    def route_outcome(self) -> str | None:
        """How the remote prefill ended; None if there was none."""
        ...


class DirectedNode(Protocol):
    """What the routes ask of a node; `pd.PdNode` is one."""

    @property
    def identity(self) -> Identity:
        """What a scheduler must know the node by."""
        ...

    @property
    def gate(self) -> Gate:
        """Says who asks: the KV channel's, whose sessions a scheduler opens, too."""
        ...

    def generate(
        self,
        request: Request,
        *,
        return_logits: bool = False,
        directions: Directions | None = None,
        drawn_tokens: tuple[tuple[int, ...], ...] = (),
    ) -> AbstractAsyncContextManager[DirectedGeneration]:
        """Run `request` as directed; leaving the block, for whatever reason, aborts it everywhere."""
        ...


class NodeRoutes:
    """The routes by which a scheduler works with one pd node.

    Args:
        lifecycle: lets requests in and counts them, so that a drain waits for them.
        write_timeout_s: a scheduler that takes nothing for this long is gone.
    """

    def __init__(
        self,
        node: DirectedNode,
        *,
        lifecycle: Lifecycle,
        metrics: Metrics,
        records: RecordRing,
        clock: Clock,
        write_timeout_s: float,
    ) -> None:
        self._node = node
        self._gate = node.gate
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._records = records
        self._clock = clock
        self._write_timeout_s = write_timeout_s
        self._running: dict[str, _Directed] = {}

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return the routes."""
        return [web.post(GENERATE_PATH, self.generate), web.post(STOP_PATH, self.stop)]

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """Answer a request line by line."""
        try:
            body = await read_body(http)
            caller = self._gate.caller(http, body)
            if len(body) <= INLINE_BYTES:
                asked = parse_generate_request(body)
            else:
                asked = await asyncio.to_thread(parse_generate_request, body)
            del body  # may be megabytes, and the answer takes long
            check_compatible(self._node.identity, asked.identity, accept_approximate=False)
            lines = _Lines(http, LineSigner(line_key(caller)), self._write_timeout_s)
            with self._lifecycle.admit():
                return await self._run(asked, lines)
        except REFUSALS as error:
            return refusal(error)

    async def stop(self, http: web.Request) -> web.Response:
        """End one choice; of a request that has ended it is no news."""
        try:
            body = await read_body(http)
            caller = self._gate.caller(http, body)
            stop = parse_stop_choice(body)
        except (ProtocolError, TimeoutError, UntrustedPeer) as error:
            return refusal(error)
        directed = self._running.get(stop.request_id)
        if directed is not None:
            directed.stop_choice(stop.choice_index)
        return proven(200, b"{}", caller)

    async def _run(self, asked: GenerateRequest, lines: "_Lines") -> web.StreamResponse:
        request_id = asked.request.request_id
        if request_id in self._running:
            raise Overloaded(f"request {request_id} runs here already")
        arrival_s = self._clock()
        directed = _Directed(self._node, asked, arrival_s)
        counts = StoryCounts(self._metrics, self._records, self._clock, arrival_s=arrival_s)
        self._running[request_id] = directed
        try:
            async with generate_all(directed, [directed.request]) as merged:
                await self._answer(directed, merged, lines, counts)
            counts.finished(directed.records)
        except asyncio.CancelledError:
            counts.failed(directed.records, "cancelled")
            raise
        except ConnectionError:
            counts.failed(directed.records, "client_left")
            raise
        except Exception as error:
            counts.failed(directed.records, failure_reason(error))
            if isinstance(error, BadRequest | Overloaded) and not lines.is_begun:
                raise
            if not isinstance(error, PrfaasError):
                log.exception("request.crashed")
                error = EngineError("internal error")
            await lines.end(refused(error))
        finally:
            del self._running[request_id]
        return lines.response

    async def _answer(
        self,
        directed: "_Directed",
        merged: MergedGenerations,
        lines: "_Lines",
        counts: StoryCounts,
    ) -> None:
        """Say each event in a line, those that come at once in one write, the last word with them."""
        has_logits, is_told = False, False
        while (event := await self._next(merged, lines)) is not None:
            generation = directed.generation
            assert generation is not None, "an event of what has not begun"
            counts.token(event.choice_index, directed.records)
            if not is_told:
                lines.add(Story(record=generation.record))
                is_told = True
            if generation.first_logits is not None and not has_logits:
                lines.add(Logits(generation.first_logits))
                has_logits = True
            lines.add(event)
        generation = directed.generation
        assert generation is not None, "ended without having begun"
        if not is_told:
            lines.add(Story(record=generation.record))
        ended = Ended(
            record=generation.record,
            outcome=generation.route_outcome,
            hit_tokens=generation.hit_tokens,
        )
        await lines.end(ended)

    async def _next(self, merged: MergedGenerations, lines: "_Lines") -> TokenEvent | None:
        """Return the next event, None after the last.

        No wait for it begins with lines unsent; in it, it is said now and then that there is none yet.
        """
        while not merged.has_next:
            await lines.send()
            try:
                async with asyncio.timeout(ALIVE_S):
                    return _event_of(await merged.next())
            except TimeoutError:
                lines.add(Alive())
        return _event_of(await merged.next())


def _event_of(item: tuple[int, TokenEvent] | None) -> TokenEvent | None:
    """Return the event of a request's only prompt."""
    return None if item is None else item[1]


class _Directed:
    """One request as the scheduler directs it; the node that `generate_all` asks."""

    def __init__(self, node: DirectedNode, asked: GenerateRequest, arrival_s: float) -> None:
        self.request = replace(asked.request, arrival_s=arrival_s)
        self.generation: DirectedGeneration | None = None
        self._node = node
        self._asked = asked
        self._ended = set(asked.ended_choices)

    @property
    def records(self) -> Sequence[RequestRecord]:
        return [] if self.generation is None else [self.generation.record]

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[DirectedGeneration]:
        asked = self._asked
        async with self._node.generate(
            request,
            return_logits=asked.return_logits,
            directions=Directions(
                prefill_at=asked.prefill_at,
                reason=asked.reason,
                predicted_ttft_s=asked.predicted_ttft_s,
                prefix_from=asked.prefix_from,
                prefix_tokens=asked.prefix_tokens,
            ),
            drawn_tokens=asked.drawn_tokens,
        ) as generation:
            self.generation = generation
            for choice in self._ended:
                generation.stop_choice(choice)
            yield generation

    def stop_choice(self, choice_index: int) -> None:
        """End one choice, now or as soon as the request begins."""
        if choice_index < self.request.num_choices:
            self._ended.add(choice_index)
            if self.generation is not None:
                self.generation.stop_choice(choice_index)


class _Lines:
    """The answer's lines on their way; begun by the first of them, sent or about to be."""

    def __init__(self, http: web.Request, signer: LineSigner, write_timeout_s: float) -> None:
        self.response = web.StreamResponse(headers={"X-Accel-Buffering": "no"})
        self.response.content_type = "application/x-ndjson"
        self._http = http
        self._signer = signer
        self._write_timeout_s = write_timeout_s
        self._waiting: list[GenerateLine] = []

    @property
    def is_begun(self) -> bool:
        """Whether there is a line: from then on a refusal can only be one, too."""
        return self.response.prepared or bool(self._waiting)

    def add(self, line: GenerateLine) -> None:
        """Put one line into the next write."""
        self._waiting.append(line)

    async def send(self) -> None:
        """Send the lines that were added, in one write; ClientStalled if they are not taken."""
        if self._waiting:
            await self._write()

    async def end(self, last: GenerateLine) -> None:
        """Send what was added, the last line and the answer's end in one write."""
        self.add(last)
        await self._write(is_last=True)

    async def _write(self, *, is_last: bool = False) -> None:
        lines, self._waiting = self._waiting, []
        data = b"".join(self._signer.seal(encode_line(line)) for line in lines)
        try:
            async with asyncio.timeout(self._write_timeout_s):
                if not self.response.prepared:
                    await self.response.prepare(self._http)
                await (self.response.write_eof(data) if is_last else self.response.write(data))
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ClientStalled(
                f"the scheduler took nothing for {self._write_timeout_s:g} s"
            ) from None
