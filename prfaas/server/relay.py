"""One request on its way through the fleet: placed, relayed, and continued elsewhere if its node fails.

Nothing is asked of two nodes at once, and what the client has got is never drawn again: the next node
gets the prompt with all tokens drawn so far, within the numerics that drew them, and goes on behind
them. A node fails if its connection breaks, an answer ends without its last line, or nothing comes for
`stall_timeout_s`: a node that works says so in between. While no node can take the request but one may be
back, it waits: a dead node costs time, never an answer.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, assert_never, cast, get_args

from aiohttp import ClientConnectorError, ConnectionTimeoutError

from prfaas.clock import Clock
from prfaas.errors import (
    BadRequest,
    EngineError,
    Overloaded,
    PrfaasError,
    PromptRefused,
    ProtocolError,
    TransferError,
)
from prfaas.log import get_logger
from prfaas.scheduler.placing import MIN_RETRY_S, NoNode, Placement
from prfaas.scheduler.router import Outcome
from prfaas.server.fleet_driver import FleetDriver
from prfaas.server.generation import RunningGeneration
from prfaas.server.key_thread import INLINE_TOKENS
from prfaas.server.node_links import NodeLinks
from prfaas.transport.fleet_messages import (
    GENERATE_PATH,
    MAX_LINE_BYTES,
    STOP_PATH,
    Alive,
    Ended,
    GenerateLine,
    GenerateRequest,
    Logits,
    Refused,
    StopChoice,
    Story,
    encode_generate_request,
    encode_stop_choice,
    parse_line,
)
from prfaas.types import RequestRecord, RouteName, TokenEvent, Try

if TYPE_CHECKING:
    from prfaas.scheduler import fleet
    from prfaas.server.fleet_prefixes import PromptKeys

OUTCOMES = frozenset(get_args(Outcome))
MAX_FAILURES = 3
"""Nodes that may fail with one request: a prompt that ends nodes must not end them all."""
MAX_WAITING = 1024
"""Requests without a first token, for which there is no node yet; the others are let wait."""
LOOK_S = 1.0
"""A request that waits looks so often, and when a node comes or is back."""

log = get_logger()


class Relay:
    """Runs one request on the fleet.

    Args:
        spawn: puts work that outlives a line into the scheduler's tasks.
        silence_s: a node that says nothing for this long has failed.
        patience_s: so long it waits for a node.
    """

    def __init__(
        self,
        generation: RunningGeneration,
        *,
        driver: FleetDriver,
        links: NodeLinks,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        silence_s: float,
        patience_s: float,
        force_route: RouteName | None,
        return_logits: bool,
    ) -> None:
        self._generation = generation
        self._request = generation.request
        self._driver = driver
        self._links = links
        self._clock = clock
        self._spawn = spawn
        self._silence_s = silence_s
        self._patience_s = patience_s
        self._force_route = force_route
        self._return_logits = return_logits
        self._keys: PromptKeys = {}
        self._asked_id = self._request.request_id
        """What the node of this try calls the request: one that is asked again may still run it as before."""
        self._open = set(range(self._request.num_choices))
        """Choices that lack their last token."""
        self._last: TokenEvent | None = None
        """The answer's last token, kept until the node has said what else there is to say."""
        self._numerics: str | None = None
        """Of the nodes that have drawn; None if nothing was."""
        self._has_answered = False
        """The node of this try has drawn something: the prefill is done."""
        self._has_ended = False
        """It has said its last word: a client that has its answer leaves before the connection is at rest."""
        self._excluded: set[str] = set()
        """Nodes that were tried, while there are others."""
        self._unable: set[str] = set()
        """Those that said themselves that they failed with this request."""
        self._until_s = 0.0
        """So long it is tried anywhere, counted anew where a node that had it in hand was lost."""
        self._num_failures = 0
        self._failure: PrfaasError | None = None
        self._route_outcome: Outcome | None = None

    async def run(self) -> None:
        """Put the whole answer into the generation.

        Raises BadRequest, Overloaded if no node takes it, EngineError if nodes failed with it.
        """
        try:
            await self._run()
        finally:
            self._failure = None  # its traceback holds frames, and they the prompt and this relay

    async def _run(self) -> None:
        self._keys = await self._driver.keys(self._request)
        self._until_s = self._clock() + self._patience_s
        while True:
            placement = await self._place()
            num_failures = self._num_failures
            if await self._try(placement):
                return
            self._generation.record.retries += 1
            if self._has_answered or self._num_failures > num_failures:
                self._until_s = self._clock() + self._patience_s

    async def _place(self) -> Placement:
        """Return where the request goes now, or as soon as there is a node for it."""
        if self._num_failures >= MAX_FAILURES:
            raise EngineError(f"nodes failed {self._num_failures} times with this request")
        began_s = self._clock()
        while True:
            hits = await self._driver.hits(self._keys)
            placed = self._placed(hits)
            left_s = self._until_s - self._clock()
            if isinstance(placed, NoNode) and left_s > 0 and self._excluded != self._unable:
                self._excluded = set(self._unable)  # those that were tried may be well again
                placed = self._placed(hits)
            if isinstance(placed, Placement):
                self._note(placed, hits, self._clock() - began_s)
                return placed
            if not placed.may_pass or left_s <= 0:
                raise self._unplaced(placed)
            if not self._generation.has_drawn and self._driver.num_waiting >= MAX_WAITING:
                raise self._unplaced(placed)
            log.debug("request.waiting", reason=placed.reason)
            await self._driver.until_change(min(left_s, LOOK_S))

    def _placed(self, hits: Mapping[str, int]) -> Placement | NoNode:
        wanted = self._driver.wanted(
            self._request,
            hits,
            num_drawn=max(map(len, self._generation.drawn_tokens)),
            force=self._force_route,
            numerics=self._numerics,
            excluded=frozenset(self._excluded),
        )
        return self._driver.fleet.place(self._request.request_id, wanted, self._clock())

    def _note(self, placed: Placement, hits: Mapping[str, int], waited_s: float) -> None:
        """Tell of a placement in the record and the log."""
        record = self._generation.record
        record.tries.append(
            Try(
                node=placed.decode_at,
                node_reason=placed.decode_reason,
                reason=placed.reason,
                prefill_at=placed.prefill_at,
                prefix_from=placed.prefix_from,
                waited_s=waited_s,
            )
        )
        record.node, record.node_reason = placed.decode_at, placed.decode_reason
        if not record.retries:
            record.predicted_ttft_s = placed.predicted_ttft_s
        log.debug(
            "request.placed",
            node=placed.decode_at,
            node_reason=placed.decode_reason,
            reason=placed.reason,
            prefill_at=placed.prefill_at,
            prefix_from=placed.prefix_from,
            hit_tokens=hits.get(placed.decode_at, 0),
            predicted_ttft_s=placed.predicted_ttft_s,
        )

    @property
    def _num_drawn(self) -> int:
        return sum(map(len, self._generation.drawn_tokens))

    def _unplaced(self, nobody: NoNode) -> PrfaasError:
        """Return what to say to a request that no node takes; what broke is in the log."""
        failed = f"node {self._generation.record.node} failed"
        if self._generation.has_drawn:
            return EngineError(f"{failed}, no other node can continue the answer: {nobody.reason}")
        if isinstance(self._failure, EngineError | Overloaded):
            return self._failure
        before = "" if self._failure is None else f"{failed}, "
        return Overloaded(
            f"{before}no node takes the request: {nobody.reason}",
            retry_after_s=nobody.retry_after_s,
        )

    async def _try(self, placement: Placement) -> bool:
        """Return whether the node brought the answer to its end; if not, why is in `_failure`."""
        node = placement.decode_at
        outcome: fleet.Ended = "cancelled"
        retry_after_s = MIN_RETRY_S
        self._route_outcome = None
        self._has_answered = self._has_ended = False
        num_before = self._num_drawn
        try:
            await self._converse(placement)
        except BadRequest:
            raise
        except PromptRefused as error:
            raise BadRequest(str(error)) from error
        except Overloaded as error:
            outcome, retry_after_s = "refused", max(MIN_RETRY_S, error.retry_after_s)
            self._failed(node, error)
        except (EngineError, TransferError) as error:
            if self._last is None:
                outcome = "failed"
                if isinstance(error, EngineError):
                    self._unable.add(node)
                if not isinstance(error.__cause__, ClientConnectorError | ConnectionTimeoutError):
                    self._num_failures += 1  # else it has not seen the request
                self._failed(node, error)
            else:  # all tokens have come, only the node's last word has not
                self._has_ended = True
                self._generation.put(self._last)
        finally:
            self._generation.on_stop_choice = None
            if self._has_ended:
                outcome = "completed"
            this = self._generation.record.tries[-1]
            this.outcome, this.num_tokens = outcome, self._num_drawn - num_before
            self._driver.fleet.ended(
                self._request.request_id,
                outcome,
                self._clock(),
                route_outcome=self._route_outcome,
                output_tokens=self._num_drawn,
                retry_after_s=retry_after_s,
            )
        return self._has_ended

    def _failed(self, node: str, error: PrfaasError) -> None:
        self._excluded.add(node)
        self._failure = error
        self._generation.record.tries[-1].error = str(error)
        log.warning(
            "request.failed_over",
            node=node,
            error=str(error),
            num_drawn=self._num_drawn,
        )

    async def _converse(self, placement: Placement) -> None:
        """Ask the node and take what it says until its last line."""
        node = placement.decode_at
        said = self._driver.said(node)
        if said is None:
            raise TransferError(f"node {node} has left")
        http = self._links.to(node)
        self._open -= self._generation.stopped_choices  # while there was no node to tell it to
        if retries := self._generation.record.retries:
            self._asked_id = f"{self._request.request_id}.{retries}"
        asked = GenerateRequest(
            identity=said.identity,
            request=replace(self._request, request_id=self._asked_id),
            drawn_tokens=self._generation.drawn_tokens if self._generation.has_drawn else (),
            ended_choices=tuple(
                choice for choice in range(self._request.num_choices) if choice not in self._open
            ),
            prefill_at=placement.prefill_at,
            reason=placement.reason,
            predicted_ttft_s=placement.predicted_ttft_s,
            prefix_from=placement.prefix_from,
            prefix_tokens=placement.prefix_tokens,
            return_logits=self._return_logits and not self._generation.has_drawn,
        )
        async with http.lines(
            GENERATE_PATH,
            await self._encoded(asked),
            said.identity,
            silence_s=self._silence_s,
            max_line_bytes=MAX_LINE_BYTES,
        ) as lines:
            self._generation.on_stop_choice = lambda choice: self._stop(node, choice)
            for choice in self._open & self._generation.stopped_choices:  # while the node was asked
                self._stop(node, choice)
            while (text := await lines.next()) is not None:
                line = parse_line(text, self._request)
                if isinstance(line, TokenEvent) and not self._has_answered:
                    self._prefilled(node, said.identity.numerics_fingerprint)
                if self._take(line):
                    return
        raise TransferError(f"node {node}: its answer was cut short")

    async def _encoded(self, asked: GenerateRequest) -> bytes:
        """Return the request's bytes; those of a long prompt are made beside the loop."""
        if len(self._request.prompt_tokens) < INLINE_TOKENS:
            return encode_generate_request(asked)
        return await asyncio.to_thread(encode_generate_request, asked)

    def _take(self, line: GenerateLine) -> bool:
        """Take one line in; return whether it is the last one."""
        match line:
            case TokenEvent():
                self._take_token(line)
            case Story(record=record):
                self._tell(record)
            case Logits(data=data):
                self._generation.first_logits = data
            case Alive():
                pass
            case Refused():
                raise line.as_error()
            case Ended(record=record, outcome=outcome):
                if self._open:
                    raise ProtocolError(f"an answer that lacks {len(self._open)} choices")
                self._tell(record)
                self._route_outcome, self._has_ended = _outcome_of(outcome), True
                if self._last is not None:
                    self._generation.put(self._last)
                return True
            case _:
                assert_never(line)
        return False

    def _prefilled(self, node: str, numerics: str) -> None:
        """Take note of the first token of this try: the prompt's KV is at the node, and at its peer."""
        record = self._generation.record
        self._driver.fleet.first_token(
            self._request.request_id,
            self._clock(),
            outcome=_outcome_of(record.reason.partition(":")[0]) or "completed",
        )
        self._has_answered, self._numerics = True, numerics
        holders = {node, record.peer} if record.route == "remote" and record.peer else {node}
        if any(self._keys.values()):  # else not a block of it is whole
            self._spawn(self._driver.expect(holders, self._request, self._keys))

    def _take_token(self, event: TokenEvent) -> None:
        if event.choice_index not in self._open:
            return  # under way when the choice was stopped
        if event.finish_reason is not None:
            self._open.discard(event.choice_index)
            if not self._open and not self._generation.stopped_choices:
                self._last = event
                return
        self._generation.put(event)

    def _tell(self, told: RequestRecord) -> None:
        """Put what the node knows of the request into its record."""
        record = self._generation.record
        record.route, record.reason, record.peer = told.route, told.reason, told.peer
        record.tokens_reused = told.tokens_reused
        record.tokens_local, record.tokens_remote = told.tokens_local, told.tokens_remote
        record.bytes_received = told.bytes_received
        record.exact = record.exact and told.exact

    def _stop(self, node: str, choice_index: int) -> None:
        """Tell the node that one choice has all it needs; where none is left the connection is closed."""
        self._open.discard(choice_index)
        if self._open:
            self._spawn(self._tell_stop(node, choice_index))

    async def _tell_stop(self, node: str, choice_index: int) -> None:
        stop = StopChoice(request_id=self._asked_id, choice_index=choice_index)
        said = self._driver.said(node)
        if said is None:
            return
        try:
            await self._links.to(node).post(STOP_PATH, encode_stop_choice(stop), said.identity)
        except (Overloaded, TransferError) as error:  # it draws what nobody reads
            log.info("request.choice_not_stopped", node=node, error=str(error))


def _outcome_of(text: str | None) -> Outcome | None:
    """Return how a remote prefill ended, None for what is no such word."""
    return cast("Outcome", text) if text in OUTCOMES else None
