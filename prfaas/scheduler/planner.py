"""Finds the threshold, N_p : N_d and the instances of each role with the highest Lambda_max.

PrfaaS §3.4.2: a grid search over t and N_p : N_d. Of all thresholds, only the one at which PrfaaS
and local prefill are in balance (eq. 7) can be the best, as the first of their limits only rises with
t and the second only falls; it is found by bisection over the lengths that occur, and is the best of
that whole grid.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, assert_never

from prfaas.scheduler.profile import ROUNDING
from prfaas.scheduler.throughput import Rates, Shape, Stage, ThroughputModel

Kind = Literal["prfaas", "homogeneous", "naive"]
"""prfaas: long prompts go to the PrfaaS cluster. homogeneous: there is none. naive: all go there."""

TTFT_QUANTILE = 0.9
MAX_SHAPES = 200_000
"""A search over more shapes is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A deployment and what the model says of it."""

    kind: Kind
    shape: Shape
    cut: int
    threshold_tokens: float | None
    """None where no prompt is routed by its length."""
    rates: Rates
    ttft_mean_s: float
    ttft_p90_s: float
    """Of prefill alone, without any queue."""
    cost: float | None
    """In the unit of the profiles' cost per GPU; None where one has none."""


def plan(model: ThroughputModel, kind: Kind, *, num_prfaas: int = 0, num_local: int) -> Plan:
    """Return the best threshold and N_p : N_d for so many instances.

    Raises:
        ValueError: too few instances for the kind.
    """
    shapes = list(_splits(kind, num_prfaas, num_local))
    if not shapes:
        raise ValueError(
            f"{num_prfaas} PrfaaS and {num_local} local instances make no {kind} deployment; it"
            f" needs {_needs(kind)}"
        )
    return _finished(model, kind, *_best(model, kind, shapes))


def plan_within(model: ThroughputModel, kind: Kind, *, budget_cost: float) -> Plan:
    """Return the best deployment that costs no more, over the instances of every role.

    Raises:
        ValueError: a profile without a cost, or a budget for nothing or for too much to search.
    """
    local_cost = model.local.instance_cost
    prfaas_cost = None if model.prfaas is None else model.prfaas.instance_cost
    if local_cost is None or (kind != "homogeneous" and prfaas_cost is None):
        raise ValueError("a budget needs a [cost] in every profile")
    budget = budget_cost * (1 + ROUNDING)
    most_prfaas = 0 if kind == "homogeneous" or prfaas_cost is None else int(budget / prfaas_cost)
    _check_size(budget_cost, most_prfaas)
    counts = [0] if kind == "homogeneous" else range(1, most_prfaas + 1)
    sizes = [(n, int((budget - n * (prfaas_cost or 0.0)) / local_cost)) for n in counts]
    _check_size(budget_cost, len(sizes) if kind == "naive" else sum(local for _, local in sizes))
    shapes = [shape for n, local in sizes for shape in _splits(kind, n, local)]
    if not shapes:
        raise ValueError(f"a budget of {budget_cost:g} buys no {kind} deployment: {_needs(kind)}")
    return _finished(model, kind, *_best(model, kind, shapes))


def _check_size(budget_cost: float, num_shapes: int) -> None:
    if num_shapes > MAX_SHAPES:
        raise ValueError(
            f"a budget of {budget_cost:g} allows {num_shapes:,} shapes or more; at most"
            f" {MAX_SHAPES:,} are searched"
        )


def best_cut(model: ThroughputModel, shape: Shape) -> int:
    """Return the cut with the highest rate that PrfaaS and local prefill carry together.

    It is also the best for Lambda_max; where decode limits it, of the equal ones the one that
    leaves prefill the most room.
    """

    def long_limit(cut: int) -> float:
        limits = model.limits(shape, cut)
        return min(limits.get("prfaas", float("inf")), limits.get("link", float("inf")))

    def short_limit(cut: int) -> float:
        return model.limits(shape, cut).get("prefill", float("inf"))

    low, high = 0, model.num_cuts - 1  # the first cut where long prompts are no longer the limit
    while low < high:
        middle = (low + high) // 2
        if long_limit(middle) >= short_limit(middle):
            high = middle
        else:
            low = middle + 1
    candidates = (cut for cut in (low - 1, low) if cut >= 0)
    return max(candidates, key=lambda cut: min(long_limit(cut), short_limit(cut)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One point of a curve of PrfaaS figure 5."""

    threshold_tokens: float
    shape: Shape
    limits: dict[Stage, float]
    """Stage -> the rate of all requests at which it is full."""
    producer_rps: float
    """Theta_prfaas + Theta_pd_p."""
    rates: Rates


def sweep_threshold(model: ThroughputModel, shape: Shape, points: int = 200) -> list[SweepPoint]:
    """Return Lambda_max and its terms over t at one N_p : N_d, at evenly filled lengths."""
    last = model.num_cuts - 1
    cuts = sorted({round(last * i / points) for i in range(1, points)} | {best_cut(model, shape)})
    return [_point(model, shape, cut) for cut in cuts]


def sweep_split(model: ThroughputModel, at: Plan) -> list[SweepPoint]:
    """Return Lambda_max and its terms over N_p : N_d at the plan's threshold."""
    num_local = at.shape.num_prefill + at.shape.num_decode
    return [
        _point(model, shape, at.cut) for shape in _splits(at.kind, at.shape.num_prfaas, num_local)
    ]


def _needs(kind: Kind) -> str:
    match kind:
        case "prfaas":
            return "at least 1 PrfaaS and 2 local instances"
        case "homogeneous":
            return "no PrfaaS and at least 2 local instances"
        case "naive":
            return "at least 1 PrfaaS and 1 local instance"
        case _:
            assert_never(kind)


def _splits(kind: Kind, num_prfaas: int, num_local: int) -> Iterator[Shape]:
    """The shapes of so many instances, by N_p."""
    if (kind == "homogeneous") != (num_prfaas == 0):
        return
    if kind == "naive":
        if num_local >= 1:
            yield Shape(num_prfaas=num_prfaas, num_decode=num_local)
        return
    for num_prefill in range(1, num_local):
        yield Shape(
            num_prfaas=num_prfaas, num_prefill=num_prefill, num_decode=num_local - num_prefill
        )


def _best(model: ThroughputModel, kind: Kind, shapes: list[Shape]) -> tuple[Shape, int]:
    """Return the shape and cut with the highest Lambda_max; of equal ones the first."""
    best: tuple[float, Shape, int] | None = None
    for shape in shapes:
        cut = _cut(model, kind, shape)
        rate = min(model.limits(shape, cut).values())
        if best is None or rate > best[0]:
            best = (rate, shape, cut)
    assert best is not None, "no shapes"
    return best[1:]


def _cut(model: ThroughputModel, kind: Kind, shape: Shape) -> int:
    match kind:
        case "prfaas":
            return best_cut(model, shape)
        case "homogeneous":
            return model.num_cuts - 1
        case "naive":
            return 0
        case _:
            assert_never(kind)


def _finished(model: ThroughputModel, kind: Kind, shape: Shape, cut: int) -> Plan:
    times = model.service_times(cut)
    return Plan(
        kind=kind,
        shape=shape,
        cut=cut,
        threshold_tokens=model.threshold_at(cut) if kind == "prfaas" else None,
        rates=model.rates(shape, cut),
        ttft_mean_s=sum(time_s * share for time_s, share in times),
        ttft_p90_s=_quantile(times, TTFT_QUANTILE),
        cost=_cost(model, shape),
    )


def _cost(model: ThroughputModel, shape: Shape) -> float | None:
    local_cost = model.local.instance_cost
    prfaas_cost = (
        0.0 if model.prfaas is None or not shape.num_prfaas else model.prfaas.instance_cost
    )
    if local_cost is None or prfaas_cost is None:
        return None
    return prfaas_cost * shape.num_prfaas + local_cost * (shape.num_prefill + shape.num_decode)


def _quantile(times: list[tuple[float, float]], fraction: float) -> float:
    total = 0.0
    for time_s, share in times:
        total += share
        if total >= fraction - 1e-12:
            return time_s
    return times[-1][0]


def _point(model: ThroughputModel, shape: Shape, cut: int) -> SweepPoint:
    rates = model.rates(shape, cut)
    return SweepPoint(
        threshold_tokens=model.threshold_at(cut),
        shape=shape,
        limits=model.limits(shape, cut),
        producer_rps=(rates.theta_prfaas_rps or 0.0) + (rates.theta_prefill_rps or 0.0),
        rates=rates,
    )
