"""The highest rate that a deployment keeps up with, found by running it: no throughput model is asked.

It keeps up with a rate if its backlog does not grow: the mean number of requests in the system during
the last quarter of the arrivals is above that of the second quarter by no more than GROWTH of the
requests that came between. One seed's requests are the same at every rate, only their times are
stretched, to exactly the rate on average.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from math import sqrt
from random import Random

from prfaas.config.simulation_table import SimulationOptions
from prfaas.config.traces import TraceRequest
from prfaas.scheduler.planner import Plan
from prfaas.scheduler.policies import PolicyName
from prfaas.scheduler.profile import Workload
from prfaas.scheduler.throughput import ThroughputModel
from prfaas.sim.arrivals import poisson_arrivals, scaled
from prfaas.sim.deployment import Deployment
from prfaas.sim.run import OnProgress, run_until

GROWTH = 0.01
WIDTH = 0.004
"""The bisection ends at this relative width."""
NEAR = 1.03
"""Rates within this factor of what seems to be carried are asked."""
HOPELESS = 0.1
"""A backlog of this share of all requests has grown."""
FIRST_RATE_RPS = 1.0
MAX_RATE_RPS = 1e9


def unit_requests(workload: Workload, *, num_requests: int, seed: int) -> list[TraceRequest]:
    """Return Poisson arrivals that come at exactly 1 request a second on average."""
    drawn = poisson_arrivals(workload, rate_rps=1.0, random=Random(seed))
    requests = list(islice(drawn, num_requests))
    return list(scaled(requests, rate_factor=requests[-1].arrival_s / num_requests))


def least_requests(model: ThroughputModel, plan: Plan) -> int:
    """Return how many requests fill every place of a deployment in the first quarter."""
    shape = plan.shape
    return 4 * (shape.num_prfaas + shape.num_prefill + shape.num_decode * model.batch)


def growth(backlogs: Sequence[int]) -> float:
    """Return by how much the backlog grows for each request that comes."""
    quarter = len(backlogs) // 4
    early, late = backlogs[quarter : 2 * quarter], backlogs[-quarter:]
    return (sum(late) - sum(early)) / quarter / (2 * quarter)


def growth_at(
    model: ThroughputModel,
    plan: Plan,
    requests: Sequence[TraceRequest],
    *,
    rate_rps: float,
    policy: PolicyName,
    options: SimulationOptions,
    seed: int,
    on_progress: OnProgress | None = None,
) -> float:
    """Return by how much the backlog grows for each request that comes at a rate.

    `requests` come at 1 request a second. A run with a hopeless backlog ends early.
    """
    deployment = Deployment(model, plan, policy=policy, options=options, seed=seed)
    deployment.start(scaled(requests, rate_factor=rate_rps))
    tally = deployment.tally
    limit = max(HOPELESS * len(requests), least_requests(model, plan))
    run_until(
        deployment,
        requests[-1].arrival_s / rate_rps,
        on_progress,
        is_enough=lambda: tally.num_in_flight > limit,
    )
    if tally.num_arrived < len(requests):
        return tally.num_in_flight / tally.num_arrived
    deployment.check()
    return growth(tally.backlogs)


def bisected(grows_at: Callable[[float], float], *, low: float, high: float) -> float:
    """Return the middle of the last interval between a rate that is kept up with and one that is not.

    The interval given is a guess: it is widened where it does not hold the answer. A rate that is too
    much also tells what is carried: all but what the backlog grows by. Of rates far from that the answer is
    assumed; both ends of the last interval are asked in any case, and all rates if one is not as assumed.

    Raises:
        ValueError: no rate up to MAX_RATE_RPS is too much.
    """
    grown: dict[float, float] = {}
    carried_rps: float | None = None

    def is_kept(rate: float, *, surely: bool) -> bool:
        nonlocal carried_rps
        if rate not in grown:
            near = carried_rps is None or carried_rps / NEAR < rate < carried_rps * NEAR
            if carried_rps is not None and not (near or surely):
                return rate < carried_rps
            grown[rate] = grows_at(rate)
            if GROWTH < grown[rate] < 1:
                carried_rps = rate * (1 - grown[rate]) / (1 - GROWTH)
        return grown[rate] <= GROWTH

    below, above = _interval(partial(is_kept, surely=False), low, high)
    if not is_kept(below, surely=True) or is_kept(above, surely=True):
        below, above = _interval(partial(is_kept, surely=True), low, high)
    return sqrt(below * above)


def _interval(is_kept: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    width = high / low
    while is_kept(high):
        low, high = high, high * width
        if high > MAX_RATE_RPS:
            raise ValueError(f"{low:g} req/s are not too much")
    while not is_kept(low):
        low, high = low / width, low
    while high / low > 1 + WIDTH:
        middle = sqrt(low * high)
        low, high = (middle, high) if is_kept(middle) else (low, middle)
    return low, high


def capacities(
    model: ThroughputModel,
    plan: Plan,
    *,
    policy: PolicyName,
    options: SimulationOptions,
    num_requests: int,
    seeds: Sequence[int],
    on_progress: OnProgress | None = None,
) -> list[float]:
    """Return the capacity found with each seed, in requests per second.

    The first search starts at FIRST_RATE_RPS, the others near what the first has found.

    Raises:
        ValueError: too few requests to fill the deployment.
    """
    if num_requests < least_requests(model, plan):
        raise ValueError(
            f"{num_requests:,} requests do not fill this deployment; a capacity needs"
            f" {least_requests(model, plan):,}"
        )
    found: list[float] = []
    for seed in seeds:
        grows_at = partial(
            _growth_at,
            model,
            plan,
            unit_requests(model.workload, num_requests=num_requests, seed=seed),
            policy,
            options,
            seed,
            on_progress,
        )
        if found:
            low, high = found[0] / 1.015, found[0] * 1.015
        else:
            low, high = FIRST_RATE_RPS, 2 * FIRST_RATE_RPS
        found.append(bisected(grows_at, low=low, high=high))
    return found


def _growth_at(
    model: ThroughputModel,
    plan: Plan,
    requests: Sequence[TraceRequest],
    policy: PolicyName,
    options: SimulationOptions,
    seed: int,
    on_progress: OnProgress | None,
    rate_rps: float,
) -> float:
    return growth_at(
        model,
        plan,
        requests,
        rate_rps=rate_rps,
        policy=policy,
        options=options,
        seed=seed,
        on_progress=on_progress,
    )
