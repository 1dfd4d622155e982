"""Draws the tokens of a request's choices."""

from prfaas.engine.sampler import Float32s, Sampler, TokenHistory
from prfaas.engine.sequence import RequestState
from prfaas.engine.submission import FirstLogits
from prfaas.types import TokenEvent


def draw_token(
    sampler: Sampler,
    state: RequestState,
    choice: int,
    row_V: Float32s,
    *,
    position: int,
    history: TokenHistory | None,
) -> TokenEvent:
    """Return the token of a choice at `position`, drawn from the logits after the one before."""
    draw = sampler.draw(
        row_V,
        state.request.sampling,
        choice_index=choice,
        position=position,
        history=history,
    )
    return TokenEvent(
        request_id=state.request.request_id,
        choice_index=choice,
        token_id=draw.token_id,
        logprobs=draw.logprobs,
        finish_reason=state.finish_reason(draw.token_id, position + 1),
    )


def draw_first_tokens(
    sampler: Sampler, state: RequestState, row_V: Float32s | None
) -> tuple[list[TokenEvent], list[tuple[int, tuple[int, ...]]]]:
    """Return an event for each open choice that has no token yet, and the choices that go on.

    Each of those comes with its completion so far: what was drawn elsewhere, or its first token.
    `row_V`, the logits after the prompt, may be None if nothing is drawn.
    """
    events: list[TokenEvent] = []
    going_on: list[tuple[int, tuple[int, ...]]] = []
    for choice in state.open_choices:
        completion = state.forced(choice)
        if not completion:
            assert row_V is not None
            event = draw_token(
                sampler,
                state,
                choice,
                row_V,
                position=state.num_prompt_tokens,
                history=state.new_history(()),
            )
            events.append(event)
            if event.finish_reason is not None:
                continue
            completion = (event.token_id,)
        going_on.append((choice, completion))
    return events, going_on


def first_logits(state: RequestState, row_V: Float32s) -> FirstLogits:
    """Return the logits after the prompt as they are sent."""
    return FirstLogits(request_id=state.request.request_id, logits=row_V.astype("<f4").tobytes())
