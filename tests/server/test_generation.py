"""What a client gets of a request: in order, at once where it is there, and nothing left behind."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import EngineError
from prfaas.server.generation import RunningGeneration
from prfaas.server.merging import MAX_QUEUED, MergedGenerations
from prfaas.types import Request, SamplingParams, TokenEvent
from tests.collecting import num_left

T = TypeVar("T")
NUM_CHOICES = 3
ACTIONS = st.tuples(
    st.sampled_from(["put", "put", "put", "last", "stop", "take", "take"]),
    st.integers(0, NUM_CHOICES - 1),
)


def running(num_choices: int = NUM_CHOICES) -> RunningGeneration:
    request = Request(
        request_id="a",
        prompt_tokens=(5,),
        sampling=SamplingParams(max_tokens=1000, seed=0),
        num_choices=num_choices,
    )
    return RunningGeneration(request, clock=lambda: 0.0)


def token(token_id: int, choice: int = 0) -> TokenEvent:
    return TokenEvent(request_id="a", choice_index=choice, token_id=token_id)


def at_once(call: Awaitable[T]) -> T:
    """The result of a call that must not give the event loop a turn."""
    steps = call.__await__()
    try:
        next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits")


@given(st.lists(ACTIONS, max_size=200))
async def test_what_is_said_to_be_here_comes_without_a_wait(actions):
    generation = running()
    merged = MergedGenerations(1)
    merged.take_only(generation)
    expected: list[tuple[int, int]] = []
    ended: set[int] = set()
    for number, (action, choice) in enumerate(actions):
        if action == "stop":
            generation.stop_choice(choice)
            ended.add(choice)
            expected = [(c, n) for c, n in expected if c != choice]
        elif action == "take":
            while merged.has_next:
                item = at_once(merged.next())
                if item is None:
                    assert len(ended) == NUM_CHOICES
                    assert not expected
                    return
                assert (item[1].choice_index, item[1].token_id) == expected.pop(0)
            assert not expected or number > MAX_QUEUED  # the loop is to have a turn
        else:
            event = token(number, choice)
            generation.put(replace(event, finish_reason="length") if action == "last" else event)
            if choice not in ended:
                expected.append((choice, number))
            if action == "last":
                ended.add(choice)


async def test_an_error_comes_behind_what_was_drawn_and_the_end_behind_it():
    generation = running()
    generation.put(token(7))
    generation.fail(EngineError("dead"))
    assert at_once(anext(generation)).token_id == 7
    with pytest.raises(EngineError, match="dead"):
        at_once(anext(generation))
    for _ in range(2):
        assert generation.has_next
        with pytest.raises(StopAsyncIteration):
            at_once(anext(generation))


def fail(generation: RunningGeneration) -> None:
    """Fail as drivers do: the error's traceback holds the frame that holds the generation."""
    try:
        raise EngineError("dead")
    except EngineError as error:
        generation.fail(error)


async def raised(generation: RunningGeneration) -> None:
    with pytest.raises(EngineError):
        await anext(generation)


async def left(generation: RunningGeneration) -> None:
    generation.close()


@pytest.mark.parametrize("end", [raised, left])
async def test_a_failed_request_leaves_nothing_to_the_collector(
    end: Callable[[RunningGeneration], Awaitable[None]],
):
    async def ask() -> None:
        generation = running()
        fail(generation)
        await end(generation)

    assert await num_left(ask) == 0
