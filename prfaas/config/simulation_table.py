"""[simulation] of a plan file: what a simulation adds to the plan, all of it optional."""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from prfaas.config.tables import Table
from prfaas.scheduler.rebalancer import RebalanceOptions

MAX_SECONDS = 1e9
MAX_FLOWS = 1_000_000
MAX_CACHE_TOKENS = 10**14
MAX_INSTANCES = 100_000
MAX_CLUSTERS = 1_000

Role = Literal["prfaas", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """From a moment on, so much of the link's bandwidth, shared with so many flows of others."""

    at_s: float
    bandwidth_fraction: float = 1.0
    """0 is an outage."""
    competing_flows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Instances of a role that are gone for a while, with all they had."""

    role: Role
    at_s: float
    for_s: float
    instances: int
    cluster: int = 0
    """Of PrfaaS instances: which, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalancing:
    """Local instances change their roles as the prompts do."""

    options: RebalanceOptions
    conversion_s: float
    """From the last request in the old role to the first in the new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """How a deployment behaves beyond its plan."""

    ttft_slo_s: float = 10.0
    """A first token within it counts as goodput."""
    max_egress_fraction: float = 0.7
    """Of the link: the budget of adaptive policies."""
    clusters: int = 1
    """PrfaaS clusters that the instances and the link are divided between."""
    pieces: int = 4
    """Parts in which a prefill's KVCache is sent as it is computed; 1 sends all of it at the end."""
    streams: int = 4
    """Connections of one transfer; each gets as much as a flow of others."""
    jitter_s: float = 0.0
    """Mean of the exponential delay that comes on top of half a round trip."""
    stall_timeout_s: float = 5.0
    """A transfer that stood still for so long is given up and prefilled locally."""
    view_period_s: float = 1.0
    """A PrfaaS cluster reports its queue this often."""
    view_delay_s: float = 0.05
    """So much later the report is there."""
    local_cache_tokens: int = 0
    prfaas_cache_tokens: int = 0
    """Of each cluster's prefix cache; needs a trace with block ids."""
    moves_cache: bool = False
    """Whether a prefix that another cluster has may be sent ahead of a prefill."""
    decode: Literal["fluid", "stepped"] = "fluid"
    link: tuple[LinkChange, ...] = ()
    failures: tuple[Failure, ...] = ()
    rebalance: Rebalancing | None = None
    """None leaves every instance in its role."""


def read_simulation(table: Table) -> SimulationOptions:
    """Return the options. Raises ConfigError for an unknown key or a value out of bounds."""
    own = SimulationOptions()
    clusters = table.integer("clusters", minimum=1, maximum=MAX_CLUSTERS, default=own.clusters)
    options = SimulationOptions(
        ttft_slo_s=_seconds(table, "ttft_slo_s", own.ttft_slo_s),
        max_egress_fraction=table.number(
            "max_egress_fraction", above=0, maximum=1, default=own.max_egress_fraction
        ),
        clusters=clusters,
        pieces=table.integer("pieces", minimum=1, maximum=1024, default=own.pieces),
        streams=table.integer("streams", minimum=1, maximum=1024, default=own.streams),
        jitter_s=table.number("jitter_s", minimum=0, maximum=60, default=own.jitter_s),
        stall_timeout_s=_seconds(table, "stall_timeout_s", own.stall_timeout_s),
        view_period_s=_seconds(table, "view_period_s", own.view_period_s),
        view_delay_s=table.number("view_delay_s", minimum=0, maximum=60, default=own.view_delay_s),
        local_cache_tokens=_cache(table, "local_cache_tokens"),
        prfaas_cache_tokens=_cache(table, "prfaas_cache_tokens"),
        moves_cache=table.boolean("moves_cache", default=own.moves_cache),
        decode=cast(
            'Literal["fluid", "stepped"]', table.choice("decode", ("fluid", "stepped"), own.decode)
        ),
        link=tuple(_change(part) for part in table.tables("link")) if "link" in table else (),
        failures=(
            tuple(_failure(part, clusters) for part in table.tables("failures"))
            if "failures" in table
            else ()
        ),
        rebalance=_rebalancing(table.table("rebalance")) if "rebalance" in table else None,
    )
    if options.moves_cache and not (options.local_cache_tokens or options.prfaas_cache_tokens):
        what = "there is no cache to move; set local_cache_tokens, prfaas_cache_tokens or both"
        raise table.error("moves_cache", what)
    table.finish()
    return options


def _seconds(table: Table, key: str, default: float) -> float:
    return table.number(key, above=0, maximum=MAX_SECONDS, default=default)


def _cache(table: Table, key: str) -> int:
    return table.integer(key, minimum=0, maximum=MAX_CACHE_TOKENS, default=0)


def _rebalancing(table: Table) -> Rebalancing:
    own = RebalanceOptions()
    found = Rebalancing(
        options=RebalanceOptions(
            period_s=_seconds(table, "period_s", own.period_s),
            dwell_s=table.number("dwell_s", minimum=0, maximum=MAX_SECONDS, default=own.dwell_s),
            min_gain_fraction=table.number(
                "min_gain_fraction", minimum=0, maximum=100, default=own.min_gain_fraction
            ),
            confirmations=table.integer(
                "confirmations", minimum=1, maximum=1000, default=own.confirmations
            ),
            num_prompts=table.integer(
                "num_prompts", minimum=4, maximum=100_000, default=own.num_prompts
            ),
        ),
        conversion_s=table.number("conversion_s", minimum=0, maximum=MAX_SECONDS, default=30.0),
    )
    table.finish()
    return found


def _change(table: Table) -> LinkChange:
    change = LinkChange(
        at_s=table.number("at_s", minimum=0, maximum=MAX_SECONDS),
        bandwidth_fraction=table.number("bandwidth_fraction", minimum=0, maximum=1, default=1.0),
        competing_flows=table.integer("competing_flows", minimum=0, maximum=MAX_FLOWS, default=0),
    )
    table.finish()
    return change


def _failure(table: Table, clusters: int) -> Failure:
    role = cast("Role", table.choice("role", get_args(Role)))
    if role != "prfaas" and "cluster" in table:
        raise table.error("cluster", f"only of PrfaaS instances there are several, not of {role}")
    failure = Failure(
        role=role,
        at_s=table.number("at_s", minimum=0, maximum=MAX_SECONDS),
        for_s=table.number("for_s", above=0, maximum=MAX_SECONDS),
        instances=table.integer("instances", minimum=1, maximum=MAX_INSTANCES),
        cluster=table.integer("cluster", minimum=0, maximum=clusters - 1, default=0),
    )
    table.finish()
    return failure
