"""One running request as its client sees it: tokens from a peer and from here are one answer."""

import asyncio
from typing import TYPE_CHECKING, Self

from prfaas.clock import Clock
from prfaas.errors import PrfaasError
from prfaas.types import Request, RequestRecord, TokenEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from prfaas.scheduler.router import Outcome


class RunningGeneration:
    """The events of one request and its record; the driver puts, the client iterates.

    What was put is part of the answer for good: `drawn_tokens` is what a fallback continues from. It may
    begin with what another node drew, per choice; the client has that, and the record's completion leaves
    it out. The buffer is bounded by what the request may draw, choices times max_tokens. `is_exact` says it
    of what this node computes; a peer's KV can only take it away.
    """

    def __init__(
        self,
        request: Request,
        *,
        clock: Clock,
        is_exact: bool = True,
        drawn_tokens: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        assert len(drawn_tokens) in {0, request.num_choices}, "one tuple a choice"
        self.request = request
        self.record = RequestRecord(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_tokens),
            exact=is_exact,
        )
        self.hit_tokens = 0
        """Leading prompt tokens that were here before anything was fetched."""
        self.route_outcome: Outcome | None = None
        """How the remote prefill ended; None if there was none, or it runs."""
        self.first_logits: bytes | None = None
        self.on_stop_choice: Callable[[int], None] | None = None
        """Told of a choice that the client stops; set while the engine draws."""
        self._clock = clock
        self._arrival_s = request.arrival_s or clock()
        self._drawn = [[*tokens] for tokens in drawn_tokens or ((),) * request.num_choices]
        self._open = set(range(request.num_choices))
        self._stopped: set[int] = set()
        self._events: asyncio.Queue[TokenEvent | PrfaasError | None] = asyncio.Queue()
        for index in range(request.num_choices):
            self._take_drawn(index)

    def _take_drawn(self, index: int) -> None:
        """End a choice whose last token was drawn elsewhere."""
        drawn, sampling = self._drawn[index], self.request.sampling
        is_stopped = bool(drawn) and drawn[-1] in sampling.stop_token_ids
        if is_stopped or len(drawn) >= sampling.max_tokens:
            self.record.finish_reasons[index] = "stop" if is_stopped else "length"
            self._end_choice(index)

    @property
    def is_answered(self) -> bool:
        """Every choice has finished or was stopped."""
        return not self._open

    @property
    def drawn_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Per choice, what was drawn so far: never drawn again."""
        return tuple(tuple(tokens) for tokens in self._drawn)

    @property
    def has_drawn(self) -> bool:
        """Something was drawn: it must be continued, not repeated."""
        return any(self._drawn)

    @property
    def stopped_choices(self) -> frozenset[int]:
        """Choices that the client has stopped."""
        return frozenset(self._stopped)

    def put(self, event: TokenEvent) -> None:
        """Pass a drawn token to the client; one of a choice that has ended is dropped."""
        index = event.choice_index
        if index not in self._open:
            return
        if self.record.ttft_s is None:
            self.record.ttft_s = self._clock() - self._arrival_s
        self._drawn[index].append(event.token_id)
        self._events.put_nowait(event)
        if event.finish_reason is not None:
            self._end_choice(index)

    def fail(self, error: PrfaasError) -> None:
        """End the iteration with `error`, after what was put before."""
        self._events.put_nowait(error)
        self._events.put_nowait(None)  # whoever asks behind it

    def close(self) -> None:
        """Let go of what nobody took: an error's traceback holds the frames that hold it."""
        while not self._events.empty():
            self._events.get_nowait()

    def stop_choice(self, choice_index: int) -> None:
        """End one choice early: none of its events that the client has not got follow."""
        self._stopped.add(choice_index)
        for _ in range(self._events.qsize()):  # once round: what stays keeps its order
            event = self._events.get_nowait()
            if not isinstance(event, TokenEvent) or event.choice_index != choice_index:
                self._events.put_nowait(event)
        if choice_index in self._open:
            if self.on_stop_choice is not None:
                self.on_stop_choice(choice_index)
            self._end_choice(choice_index)

    def _end_choice(self, choice_index: int) -> None:
        self._open.discard(choice_index)
        if not self._open:
            self._events.put_nowait(None)

    @property
    def has_next(self) -> bool:
        """What comes next, an event, an error or the end, is here: nobody waits for it."""
        return not self._events.empty()

    def __aiter__(self) -> Self:
        """Yield events until every choice has ended; raises what `fail` was given."""
        return self

    async def __anext__(self) -> TokenEvent:
        """Return the next event; one whose wait is cancelled comes at the next call."""
        event = await self._events.get()
        if event is None:
            self._events.put_nowait(None)  # whoever asks again
            raise StopAsyncIteration
        if isinstance(event, PrfaasError):
            try:
                raise event
            finally:
                del event  # its traceback holds this frame: a cycle with all of the request in it
        self.record.completion_tokens += 1
        if event.finish_reason is not None:
            self.record.finish_reasons[event.choice_index] = event.finish_reason
        return event
