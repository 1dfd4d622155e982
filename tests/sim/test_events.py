"""The virtual clock runs everything once, in one order, and never back."""

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.sim.events import Event, Events

plans = st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 2)), max_size=30)


@given(plans)
def test_actions_run_by_time_then_priority_then_order_of_scheduling(plan):
    events, ran = Events(), []

    def note(index: int) -> None:
        ran.append((events.now_s, index))

    for index, (time_s, priority) in enumerate(plan):
        events.at(time_s, partial(note, index), priority=priority)
    events.run()
    order = sorted(range(len(plan)), key=lambda index: (*plan[index], index))
    assert ran == [(plan[index][0], index) for index in order]
    assert events.num_run == len(plan)


@given(plans, st.sets(st.integers(0, 29)))
def test_what_is_cancelled_does_not_happen_and_is_not_pending(plan, cancelled):
    events, ran = Events(), set[int]()
    made = [events.at(time_s, partial(ran.add, i)) for i, (time_s, _) in enumerate(plan)]
    for index in cancelled & set(range(len(plan))):
        events.cancel(made[index])
        events.cancel(made[index])
        events.check()
    events.run()
    assert ran == set(range(len(plan))) - cancelled
    assert events.num_pending == 0
    events.check()
    events.cancel(Event(0.0, None))
    assert events.num_pending == 0


def test_an_action_may_schedule_at_its_own_moment():
    events, ran = Events(), []

    def first():
        events.after(0, lambda: ran.append("later"))
        events.after(0, lambda: ran.append("sooner"), priority=-1)

    events.at(3, first)
    events.at(3, lambda: ran.append("beside"))
    events.run()
    assert ran == ["sooner", "beside", "later"]
    assert events.now_s == 3


def test_a_run_ends_at_its_time_or_after_its_actions():
    events, ran = Events(), list[int]()
    for time_s in (1, 2, 3, 4):
        events.at(time_s, partial(ran.append, time_s))
    events.run(until_s=2)
    assert (ran, events.now_s) == ([1, 2], 2)
    events.run(until_s=2.5)
    assert events.now_s == 2.5
    events.run(max_actions=1, until_s=10)
    assert (ran, events.now_s) == ([1, 2, 3], 3)
    events.run()
    assert (ran, events.now_s, events.num_run) == ([1, 2, 3, 4], 4, 4)


@pytest.mark.parametrize("time_s", [0.999, -1, math.nan, math.inf])
def test_the_past_and_no_time_at_all_are_refused(time_s):
    events = Events()
    events.run(until_s=1)
    with pytest.raises(ValueError, match="an event at"):
        events.at(time_s, lambda: None)
    with pytest.raises(ValueError, match="an event at"):
        events.after(-0.1, lambda: None)
