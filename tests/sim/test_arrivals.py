"""Arrivals have the rate, the lengths and the answers they were asked for, and repeat with the seed."""

import math
from itertools import islice, pairwise
from random import Random

import pytest

from prfaas.config.traces import TraceRequest
from prfaas.scheduler.lengths import truncated_lognormal
from prfaas.scheduler.profile import Workload
from prfaas.sim.arrivals import poisson_arrivals, scaled

LENGTHS = truncated_lognormal(mu=9.0, sigma=0.5, min_tokens=128, max_tokens=50_000)
WORKLOAD = Workload(lengths=LENGTHS, mean_output_tokens=10.25)


def drawn(seed: int, num: int = 20_000) -> list[TraceRequest]:
    return list(islice(poisson_arrivals(WORKLOAD, rate_rps=4.0, random=Random(seed)), num))


def test_the_same_seed_gives_the_same_requests_and_another_others():
    assert drawn(1, 100) == drawn(1, 100) != drawn(2, 100)


def test_gaps_are_exponential_and_lengths_are_the_workloads():
    requests = drawn(0)
    gaps = [high.arrival_s - low.arrival_s for low, high in pairwise(requests)]
    mean_s = sum(gaps) / len(gaps)
    assert mean_s == pytest.approx(0.25, rel=0.03)
    deviation = math.sqrt(sum((gap - mean_s) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean_s, rel=0.03)
    tokens = sorted(request.input_tokens for request in requests)
    assert sum(tokens) / len(tokens) == pytest.approx(LENGTHS.mean_tokens, rel=0.02)
    for fraction in (0.1, 0.5, 0.9):
        quantile = tokens[int(fraction * len(tokens))]
        assert quantile == pytest.approx(LENGTHS.quantile_tokens(fraction), rel=0.03)


def test_answers_are_whole_tokens_around_their_mean():
    outputs = [request.output_tokens for request in drawn(0)]
    assert set(outputs) == {10, 11}
    assert sum(outputs) / len(outputs) == pytest.approx(10.25, rel=0.01)


def test_a_trace_runs_as_fast_as_told():
    trace = [TraceRequest(0.0, 5, 1, (1,)), TraceRequest(8.0, 6, 2)]
    faster = list(scaled(trace, rate_factor=4.0))
    assert faster == [TraceRequest(0.0, 5, 1, (1,)), TraceRequest(2.0, 6, 2)]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="an arrival rate of"):
        next(poisson_arrivals(WORKLOAD, rate_rps=rate, random=Random(0)))
    with pytest.raises(ValueError, match="a rate factor of"):
        next(scaled([], rate_factor=rate))
