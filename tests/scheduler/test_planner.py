"""The planner finds what trying everything finds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.scheduler.lengths import of_sample
from prfaas.scheduler.planner import best_cut, plan, plan_within, sweep_split, sweep_threshold
from prfaas.scheduler.profile import Link
from prfaas.scheduler.throughput import Shape, ThroughputModel, prefill_balance
from tests.scheduler.planning import FAST, model, profile

samples = st.lists(st.integers(1, 200_000), min_size=1, max_size=30).map(of_sample)
links = st.sampled_from([1e7, 1e9, 12.5e9]).map(lambda rate: Link(bytes_per_s=rate))


def rate(made: ThroughputModel, shape: Shape, cut: int) -> float:
    return made.rates(shape, cut).lambda_max_rps


@given(lengths=samples, link=links, num_prfaas=st.integers(1, 5), num_local=st.integers(2, 9))
def test_the_plan_is_the_best_of_the_whole_grid(lengths, link, num_prfaas, num_local):
    made = model(lengths, link=link)
    found = plan(made, "prfaas", num_prfaas=num_prfaas, num_local=num_local)
    grid = [
        rate(made, Shape(num_prfaas=num_prfaas, num_prefill=n, num_decode=num_local - n), cut)
        for n in range(1, num_local)
        for cut in range(made.num_cuts)
    ]
    assert found.rates.lambda_max_rps == pytest.approx(max(grid))
    assert found.rates.lambda_max_rps == rate(made, found.shape, found.cut)
    assert found.shape.num_prfaas == num_prfaas
    assert found.shape.num_prefill + found.shape.num_decode == num_local


@given(lengths=samples, link=links, num_prfaas=st.integers(1, 5), num_prefill=st.integers(1, 9))
def test_the_best_cut_carries_the_most_prefill(lengths, link, num_prfaas, num_prefill):
    made = model(lengths, link=link)
    # With this much decode, prefill alone limits.
    shape = Shape(num_prfaas=num_prfaas, num_prefill=num_prefill, num_decode=100_000)
    best = max(rate(made, shape, cut) for cut in range(made.num_cuts))
    assert rate(made, shape, best_cut(made, shape)) == pytest.approx(best)


@settings(max_examples=25)
@given(
    lengths=samples,
    budget=st.floats(24, 150),
    kind=st.sampled_from(["prfaas", "homogeneous", "naive"]),
)
def test_a_budget_buys_the_best_of_all_it_can(lengths, budget, kind):
    made = model(lengths)  # an instance costs 8 here, 16 there
    best = 0.0
    for num_prfaas in range(0 if kind == "homogeneous" else 1, 11):
        for num_local in range(20):
            if 16 * num_prfaas + 8 * num_local > budget or (kind == "homogeneous" and num_prfaas):
                continue
            for n in [0] if kind == "naive" else range(1, num_local):
                if num_local - n < 1:
                    continue
                shape = Shape(num_prfaas=num_prfaas, num_prefill=n, num_decode=num_local - n)
                cuts = {
                    "prfaas": range(made.num_cuts),
                    "homogeneous": [made.num_cuts - 1],
                    "naive": [0],
                }[kind]
                best = max(best, *(rate(made, shape, cut) for cut in cuts))
    if best == 0.0:
        with pytest.raises(ValueError, match="buys no"):
            plan_within(made, kind, budget_cost=budget)
        return
    found = plan_within(made, kind, budget_cost=budget)
    assert found.rates.lambda_max_rps == pytest.approx(best)
    assert found.cost <= budget


def test_a_larger_budget_never_carries_less():
    rates = [
        plan_within(model(), "prfaas", budget_cost=cost).rates.lambda_max_rps
        for cost in (32, 64, 128, 256, 512)
    ]
    assert rates == sorted(rates)


def test_the_best_threshold_balances_prefill_on_both_sides():
    found = plan(model(), "prfaas", num_prfaas=4, num_local=8)
    rates = found.rates
    assert rates.theta_prfaas_rps is not None
    assert rates.theta_prefill_rps is not None
    balance = prefill_balance(
        rates.theta_prfaas_rps, rates.theta_prefill_rps, rates.offload_fraction
    )
    assert balance == pytest.approx(1, rel=0.03)  # of 200 lengths


def test_without_decode_to_spare_the_threshold_still_balances_prefill():
    made = model()
    few = plan(made, "prfaas", num_prfaas=40, num_local=2)
    assert few.rates.bottleneck == "decode"
    shape = few.shape
    room = [
        min(v for s, v in made.limits(shape, c).items() if s != "decode")
        for c in range(made.num_cuts)
    ]
    assert room[few.cut] == max(room)


def test_ttft_is_mean_and_quantile_of_the_service_times():
    made = model(of_sample([100, 100, 100, 100, 100, 100, 100, 100, 100, 50_000]))
    naive = plan(made, "naive", num_prfaas=1, num_local=1)
    assert naive.ttft_mean_s == pytest.approx(0.9 * FAST(100) + 0.1 * FAST(50_000))
    assert naive.ttft_p90_s == pytest.approx(FAST(100))


@pytest.mark.parametrize(
    ("kind", "num_prfaas", "num_local"),
    [
        ("prfaas", 0, 8),
        ("prfaas", 4, 1),
        ("prfaas", 4, 0),
        ("homogeneous", 4, 8),
        ("homogeneous", 0, 1),
        ("homogeneous", 0, 0),
        ("naive", 0, 8),
        ("naive", 4, 0),
    ],
)
def test_too_few_instances_are_refused_with_what_is_needed(kind, num_prfaas, num_local):
    with pytest.raises(ValueError, match=f"{num_prfaas} PrfaaS and {num_local} local .* needs"):
        plan(model(), kind, num_prfaas=num_prfaas, num_local=num_local)


def test_a_budget_needs_prices():
    with pytest.raises(ValueError, match=r"needs a \[cost\] in every profile"):
        plan_within(model(local=profile(cost=None)), "homogeneous", budget_cost=100)
    dear = model(prfaas=profile(FAST, cost=None))
    with pytest.raises(ValueError, match=r"needs a \[cost\] in every profile"):
        plan_within(dear, "prfaas", budget_cost=100)
    assert plan_within(dear, "homogeneous", budget_cost=100).cost == 96
    assert plan(dear, "prfaas", num_prfaas=1, num_local=2).cost is None


def test_a_budget_for_too_many_shapes_is_refused():
    with pytest.raises(ValueError, match="shapes or more; at most 200,000 are searched"):
        plan_within(model(), "prfaas", budget_cost=1e6)


def test_the_sweeps_peak_at_the_plan():
    made = model()
    found = plan(made, "prfaas", num_prfaas=4, num_local=8)
    for points in (sweep_threshold(made, found.shape), sweep_split(made, found)):
        best = max(points, key=lambda point: point.rates.lambda_max_rps)
        assert best.rates == found.rates
    assert [p.shape.num_prefill for p in sweep_split(made, found)] == list(range(1, 8))
    thresholds = [p.threshold_tokens for p in sweep_threshold(made, found.shape)]
    assert thresholds == sorted(set(thresholds))
