"""Sequences join the instance with the fewest; instances come, go and fail without losing one."""

from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prfaas.scheduler.curves import LinearCurve
from prfaas.scheduler.profile import DecodeProfile
from prfaas.sim.decode_pool import DecodePool
from prfaas.sim.events import Events

PROFILE = DecodeProfile(
    step_s=LinearCurve(tokens=(1.0, 4.0), values=(1.0, 4.0)), max_batch=4, provenance="measured"
)


def pool(events: Events, num_instances: int, model="fluid") -> DecodePool:
    return DecodePool(events, PROFILE, num_instances=num_instances, max_batch=4, model=model)


@pytest.mark.parametrize("model", ["fluid", "stepped"])
def test_sequences_spread_over_the_instances(model):
    events, ended = Events(), []
    place = pool(events, 3, model)
    for _ in range(6):
        place.submit(10, lambda: ended.append(events.now_s), lambda left: None)
    place.check()
    events.run()
    assert ended == [pytest.approx(20.0)] * 6, "two each: a step of 2 s"


@pytest.mark.parametrize("model", ["fluid", "stepped"])
def test_a_lost_instance_gives_back_what_its_sequences_still_need(model):
    events, ended, lost = Events(), list[float](), list[int]()
    place = pool(events, 2, model)
    for _ in range(2):
        place.submit(10, lambda: ended.append(events.now_s), lost.append)
    events.at(3.5, lambda: events.after(5.0, partial(place.restore, place.lose(1))))
    events.run()
    assert (ended, lost) == ([10.0], [7])
    assert place.num_up == 2
    place.check()


def test_without_an_instance_sequences_wait_for_one():
    events, ended = Events(), []
    place = pool(events, 1)
    lost = place.lose(5)
    place.submit(2, lambda: ended.append(events.now_s), lambda left: None)
    assert (place.num_up, place.num_sequences) == (0, 1)
    events.at(7.0, partial(place.restore, lost))
    events.run()
    assert ended == [9.0]


def test_a_drained_instance_ends_its_sequences_and_takes_no_more():
    events, ended, drained = Events(), [], []
    place = pool(events, 2)
    for tokens in (5, 50):
        place.submit(tokens, lambda: ended.append(events.now_s), lambda left: None)
    place.drain(lambda: drained.append(events.now_s))
    assert place.num_up == 1
    place.submit(5, lambda: ended.append(events.now_s), lambda left: None)
    events.run()
    assert drained == [5.0]
    assert ended[:2] == [5.0, 10.0], "the newcomer shares with the long one"
    place.check()
    place.drain(lambda: None)
    with pytest.raises(ValueError, match="no instance to drain"):
        place.drain(lambda: None)


class Operations(RuleBasedStateMachine):
    """Everything that can happen to a pool; each sequence ends or is lost, once."""

    def __init__(self):
        super().__init__()
        self.events = Events()
        self.pool = pool(self.events, 2)
        self.ended: list[int] = []
        self.num = 0
        self.lost: list[int] = []

    @rule(tokens=st.integers(1, 30))
    def submit(self, tokens):
        number = self.num
        self.num += 1
        self.pool.submit(
            tokens, lambda: self.ended.append(number), lambda left: self.ended.append(number)
        )

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds):
        self.events.run(until_s=self.events.now_s + seconds)

    @rule(num=st.integers(1, 3))
    def lose(self, num):
        self.lost += self.pool.lose(num)

    @rule()
    def restore(self):
        self.pool.restore(self.lost)
        self.lost = []

    @rule()
    def add(self):
        self.pool.add()

    @rule()
    def drain(self):
        if self.pool.num_up > 0:
            self.pool.drain(lambda: None)

    @invariant()
    def nothing_is_lost(self):
        self.pool.check()
        assert len(set(self.ended)) == len(self.ended)
        assert self.num == len(self.ended) + self.pool.num_sequences

    def teardown(self):
        self.pool.add()
        self.events.run()
        assert sorted(self.ended) == list(range(self.num))


TestOperations = pytest.mark.slow(Operations.TestCase)
