"""A run counts what happened: all requests, against what theory says of a queue."""

import gc
from collections.abc import Sequence
from dataclasses import asdict
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.simulation_table import Failure, LinkChange, SimulationOptions
from prfaas.config.traces import TraceRequest
from prfaas.scheduler.curves import LinearCurve
from prfaas.scheduler.planner import Plan
from prfaas.scheduler.policies import PolicyName
from prfaas.scheduler.throughput import ThroughputModel
from prfaas.sim.run import Run, quantile, simulate
from tests.scheduler.planning import model, profile
from tests.sim.deployments import MODEL, arriving, planned


def ran(
    at: Plan,
    requests: Sequence[TraceRequest],
    of: ThroughputModel = MODEL,
    policy: PolicyName = "local",
    seed: int = 0,
    **options: Any,
) -> Run:
    return simulate(
        of, at, requests, policy=policy, options=SimulationOptions(**options), seed=seed
    )


def test_figures_of_two_requests_are_those_one_can_count():
    requests = [TraceRequest(0.0, 10_000, 1), TraceRequest(1.0, 10_000, 1)]
    at = planned("homogeneous", num_local=2)
    service_s = 1.0 + 0.672 + 0.1066
    run = ran(at, requests, ttft_slo_s=2.0)
    assert run.duration_s == pytest.approx(2 * service_s)
    assert run.ttft_mean_s == pytest.approx((service_s + 2 * service_s - 1) / 2)
    assert (run.ttft_p50_s, run.ttft_p99_s) == pytest.approx((service_s, 2 * service_s - 1))
    assert run.goodput_rps == pytest.approx(run.throughput_rps / 2)
    assert run.prefill_busy_fraction == pytest.approx(1.0)
    assert run.prfaas_busy_fraction is None
    assert (run.offload_fraction, run.egress_bytes_per_s, run.reasons) == (0, 0, {"policy": 2})


@pytest.mark.slow
def test_the_wait_of_m_m_1_is_what_theory_says():
    """T_prefill is proportional to the length here, and lengths are exponential."""
    line = LinearCurve(tokens=(1e-6, 1.0), values=(1e-12, 1e-6))
    of = model(local=profile(line))
    random, now_s, requests = Random(5), 0.0, []
    for _ in range(20_000):
        now_s += random.expovariate(0.6)
        requests.append(TraceRequest(now_s, 1 + round(random.expovariate(1e-6)), 1))
    run = ran(planned("homogeneous", of=of, num_local=2), requests, of=of)
    assert run.ttft_mean_s == pytest.approx(1 / (1 - 0.6), rel=0.07)
    assert run.prefill_busy_fraction == pytest.approx(0.6, rel=0.03)


@pytest.mark.parametrize("policy", ["static", "threshold", "predictive"])
def test_the_same_seed_gives_the_same_run_and_another_does_not(policy):
    runs = [
        asdict(ran(planned(), arriving(300, 1.0), policy=policy, jitter_s=0.05, seed=seed))
        for seed in (4, 4, 5)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_progress_tells_how_many_have_arrived():
    seen: list[int] = []
    simulate(
        MODEL,
        planned(),
        arriving(50, 1.0),
        policy="static",
        options=SimulationOptions(),
        seed=0,
        on_progress=seen.append,
    )
    assert seen[-1] == 50


def test_curves_are_the_quantiles_and_the_backlog_of_the_run():
    requests = arriving(250, 1.5)
    run = ran(planned(), requests, policy="static")
    assert len(run.ttft_curve_s) == 100
    assert [*run.ttft_curve_s] == sorted(run.ttft_curve_s)
    assert (run.ttft_curve_s[50], run.ttft_curve_s[90]) == (run.ttft_p50_s, run.ttft_p90_s)
    times = [at_s for at_s, _ in run.backlog_curve]
    assert times == [request.arrival_s for request in requests[::3]]
    assert all(1 <= backlog <= 250 for _, backlog in run.backlog_curve)


def test_a_run_leaves_no_cycles_so_that_none_need_be_collected():
    def left_by(num: int) -> int:
        failures = (Failure(role="prfaas", at_s=40.0, for_s=9.0, instances=2),)
        link = (LinkChange(at_s=60.0, bandwidth_fraction=0.0), LinkChange(at_s=80.0))
        requests = arriving(num, 1.0)
        gc.collect()
        ran(planned(), requests, policy="static", failures=failures, link=link)
        return gc.collect()

    assert gc.isenabled()
    assert abs(left_by(400) - left_by(200)) < 100, "what is left is the deployment"
    assert gc.isenabled()


def test_no_request_is_refused():
    with pytest.raises(ValueError, match="no request"):
        ran(planned(), [])


@given(st.lists(st.integers(0, 50), min_size=1), st.floats(0, 1))
def test_a_quantile_is_the_least_that_enough_do_not_exceed(values, fraction):
    values.sort()
    found = quantile(values, fraction)
    assert sum(v <= found for v in values) >= fraction * len(values) - 1e-6
    assert sum(v < found for v in values) < max(fraction * len(values), 1e-9) + 1e-6
