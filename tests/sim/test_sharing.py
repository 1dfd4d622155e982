"""A shared server gives every job its amount, at the rate of so many jobs."""

import math
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.sim.events import Events
from prfaas.sim.sharing import Share, SharedServer


def link(rate: float):
    """A link of so many bytes per second, divided alike."""
    return lambda num_jobs: rate / num_jobs


def test_two_flows_share_a_link_and_the_second_gets_it_alone_in_the_end():
    events, ended = Events(), dict[str, float]()
    server = SharedServer(events, rate_each=link(10.0))
    server.submit(50.0, lambda: ended.setdefault("a", events.now_s))
    events.at(2.0, lambda: server.submit(60.0, lambda: ended.setdefault("b", events.now_s)))
    events.run()
    # a: 20 alone, 30 at half rate until 8 s; b: 30 by then, 30 more alone.
    assert ended == {"a": pytest.approx(8.0), "b": pytest.approx(11.0)}


def test_an_outage_stops_a_flow_and_nothing_is_lost():
    events, ended = Events(), []
    server = SharedServer(events, rate_each=link(10.0))
    share = server.submit(100.0, lambda: ended.append(events.now_s))
    events.at(4.0, lambda: server.set_rate(link(0.0)))
    events.run(until_s=9.0)
    assert (ended, server.amount_left(share)) == ([], 60.0)
    server.set_rate(link(20.0))
    events.run()
    assert ended == [12.0]
    assert server.amount_left(share) == 0


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), min_size=1, max_size=12),
    st.sampled_from([None, 1, 3]),
)
def test_the_ends_are_those_of_small_steps(jobs, max_jobs):
    """The oracle gives each job in progress its part of every tick."""

    def rate_each(num_jobs: int) -> float:
        return 4.0 / (num_jobs + 1)

    events, ended = Events(), dict[int, float]()
    server = SharedServer(events, rate_each=rate_each, max_jobs=max_jobs)

    def end(index: int) -> None:
        ended[index] = events.now_s

    for index, (time_s, amount) in enumerate(jobs):
        events.at(time_s, partial(server.submit, amount, partial(end, index)))
    events.run()
    server.check()
    order = sorted(range(len(jobs)), key=lambda index: (jobs[index][0], index))
    left = {index: float(jobs[index][1]) for index in order}
    now_s, expected = 0.0, {}
    limit = len(jobs) if max_jobs is None else max_jobs
    while left:
        here = [i for i in order if i in left and jobs[i][0] <= now_s + 1e-12][:limit]
        arrivals = [jobs[i][0] - now_s for i in order if jobs[i][0] > now_s + 1e-12]
        rate = rate_each(len(here)) if here else 0.0
        steps = arrivals + [left[i] / rate for i in here]
        step = max(0.0, min(steps))
        for i in here:
            left[i] -= step * rate
        now_s += step
        for i in here:
            if left[i] <= 1e-9:
                expected[i] = now_s
                del left[i]
    assert ended == {i: pytest.approx(t, abs=1e-6) for i, t in expected.items()}


@pytest.mark.slow
def test_m_m_1_shared_alike_stays_as_long_as_theory_says():
    events, random, stays = Events(), Random(3), []
    server = SharedServer(events, rate_each=link(1.0))

    def arrive(left: int) -> None:
        arrived_s = events.now_s
        server.submit(random.expovariate(1.0), lambda: stays.append(events.now_s - arrived_s))
        if left:
            events.after(random.expovariate(0.6), lambda: arrive(left - 1))

    arrive(40_000)
    events.run()
    assert sum(stays) / len(stays) == pytest.approx(1 / (1 - 0.6), rel=0.08)


class Operations(RuleBasedStateMachine):
    """Jobs come and go, the rate changes; nothing is lost."""

    def __init__(self):
        super().__init__()
        self.events = Events()
        self.server = SharedServer(self.events, rate_each=link(3.0), max_jobs=3)
        self.shares: list[Share] = []
        self.done: list[int] = []
        self.gone: set[int] = set()

    @rule(amount=st.floats(0, 20))
    def submit(self, amount):
        index = len(self.shares)
        self.shares.append(self.server.submit(amount, lambda: self.done.append(index)))

    @precondition(lambda self: self.shares)
    @rule(data=st.data())
    def withdraw(self, data):
        index = data.draw(st.integers(0, len(self.shares) - 1))
        was_here = index not in self.gone and index not in self.done
        assert self.server.withdraw(self.shares[index]) == was_here
        if was_here:
            self.gone.add(index)

    @rule(rate=st.sampled_from([0.0, 0.5, 3.0]))
    def set_rate(self, rate):
        self.server.set_rate(link(rate))

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds):
        self.events.run(until_s=self.events.now_s + seconds)

    @invariant()
    def nothing_is_lost(self):
        self.server.check()
        self.events.check()
        assert len(self.done) == len(set(self.done)) == self.server.num_done
        for share in self.shares:
            assert 0 <= self.server.amount_left(share) <= share.amount + 1e-9

    def teardown(self):
        self.server.set_rate(link(1.0))
        self.events.run()
        assert {*self.done, *self.gone} == set(range(len(self.shares)))


TestOperations = Operations.TestCase


@pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf])
def test_an_amount_that_is_none_is_refused(amount):
    with pytest.raises(ValueError, match="an amount of"):
        SharedServer(Events(), rate_each=link(1.0)).submit(amount, lambda: None)
