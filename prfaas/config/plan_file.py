"""What `prfaas plan` reads: a workload, two kinds of instances, a link, and deployments of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from prfaas.config.profiles import MAX_BYTES_PER_S, MAX_RTT_S, read_profile
from prfaas.config.simulation_table import SimulationOptions, read_simulation
from prfaas.config.tables import Table, read_toml
from prfaas.config.workloads import read_workload
from prfaas.scheduler.planner import Kind, Plan, plan, plan_within
from prfaas.scheduler.profile import Link, Profile
from prfaas.scheduler.throughput import ThroughputModel

MAX_GPUS = 10_000_000
MAX_INSTANCES = 100_000
"""Of one cluster; the search tries each division of the local ones."""
MAX_TOKENS_PER_S = 1e6
MAX_COST = 1e12
METRICS = (
    "threshold_tokens",
    "num_prfaas",
    "num_prefill",
    "num_decode",
    "theta_prfaas_rps",
    "theta_prefill_rps",
    "theta_decode_rps",
    "lambda_max_rps",
    "ttft_mean_s",
    "ttft_p90_s",
    "egress_bytes_per_s",
    "offload_fraction",
)
"""What is said of every deployment."""
GAINS = ("lambda_max_rps", "ttft_p90_s")
"""What two deployments are compared by."""

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Which deployment is set against every other one."""

    deployment: str
    equal_cost: str | None
    """The one that is also planned anew for what `deployment` costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """The model of a plan file, the best plan of each deployment, and what was published."""

    model: ThroughputModel
    plans: Mapping[str, Plan]
    compare: Compare | None
    published: Mapping[str, Figures]
    """Deployment -> metric -> figure."""
    published_gains: Mapping[str, Figures]
    """The other deployment -> metric -> relative gain over it."""
    published_equal_cost: Figures
    simulation: SimulationOptions
    """What only `prfaas simulate` heeds."""


def read_plan_file(path: Path) -> PlanFile:
    """Return what a plan file asks for, each of its deployments at its best.

    Raises:
        ConfigError: an unknown or missing key, a value that makes no sense, or a deployment that
            cannot serve; names the file, the key, the value and the limit.
    """
    top = read_toml(path)
    model = _model(top)
    deployments = top.table("deployments")
    plans = {name: _plan(deployments.table(name), model) for name in deployments.keys}
    if not plans:
        raise top.error("deployments", "has no deployment")
    compare = _compare(top.table("compare"), plans) if "compare" in top else None
    published, gains, equal_cost = _published(top, plans) if "published" in top else ({}, {}, {})
    simulation = (
        read_simulation(top.table("simulation")) if "simulation" in top else SimulationOptions()
    )
    top.finish()
    return PlanFile(
        model=model,
        plans=plans,
        compare=compare,
        published=published,
        published_gains=gains,
        published_equal_cost=equal_cost,
        simulation=simulation,
    )


def _model(top: Table) -> ThroughputModel:
    workload = read_workload(top.file("workload"))
    profiles = top.table("profiles")
    local = read_profile(profiles.file("local"))
    prfaas = read_profile(profiles.file("prfaas")) if "prfaas" in profiles else None
    profiles.finish()
    measured = None if prfaas is None else local.link
    link = _link(top.table("link"), measured) if "link" in top else measured
    speed = top.number("min_decode_tokens_per_s", above=0, maximum=MAX_TOKENS_PER_S)
    try:
        return ThroughputModel(
            workload=workload,
            local=local,
            prfaas=prfaas,
            link=link,
            min_decode_tokens_per_s=speed,
        )
    except ValueError as error:
        raise top.error("profiles", error) from None


def _link(table: Table, measured: Link | None) -> Link:
    """The link of a plan; what it leaves out is as the local profile measured it."""
    link = Link(
        bytes_per_s=table.number(
            "bytes_per_s",
            above=0,
            maximum=MAX_BYTES_PER_S,
            default=None if measured is None else measured.bytes_per_s,
        ),
        rtt_s=table.number(
            "rtt_s",
            minimum=0,
            maximum=MAX_RTT_S,
            default=0.0 if measured is None else measured.rtt_s,
        ),
        max_egress_fraction=table.number("max_egress_fraction", above=0, maximum=1, default=1.0),
    )
    table.finish()
    return link


def _plan(table: Table, model: ThroughputModel) -> Plan:
    kind = cast("Kind", table.choice("kind", get_args(Kind)))
    if kind != "homogeneous" and model.prfaas is None:
        raise table.error("kind", f"{kind} needs profiles.prfaas and [link]")
    if "budget_cost" in table:
        budget_cost = table.number("budget_cost", above=0, maximum=MAX_COST)
        table.finish()
        try:
            return plan_within(model, kind, budget_cost=budget_cost)
        except ValueError as error:
            raise table.error("budget_cost", error) from None
    num_prfaas = 0
    if kind != "homogeneous":
        assert model.prfaas is not None
        num_prfaas = _instances(table, "prfaas_gpus", model.prfaas)
    num_local = _instances(table, "local_gpus", model.local)
    table.finish()
    try:
        return plan(model, kind, num_prfaas=num_prfaas, num_local=num_local)
    except ValueError as error:
        raise table.error("local_gpus", error) from None


def _instances(table: Table, key: str, profile: Profile) -> int:
    """The instances that so many GPUs make."""
    size = profile.gpus_per_instance
    gpus = table.integer(key, minimum=size, maximum=min(MAX_GPUS, MAX_INSTANCES * size))
    if gpus % size:
        raise table.error(key, f"{gpus} is no multiple of the {size} GPUs of an instance")
    return gpus // size


def _compare(table: Table, plans: Mapping[str, Plan]) -> Compare:
    names = tuple(plans)
    compare = Compare(
        deployment=table.choice("deployment", names),
        equal_cost=table.choice("equal_cost", names) if "equal_cost" in table else None,
    )
    if compare.equal_cost is not None and plans[compare.deployment].cost is None:
        raise table.error("equal_cost", "needs a [cost] in every profile")
    table.finish()
    return compare


def _published(
    top: Table, plans: Mapping[str, Plan]
) -> tuple[dict[str, Figures], dict[str, Figures], Figures]:
    table = top.table("published")
    deployments = _named_figures(table, "deployments", METRICS, plans)
    gains = _named_figures(table, "gains", GAINS, plans)
    equal_cost = _figures(table.table("equal_cost"), GAINS) if "equal_cost" in table else {}
    table.finish()
    return deployments, gains, equal_cost


def _named_figures(
    table: Table, key: str, metrics: tuple[str, ...], plans: Mapping[str, Plan]
) -> dict[str, Figures]:
    """Return the figures of each deployment under a key that need not be there."""
    if key not in table:
        return {}
    named = table.table(key)
    for name in named.keys:
        if name not in plans:
            raise named.error(name, f"is no deployment; there are {', '.join(plans)}")
    return {name: _figures(named.table(name), metrics) for name in named.keys}


def _figures(table: Table, metrics: tuple[str, ...]) -> Figures:
    is_gain = metrics == GAINS
    figures = {
        key: table.number(key, above=-1 if is_gain else 0, maximum=1e18)
        for key in table.keys
        if key in metrics
    }
    table.finish()
    return figures
