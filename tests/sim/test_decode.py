"""The fluid instance ends sequences when the one that takes every step does."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.curves import LinearCurve
from prfaas.scheduler.profile import DecodeProfile
from prfaas.scheduler.throughput import decode_rate
from prfaas.sim.decode import Sequence, SteppedDecode, fluid_decode
from prfaas.sim.events import Events

DECODE = DecodeProfile(
    step_s=LinearCurve(tokens=(1.0, 20.0), values=(0.012, 0.025)),
    max_batch=20,
    provenance="measured",
)


Arrivals = list[tuple[float, int]]
Make = Callable[..., Any]


def ends(make: Make, arrivals: Arrivals, max_batch: int = 20) -> list[float]:
    """Return when each (arrival, tokens) ends on an instance."""
    events, found = Events(), dict[int, float]()
    instance = make(events, DECODE, max_batch=max_batch)

    def end(index: int) -> None:
        found[index] = events.now_s

    for index, (time_s, num_tokens) in enumerate(arrivals):
        events.at(time_s, partial(instance.submit, num_tokens, partial(end, index)))
    events.run()
    instance.check()
    assert instance.num_done == len(arrivals)
    return [found[index] for index in range(len(arrivals))]


def poisson(rate: float, *, num: int, seed: int) -> Arrivals:
    random, now_s = Random(seed), 0.0
    arrivals: Arrivals = []
    for _ in range(num):
        now_s += random.expovariate(rate)
        arrivals.append((now_s, 1 + int(random.expovariate(1 / 200))))
    return arrivals


def test_one_sequence_takes_its_steps():
    assert ends(SteppedDecode, [(3.0, 10)]) == [pytest.approx(3.0 + 10 * 0.012)]
    assert ends(fluid_decode, [(3.0, 10)]) == [pytest.approx(3.0 + 10 * 0.012)]


def test_a_full_batch_decodes_at_the_rate_of_equation_5():
    arrivals = [(0.0, 100)] * 200
    for make in (SteppedDecode, fluid_decode):
        total_s = max(ends(make, arrivals))
        assert 200 / total_s == pytest.approx(decode_rate(1, 20, 0.025, 100))


@given(st.integers(1, 20), st.integers(1, 300))
def test_a_batch_that_starts_together_is_the_same_in_both(num_sequences, num_tokens):
    arrivals = [(0.0, num_tokens)] * num_sequences
    stepped, fluid = ends(SteppedDecode, arrivals), ends(fluid_decode, arrivals)
    assert stepped == pytest.approx(fluid)


@pytest.mark.parametrize("rate", [0.5, 2.0, 3.5])
def test_the_fluid_instance_is_within_a_few_steps_of_the_stepped_one(rate):
    arrivals = poisson(rate, num=1500, seed=5)
    stepped, fluid = ends(SteppedDecode, arrivals), ends(fluid_decode, arrivals)
    times = [end - arrival for end, (arrival, _) in zip(stepped, arrivals, strict=True)]
    differences = [a - b for a, b in zip(stepped, fluid, strict=True)]
    mean_s = sum(differences) / len(differences)
    # A sequence waits for the running step, about half of one, where the fluid takes it at once.
    assert 0 <= mean_s <= 2 * 0.025
    assert mean_s <= 0.03 * sum(times) / len(times)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 60)), min_size=1, max_size=30),
    st.sets(st.integers(0, 29)),
    st.integers(1, 5),
)
def test_a_withdrawn_sequence_never_ends_and_the_others_do(arrivals, withdrawn, max_batch):
    events, done = Events(), set[int]()
    instance = SteppedDecode(events, DECODE, max_batch=max_batch)

    def begin(index: int, num_tokens: int) -> None:
        sequence = instance.submit(num_tokens, partial(done.add, index))
        if index in withdrawn:
            events.after(0.2, partial(withdraw, index, sequence))

    def withdraw(index: int, sequence: Sequence) -> None:
        assert instance.withdraw(sequence) == (index not in done)
        assert not instance.withdraw(sequence)
        instance.check()

    for index, (time_s, num_tokens) in enumerate(arrivals):
        events.at(time_s, partial(begin, index, num_tokens))
    while events.num_pending:
        events.run(max_actions=1)
        instance.check()
    here = set(range(len(arrivals)))
    assert here - withdrawn <= done <= here
    assert len(done) == instance.num_done


def test_a_sequence_without_a_token_is_refused():
    with pytest.raises(ValueError, match="a sequence of 0 tokens"):
        SteppedDecode(Events(), DECODE, max_batch=1).submit(0, lambda: None)
