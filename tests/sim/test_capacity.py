"""A capacity is found by running, and is what the slowest stage carries."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.simulation_table import SimulationOptions
from prfaas.config.traces import TraceRequest
from prfaas.scheduler.lengths import of_sample
from prfaas.scheduler.policies import own_policy
from prfaas.sim.capacity import (
    GROWTH,
    NEAR,
    WIDTH,
    bisected,
    capacities,
    growth,
    growth_at,
    least_requests,
    unit_requests,
)
from tests.scheduler.planning import model
from tests.sim.deployments import MODEL, planned


def test_requests_of_a_seed_come_at_exactly_one_a_second():
    requests = unit_requests(MODEL.workload, num_requests=100, seed=3)
    assert len(requests) == 100
    assert requests[-1].arrival_s == pytest.approx(100.0)
    assert requests == unit_requests(MODEL.workload, num_requests=100, seed=3)


def test_growth_compares_the_last_quarter_with_the_second():
    assert growth([5] * 40) == 0
    assert growth(list(range(400))) == pytest.approx(1.0)
    assert growth([0] * 30 + [7] * 10) == pytest.approx(7 / 20)


@given(st.floats(1e-3, 1e5), st.floats(1e-3, 1e5), st.floats(1.01, 3.0))
def test_bisection_finds_the_limit_from_any_guess(limit, low, width):
    asked: list[float] = []

    def grows_at(rate: float) -> float:
        asked.append(rate)
        return 0.0 if rate <= limit else 1 - (1 - GROWTH) * limit / rate + 1e-12

    found = bisected(grows_at, low=low, high=low * width)
    assert found == pytest.approx(limit, rel=WIDTH)
    assert len(asked) == len(set(asked))
    assert sum(rate > limit * NEAR for rate in asked) <= 2, "one tells what is carried"


@given(
    st.floats(0.5, 50),
    st.floats(1.01, 3.0),
    st.floats(1.0001 * GROWTH, 1.5),
    st.floats(-0.05, GROWTH),
)
def test_what_is_assumed_of_far_rates_never_changes_what_is_found(
    limit: float, width: float, above: float, below: float
) -> None:
    """Whatever growth says of what is carried: a wrong guess costs time."""

    def plain(rate: float) -> float:
        return 0.0 if rate <= limit else inf

    def misleading(rate: float) -> float:
        return below if rate <= limit else above

    found = bisected(misleading, low=1.0, high=width)
    assert found == bisected(plain, low=1.0, high=width)


def test_a_rate_that_is_never_too_much_is_said():
    with pytest.raises(ValueError, match="are not too much"):
        bisected(lambda rate: 0.0, low=1.0, high=2.0)


@pytest.mark.parametrize("kind", ["homogeneous", "naive"])
def test_the_backlog_of_even_equal_prompts_grows_beyond_lambda_max_and_not_below(kind):
    """Without luck in arrivals and lengths, the model's rate is the oracle."""
    of = model(of_sample([20_000.0]))
    at = planned(kind, of=of)
    requests = [TraceRequest(1.0 * i, 20_000, 1024) for i in range(1, 801)]
    for factor, is_kept in [(0.98, True), (1.02, False)]:
        grows_by = growth_at(
            of,
            at,
            requests,
            rate_rps=factor * at.rates.lambda_max_rps,
            policy=own_policy(at.kind),
            options=SimulationOptions(),
            seed=0,
        )
        assert (grows_by <= GROWTH) == is_kept


@pytest.mark.slow
def test_capacities_lie_about_lambda_max():
    at = planned("homogeneous")
    found = capacities(
        MODEL, at, policy="local", options=SimulationOptions(), num_requests=2_000, seeds=(0, 1)
    )
    assert sum(found) / 2 == pytest.approx(at.rates.lambda_max_rps, rel=0.05)


def test_too_few_requests_are_refused():
    at = planned()
    assert least_requests(MODEL, at) == 4 * (2 + at.shape.num_prefill + 20 * at.shape.num_decode)
    with pytest.raises(ValueError, match="100 requests do not fill"):
        capacities(
            MODEL, at, policy="static", options=SimulationOptions(), num_requests=100, seeds=(0,)
        )
