"""Runs one request from its prompt to its last token: fill, then decode behind it."""

import asyncio
from dataclasses import replace

from prfaas.engine.submission import FirstLogits, Submission
from prfaas.errors import BadRequest, EngineError, PrfaasError
from prfaas.log import get_logger
from prfaas.server.directions import Directions
from prfaas.server.engine_thread import EngineThread
from prfaas.server.explaining import RouteExplanation
from prfaas.server.filling import PromptFiller
from prfaas.server.generation import RunningGeneration
from prfaas.server.prefixes import TableHold
from prfaas.server.routing import PromptRouter
from prfaas.types import Request, RequestEnded, RouteName, TokenEvent


class RequestDriver:
    """Puts what is drawn into generations; whatever goes wrong ends up there, too."""

    def __init__(
        self,
        *,
        engine: EngineThread,
        filler: PromptFiller,
        router: PromptRouter,
        vocab_size: int,
        max_context_tokens: int,
    ) -> None:
        self._engine = engine
        self._filler = filler
        self._router = router
        self._vocab_size = vocab_size
        self._max_context_tokens = max_context_tokens

    async def explain(self, request: Request, force_route: RouteName | None) -> RouteExplanation:
        """Return the route that the request would have now; nothing comes of it."""
        return await self._filler.explain(request, force_route)

    async def run(
        self,
        generation: RunningGeneration,
        *,
        force_route: RouteName | None,
        return_logits: bool,
        directions: Directions | None,
    ) -> None:
        """Run a request to its end. Cancelled, it aborts it everywhere and lets go of its pages."""
        try:
            self._check(generation)
            if generation.is_answered:  # elsewhere
                return
            with TableHold() as hold:
                salt = await self._filler.fill(
                    generation,
                    hold,
                    force_route=force_route,
                    want_logits=return_logits,
                    directions=directions,
                )
                if not generation.is_answered:
                    await self._decode(generation, hold, salt, return_logits)
            self._saw(generation, is_directed=directions is not None)
        except asyncio.CancelledError:  # by the node's end: whoever iterates must hear of it
            generation.fail(EngineError("the node is closing"))
            raise
        except PrfaasError as error:
            generation.fail(error)
        except Exception:  # noqa: BLE001  # one request's bug must not end the node
            get_logger().exception("request.crashed", request_id=generation.request.request_id)
            generation.fail(EngineError("internal error"))

    def _saw(self, generation: RunningGeneration, *, is_directed: bool) -> None:
        """Let the router learn what requests are like; a prompt that it was told to leave is none of its."""
        uncached_tokens = len(generation.request.prompt_tokens) - generation.hit_tokens
        if is_directed and generation.route_outcome is not None:
            uncached_tokens = 0
        self._router.saw(uncached_tokens, sum(map(len, generation.drawn_tokens)))

    def _check(self, generation: RunningGeneration) -> None:
        num_tokens, limit = len(generation.request.prompt_tokens), self._max_context_tokens
        if num_tokens >= limit:
            raise BadRequest(
                f"the prompt has {num_tokens} tokens; the context is {limit} tokens with at least "
                "one for the answer",
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
