"""Who is held back goes once, in order, and sooner or later."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.scheduler.forecast import Prompt
from prfaas.scheduler.holding import LOOK, HeldPrompts
from prfaas.scheduler.policies import Decision

GO = Decision(remote=None, reason="late", predicted_ttft_s=1.0)
STAY = Decision(remote=None, reason="held", predicted_ttft_s=1.0, is_held=True)
SLO_S = 10.0


def prompt(tokens: int = 100, arrived_s: float = 0.0) -> Prompt:
    return Prompt(num_tokens=tokens, arrived_s=arrived_s)


def held(*lengths: int, arrived_s: float = 0.0) -> HeldPrompts[int]:
    prompts: HeldPrompts[int] = HeldPrompts(period_s=SLO_S)
    for length in lengths:
        prompts.hold(length, prompt(length, arrived_s), arrived_s)
    return prompts


def released(prompts: HeldPrompts[int], now_s: float, *, room: int = 1_000) -> list[int]:
    """Release with room for so many; one that has to go, goes."""
    left = [room]

    def decide(asked: Prompt) -> Decision:
        if asked.arrived_s is not None and left[0] == 0:
            return STAY
        left[0] -= 1
        return GO

    gone = [key for key, _ in prompts.release(decide, now_s)]
    prompts.check()
    return gone


def test_those_that_may_be_in_time_go_the_shortest_first():
    assert released(held(300, 100, 200), 1.0, room=2) == [100, 200]


def test_the_late_go_in_the_order_in_which_they_came():
    assert released(held(300, 100, 200), SLO_S, room=2) == [300, 100]


def test_one_that_may_be_in_time_goes_before_all_that_are_late():
    prompts = held(300, 100)
    prompts.hold(900, prompt(900, SLO_S), SLO_S)
    assert released(prompts, SLO_S + 1, room=2) == [900, 300]


def test_only_the_shortest_are_decided_again_at_a_time():
    prompts = held(*range(1, LOOK + 5))
    asked: list[int] = []

    def decide(each: Prompt) -> Decision:
        asked.append(each.num_tokens)
        return STAY

    assert list(prompts.release(decide, 1.0)) == []
    assert asked == [*range(1, LOOK + 1)]


def test_a_longer_one_does_not_wait_behind_a_shorter_one_that_is_held():
    prompts = held(100, 200)
    gone = prompts.release(lambda each: GO if each.num_tokens == 200 else STAY, 1.0)
    assert [key for key, _ in gone] == [200]


def test_without_any_room_one_late_prompt_goes_in_each_period():
    prompts = held(300, 100, 200)
    went = {now_s: released(prompts, now_s, room=0) for now_s in (9.0, 10.0, 11.0, 20.0, 31.0)}
    assert went == {9.0: [], 10.0: [300], 11.0: [], 20.0: [100], 31.0: [200]}
    assert len(prompts) == 0


def test_a_prompt_that_has_to_go_is_not_held():
    with pytest.raises(AssertionError, match="has to go"):
        held().hold(1, Prompt(num_tokens=5), 0.0)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 5), st.integers(0, 3)), max_size=30),
)
def test_everyone_goes_exactly_once(steps):
    prompts, now_s, gone = held(), 0.0, []
    for index, (tokens, wait_s, room) in enumerate(steps):
        now_s += wait_s
        prompts.hold(index, prompt(tokens, now_s), now_s)
        gone += released(prompts, now_s, room=room)
        assert len(prompts) + len(gone) == index + 1
    for _ in steps:
        now_s += SLO_S + 1
        gone += released(prompts, now_s, room=0)
    assert sorted(gone) == [*range(len(steps))]
