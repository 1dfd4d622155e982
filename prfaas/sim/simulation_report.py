"""What `prfaas simulate` says, as values of JSON types."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from prfaas.config.plan_file import PlanFile
from prfaas.sim.plan_report import relative_error
from prfaas.sim.simulation import Load, Simulated

CURVES = ("ttft_curve_s", "backlog_curve")
"""What of a run is for charts alone."""
Report = dict[str, Any]
PUBLISHED_AS = {
    "throughput_rps": "lambda_max_rps",
    "ttft_mean_s": "ttft_mean_s",
    "ttft_p90_s": "ttft_p90_s",
    "offload_fraction": "offload_fraction",
    "egress_bytes_per_s": "egress_bytes_per_s",
}
"""Figure of a deployment -> what it is called among the published ones."""


def report(
    file: PlanFile, found: Mapping[str, Simulated], *, seed: int, num_requests: int
) -> Report:
    """Return every deployment's figures; where capacities were searched, beside the published ones.

    `throughput_rps` is then the capacity, TTFT is at low load (service time), offload and egress are
    at the capacity. Else all of them are of the one run.
    """
    deployments = {name: figures(simulated) for name, simulated in found.items()}
    has_capacities = any(simulated.capacities_rps for simulated in found.values())
    facts: Report = {
        "seed": seed,
        "num_requests": num_requests,
        "is_capacity": has_capacities,
        "deployments": deployments,
        "capacities_rps": {name: list(s.capacities_rps) for name, s in found.items()},
        "loads": {name: [_load(load) for load in s.loads] for name, s in found.items()},
        "policies": {
            name: {load.run.policy: _load(load) for load in s.policies}
            for name, s in found.items()
            if s.policies
        },
    }
    if has_capacities:
        facts["error_vs_paper"] = {
            name: {
                ours: relative_error(deployments[name][ours], published[theirs])
                for ours, theirs in PUBLISHED_AS.items()
                if theirs in published
            }
            for name, published in file.published.items()
        }
    if file.compare is not None:
        facts["gains"] = _gains(file, deployments)
    return facts


def figures(simulated: Simulated) -> Report:
    """Return the five figures of a deployment."""
    low, high = simulated.loads[0].run, simulated.loads[-1].run
    capacity_rps = simulated.capacity_rps
    return {
        "throughput_rps": low.throughput_rps if capacity_rps is None else capacity_rps,
        "ttft_mean_s": low.ttft_mean_s,
        "ttft_p90_s": low.ttft_p90_s,
        "offload_fraction": high.offload_fraction,
        "egress_bytes_per_s": high.egress_bytes_per_s,
    }


def _gains(file: PlanFile, deployments: Mapping[str, Report]) -> Report:
    """How the compared deployment's throughput and P90 TTFT are to the others', less 1."""
    assert file.compare is not None
    ours = deployments[file.compare.deployment]
    gains: Report = {}
    for name, other in deployments.items():
        if name == file.compare.deployment:
            continue
        published = file.published_gains.get(name, {})
        gains[name] = {
            figure: {
                "gain": ours[figure] / other[figure] - 1,
                "published": published.get(PUBLISHED_AS[figure]),
            }
            for figure in ("throughput_rps", "ttft_p90_s")
        }
    return gains


def _load(load: Load) -> Report:
    facts = {"rate_rps": load.rate_rps, "fraction_of_capacity": load.fraction, **asdict(load.run)}
    for curve in CURVES:
        del facts[curve]
    return facts
