"""Runs a deployment over requests, and says what became of them."""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, fsum, inf

from prfaas.config.simulation_table import SimulationOptions
from prfaas.config.traces import TraceRequest
from prfaas.scheduler.planner import Plan
from prfaas.scheduler.policies import PolicyName
from prfaas.scheduler.throughput import ThroughputModel
from prfaas.sim.chrome_trace import Recorder
from prfaas.sim.deployment import Deployment

CURVE_POINTS = 100
"""Of each curve of a run, at most."""
SLICE_ACTIONS = 50_000
"""Between two looks at the progress."""
OnProgress = Callable[[int], object]
"""Called with the requests that have arrived so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one deployment made of one list of requests, all of them until their last token."""

    policy: PolicyName
    num_requests: int
    duration_s: float
    """Until the last request was done."""
    throughput_rps: float
    """All requests over the duration."""
    goodput_rps: float
    """The same of those whose first token came within the SLO."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    offload_fraction: float
    egress_bytes_per_s: float
    """KVCache over the links while requests arrived, on average."""
    prfaas_busy_fraction: float | None
    prefill_busy_fraction: float | None
    """Of the instances, while requests arrived; None without one."""
    hit_fraction: float
    """Of all prompt tokens, those that a prefix cache had."""
    num_moved: int
    """Prefixes that came to the cluster of a prefill ahead of it."""
    num_moves_given_up: int
    moved_bytes: float
    """Of those that came, in both directions."""
    num_fallbacks: int
    num_lost: int
    num_conversions: int
    """Local instances that changed their role."""
    prediction_error_s: float
    """Mean distance between predicted and actual TTFT."""
    reasons: dict[str, int]
    ttft_curve_s: tuple[float, ...]
    """CURVE_POINTS quantiles, from the least one on."""
    backlog_curve: tuple[tuple[float, float], ...]
    """(when, requests in the system), of equally many arrivals each, on average."""


def simulate(
    model: ThroughputModel,
    plan: Plan,
    requests: Sequence[TraceRequest],
    *,
    policy: PolicyName,
    options: SimulationOptions,
    seed: int,
    on_progress: OnProgress | None = None,
    recorder: Recorder | None = None,
) -> Run:
    """Return what became of all requests. Without any, raises ValueError."""
    if not requests:
        raise ValueError("no request to simulate")
    deployment = Deployment(
        model, plan, policy=policy, options=options, seed=seed, recorder=recorder
    )
    deployment.start(requests)
    last_s = requests[-1].arrival_s
    run_until(deployment, last_s, on_progress)
    loaded_s = max(last_s, 1e-9)
    egress = deployment.egress_bytes / loaded_s
    busy_s = sum(remote.station.busy_s for remote in deployment.remotes)
    prfaas_busy = _share(busy_s, plan.shape.num_prfaas * loaded_s)
    prefill_busy = _share(deployment.prefill.busy_s, plan.shape.num_prefill * loaded_s)
    run_until(deployment, inf)
    deployment.check()
    tally = deployment.tally
    assert tally.num_done == len(requests), "nothing is left to happen, yet a request is not done"
    ttfts_s = sorted(tally.ttfts_s)
    duration_s = max(tally.done_s, 1e-9)
    return Run(
        policy=policy,
        num_requests=len(requests),
        duration_s=duration_s,
        throughput_rps=len(requests) / duration_s,
        goodput_rps=bisect_left(ttfts_s, options.ttft_slo_s * (1 + 1e-12)) / duration_s,
        ttft_mean_s=fsum(ttfts_s) / len(ttfts_s),
        ttft_p50_s=quantile(ttfts_s, 0.5),
        ttft_p90_s=quantile(ttfts_s, 0.9),
        ttft_p99_s=quantile(ttfts_s, 0.99),
        offload_fraction=tally.num_remote / len(requests),
        egress_bytes_per_s=egress,
        prfaas_busy_fraction=prfaas_busy,
        prefill_busy_fraction=prefill_busy,
        hit_fraction=tally.hit_tokens / tally.prompt_tokens,
        num_moved=tally.num_moved,
        num_moves_given_up=tally.num_moves_given_up,
        moved_bytes=tally.moved_bytes,
        num_fallbacks=tally.num_fallbacks,
        num_lost=tally.num_lost,
        num_conversions=deployment.num_conversions,
        prediction_error_s=fsum(map(abs, tally.errors_s)) / len(tally.errors_s),
        reasons=dict(sorted(tally.reasons.items())),
        ttft_curve_s=tuple(quantile(ttfts_s, i / CURVE_POINTS) for i in range(CURVE_POINTS)),
        backlog_curve=tuple(_backlog_curve(requests, tally.backlogs)),
    )


def run_until(
    deployment: Deployment,
    until_s: float,
    on_progress: OnProgress | None = None,
    *,
    is_enough: Callable[[], bool] = lambda: False,
) -> None:
    """Run until a moment, or until it is enough; looks after every SLICE_ACTIONS actions."""
    events = deployment.events
    with _no_collections():
        while True:
            before = events.num_run
            events.run(until_s=until_s, max_actions=SLICE_ACTIONS)
            if on_progress is not None:
                on_progress(deployment.tally.num_arrived)
            if events.num_run - before < SLICE_ACTIONS or is_enough():
                return


@contextmanager
def _no_collections() -> Iterator[None]:
    """Let no garbage collection go over all requests again and again: it took a third of a run.

    What a run is done with goes with its last reference; it leaves no cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def quantile(ascending: Sequence[float], fraction: float) -> float:
    """Return the least value that at least this share does not exceed."""
    return ascending[max(0, ceil(fraction * len(ascending) - 1e-9) - 1)]


def _backlog_curve(
    requests: Sequence[TraceRequest], backlogs: Sequence[int]
) -> Iterator[tuple[float, float]]:
    size = ceil(len(backlogs) / CURVE_POINTS)
    for start in range(0, len(backlogs), size):
        part = backlogs[start : start + size]
        yield requests[start].arrival_s, sum(part) / len(part)


def _share(busy_s: float, available_s: float) -> float | None:
    return busy_s / available_s if available_s else None
