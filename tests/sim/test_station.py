"""A station keeps the order and every job, and waits as long as queueing theory says."""

import math
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.sim.events import Events
from prfaas.sim.station import Job, Station


def erlang_c(num_servers: int, load: float) -> float:
    """The share of jobs that wait in M/M/c, with a load of lambda / mu."""
    rho = load / num_servers
    last = load**num_servers / math.factorial(num_servers) / (1 - rho)
    return last / (sum(load**k / math.factorial(k) for k in range(num_servers)) + last)


def simulate(num_servers: int, rho: float, *, num_jobs: int, seed: int) -> tuple[float, float]:
    """Return the mean wait and the utilisation of M/M/c with a mean service of 1 s."""
    events, random = Events(), Random(seed)
    station = Station(events, num_servers=num_servers)
    waits: list[float] = []

    def arrive(left: int) -> None:
        arrived_s = events.now_s
        station.submit(
            random.expovariate(1.0),
            on_done=lambda: None,
            on_start=lambda: waits.append(events.now_s - arrived_s),
        )
        if left > 1:
            gap_s = random.expovariate(rho * num_servers)
            events.after(gap_s, lambda: arrive(left - 1))

    arrive(num_jobs)
    events.run()
    station.check()
    assert (station.num_done, station.num_arrivals) == (num_jobs, num_jobs)
    return sum(waits) / num_jobs, station.busy_s / (events.now_s * num_servers)


@pytest.mark.slow
@pytest.mark.parametrize(("num_servers", "rho"), [(1, 0.5), (4, 0.8), (12, 0.8)])
def test_the_mean_wait_is_that_of_m_m_c(num_servers, rho):
    theory_s = erlang_c(num_servers, rho * num_servers) / (num_servers * (1 - rho))
    runs = [simulate(num_servers, rho, num_jobs=40_000, seed=seed) for seed in range(3)]
    assert sum(wait for wait, _ in runs) / 3 == pytest.approx(theory_s, rel=0.1)
    assert sum(used for _, used in runs) / 3 == pytest.approx(rho, rel=0.02)


def test_m_d_1_waits_half_as_long_as_m_m_1():
    events, random, waits = Events(), Random(7), []
    station = Station(events, num_servers=1)

    def arrive(left: int) -> None:
        arrived_s = events.now_s
        station.submit(1.0, lambda: None, lambda: waits.append(events.now_s - arrived_s))
        if left:
            events.after(random.expovariate(0.5), lambda: arrive(left - 1))

    arrive(20_000)
    events.run()
    assert sum(waits) / len(waits) == pytest.approx(0.5 / (2 * (1 - 0.5)), rel=0.08)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 4))
def test_jobs_start_in_order_and_end_when_a_list_schedule_says(services, num_servers):
    events, started, ended = Events(), list[int](), dict[int, float]()

    def end(index: int) -> None:
        ended[index] = events.now_s

    station = Station(events, num_servers=num_servers)
    for index, service_s in enumerate(services):
        station.submit(
            service_s,
            on_done=partial(end, index),
            on_start=partial(started.append, index),
        )
    waiting_s = station.waiting_work_s
    assert waiting_s == sum(services[num_servers:])
    events.run()
    assert started == list(range(len(services)))
    free = [0.0] * num_servers
    for index, service_s in enumerate(services):
        first = min(range(num_servers), key=free.__getitem__)
        free[first] += service_s
        assert ended[index] == free[first]
    assert station.busy_s == sum(services)
    station.check()


class Operations(RuleBasedStateMachine):
    """Jobs come and go, servers too; nothing is lost."""

    def __init__(self):
        super().__init__()
        self.events = Events()
        self.station = Station(self.events, num_servers=2)
        self.jobs: list[Job] = []
        self.done: list[int] = []
        self.gone: set[int] = set()

    @rule(service_s=st.integers(0, 5))
    def submit(self, service_s):
        index = len(self.jobs)
        self.jobs.append(self.station.submit(service_s, lambda: self.done.append(index)))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def withdraw(self, data):
        index = data.draw(st.integers(0, len(self.jobs) - 1))
        was_here = index not in self.gone and index not in self.done
        assert self.station.withdraw(self.jobs[index]) == was_here
        if was_here:
            self.gone.add(index)

    @rule(num_servers=st.integers(0, 4))
    def set_servers(self, num_servers):
        before = self.station.num_serving
        self.station.set_servers(num_servers)
        assert self.station.num_serving >= before  # nobody is cut off

    @rule(seconds=st.integers(0, 4))
    def wait(self, seconds):
        self.events.run(until_s=self.events.now_s + seconds)

    @invariant()
    def nothing_is_lost(self):
        self.station.check()
        self.events.check()
        assert len(self.done) == len(set(self.done)) == self.station.num_done
        assert not self.gone & set(self.done)

    def teardown(self):
        self.station.set_servers(1)
        self.events.run()
        assert {*self.done, *self.gone} == set(range(len(self.jobs)))


TestOperations = Operations.TestCase


@pytest.mark.parametrize("service_s", [-1.0, math.nan])
def test_a_service_that_is_no_time_is_refused(service_s):
    with pytest.raises(ValueError, match="a service of"):
        Station(Events(), num_servers=1).submit(service_s, lambda: None)


def test_a_count_of_servers_below_zero_is_refused():
    with pytest.raises(ValueError, match="-1 servers"):
        Station(Events(), num_servers=1).set_servers(-1)


def test_a_server_that_fails_loses_its_job_and_the_queue_goes_on_with_the_others():
    events, ended, lost = Events(), list[str](), list[str]()
    station = Station(events, num_servers=2)
    for name in "abcd":
        station.submit(10.0, partial(ended.append, name), on_lost=partial(lost.append, name))
    events.at(4.0, lambda: station.lose(1))
    events.run(until_s=4.0)
    station.check()
    assert (lost, station.num_servers, station.num_serving) == (["a"], 1, 1)
    assert station.residual_work_s == pytest.approx(6.0)
    events.run()
    assert (ended, station.num_withdrawn) == (["b", "c", "d"], 1)
    assert station.residual_work_s == 0
    station.lose(7)
    assert station.num_servers == 0
