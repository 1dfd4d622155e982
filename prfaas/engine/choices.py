"""Draws the tokens of a request's choices."""

from prfaas.engine.sampler import Draw, Float32s, Sampler, TokenHistory, takes_largest
from prfaas.engine.sequence import RequestState, SequenceState
from prfaas.engine.submission import FirstLogits
from prfaas.types import TokenEvent


def wants_largest(sequence: SequenceState) -> bool:
    """Return whether a decoding choice's next token is the largest logit's, and no more is asked."""
    return sequence.is_choice and takes_largest(sequence.owner.request.sampling)


def draw_token(
    sampler: Sampler,
    state: RequestState,
    choice: int,
    row_V: Float32s | int,
    *,
    position: int,
    history: TokenHistory | None,
) -> TokenEvent:
    """Return the token of a choice at `position`, drawn from the logits after the one before.

    Instead of these there may be the id of the largest, if `wants_largest`.
    """
    if isinstance(row_V, int):
        draw = Draw(token_id=row_V, logprobs=None)
    else:
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
