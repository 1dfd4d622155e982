"""What `prfaas plan` says of a plan file, as values of JSON types."""

from collections.abc import Mapping
from typing import Any, Literal

from prfaas.config.plan_file import GAINS, METRICS, PlanFile
from prfaas.scheduler.planner import Plan, plan_within
from prfaas.scheduler.throughput import ThroughputModel, prefill_balance, stage_balance

Report = dict[str, Any]
Mark = Literal["independent", "fitted", "mixed"]
"""Whether a figure rests on published or measured inputs, on fitted ones, or on both."""


def report(file: PlanFile) -> Report:
    """Return every deployment's figures, how they compare, and how far off the published ones."""
    deployments = {name: metrics(plan) for name, plan in file.plans.items()}
    found: Report = {
        "deployments": deployments,
        "error_vs_paper": {
            name: _errors(deployments[name], published)
            for name, published in file.published.items()
        },
        "published": {name: dict(figures) for name, figures in file.published.items()},
        "provenance": {name: provenance(file.model, plan) for name, plan in file.plans.items()},
        "detail": {name: _detail(file.model, plan) for name, plan in file.plans.items()},
    }
    if file.compare is not None:
        found |= _compared(file, deployments)
    return found


def metrics(plan: Plan) -> dict[str, float | int | None]:
    """Return the figures of METRICS; None where a deployment has no such stage or threshold."""
    rates = plan.rates
    threshold = plan.threshold_tokens
    values = {
        "threshold_tokens": None if threshold is None else round(threshold),
        "num_prfaas": plan.shape.num_prfaas,
        "num_prefill": plan.shape.num_prefill,
        "num_decode": plan.shape.num_decode,
        "theta_prfaas_rps": rates.theta_prfaas_rps,
        "theta_prefill_rps": rates.theta_prefill_rps,
        "theta_decode_rps": rates.theta_decode_rps,
        "lambda_max_rps": rates.lambda_max_rps,
        "ttft_mean_s": plan.ttft_mean_s,
        "ttft_p90_s": plan.ttft_p90_s,
        "egress_bytes_per_s": rates.egress_bytes_per_s,
        "offload_fraction": rates.offload_fraction,
    }
    assert tuple(values) == METRICS
    return values


def provenance(model: ThroughputModel, plan: Plan) -> dict[str, Mark]:
    """Return where each figure of METRICS that follows from a profile is from.

    A stage's rate rests on its own profile; t and N_p : N_d, and what follows from them, on every
    profile of the deployment.
    """
    local, decode = model.local.prefill_provenance, model.local.decode
    assert decode is not None, "the model needs one"
    prefills = {local} if plan.kind == "homogeneous" else set()
    if plan.kind != "homogeneous":
        assert model.prfaas is not None
        prefills.add(model.prfaas.prefill_provenance)
    found: dict[str, Mark] = {"theta_decode_rps": _mark({decode.provenance})}
    if plan.kind == "naive":
        limit = {decode.provenance} if plan.rates.bottleneck == "decode" else prefills
        found |= dict.fromkeys(("theta_prfaas_rps", "ttft_mean_s", "ttft_p90_s"), _mark(prefills))
        found |= dict.fromkeys(("lambda_max_rps", "egress_bytes_per_s"), _mark(limit))
        return found
    everything = prefills | {local, decode.provenance}
    found["theta_prefill_rps"] = _mark({local})
    names = ["num_prefill", "num_decode", "lambda_max_rps"]
    if plan.kind == "prfaas":
        names += ["threshold_tokens", "theta_prfaas_rps", "egress_bytes_per_s", "offload_fraction"]
    found |= dict.fromkeys(names, _mark(everything))
    found |= dict.fromkeys(("ttft_mean_s", "ttft_p90_s"), _mark(prefills | {local}))
    return found


def relative_error(value: float | None, published: float) -> float | None:
    """Return how far off a figure is, as a share of the published one."""
    return None if value is None else value / published - 1


def _errors(
    values: Mapping[str, float | None], published: Mapping[str, float]
) -> dict[str, float | None]:
    return {name: relative_error(values[name], figure) for name, figure in published.items()}


def _mark(inputs: set[Any]) -> Mark:
    if "fitted" not in inputs:
        return "independent"
    return "fitted" if inputs == {"fitted"} else "mixed"


def _detail(model: ThroughputModel, plan: Plan) -> Report:
    """What follows from the figures: the limit, how near to eq. 7 and 8, the link, the cost."""
    rates = plan.rates
    link = model.link
    detail: Report = {
        "kind": plan.kind,
        "bottleneck": rates.bottleneck,
        "egress_fraction_of_link": (
            None if link is None else rates.egress_bytes_per_s / link.bytes_per_s
        ),
        "cost": plan.cost,
        "prefill_balance": None,
        "stage_balance": None,
    }
    theta_prfaas, theta_prefill = rates.theta_prfaas_rps, rates.theta_prefill_rps
    if theta_prfaas is not None and theta_prefill is not None:
        detail["prefill_balance"] = prefill_balance(
            theta_prfaas, theta_prefill, rates.offload_fraction
        )
        detail["stage_balance"] = stage_balance(theta_prfaas, theta_prefill, rates.theta_decode_rps)
    return detail


def _compared(file: PlanFile, deployments: Mapping[str, Mapping[str, float | None]]) -> Report:
    compare = file.compare
    assert compare is not None
    ours = deployments[compare.deployment]
    gains = {
        name: _gains(ours, other)
        for name, other in deployments.items()
        if name != compare.deployment
    }
    found: Report = {
        "gains": gains,
        "gains_vs_paper": {
            name: _gain_errors(gains[name], published)
            for name, published in file.published_gains.items()
            if name in gains
        },
        "equal_cost": None,
    }
    if compare.equal_cost is not None:
        cost = file.plans[compare.deployment].cost
        assert cost is not None, "checked when the file was read"
        grown = plan_within(file.model, file.plans[compare.equal_cost].kind, budget_cost=cost)
        gain = _gains(ours, metrics(grown))
        found["equal_cost"] = {
            "deployment": metrics(grown),
            "cost": grown.cost,
            "provenance": _equal_cost_mark(file.model),
            "gains": gain,
            "gains_vs_paper": _gain_errors(gain, file.published_equal_cost),
        }
    return found


def _equal_cost_mark(model: ThroughputModel) -> Mark:
    """Where the comparison is from: fitted if the prices are, as they decide its size."""
    profiles = [model.local] + ([] if model.prfaas is None else [model.prfaas])
    costs = {None if profile.cost is None else profile.cost.provenance for profile in profiles}
    return "fitted" if "fitted" in costs else "independent"


def _gains(ours: Mapping[str, float | None], other: Mapping[str, float | None]) -> Report:
    gains = {}
    for name in GAINS:
        value, base = ours[name], other[name]
        assert value is not None
        assert base is not None
        gains[name] = value / base - 1
    return gains


def _gain_errors(gains: Mapping[str, float], published: Mapping[str, float]) -> Report:
    """How far off each ratio is: +55% for +54% is 1.55 for 1.54."""
    return {
        name: {"published": figure, "error": (1 + gains[name]) / (1 + figure) - 1}
        for name, figure in published.items()
    }
