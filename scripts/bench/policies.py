#!/usr/bin/env python
"""Compares adaptive policies with the best static threshold, found by a grid for each trace.

    scripts/bench/policies.py --json
    scripts/bench/policies.py --trace mooncake_conversation.jsonl --trace azure_2023_conv.csv

Everything is simulated. Goodput is the requests whose first token came within the SLO of the plan
file, per second in which requests came. Generator seeds 0-9 are for tuning, 100-109 for the table.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.config.plan_file import PlanFile, read_plan_file
from prfaas.config.simulation_table import LinkChange, SimulationOptions
from prfaas.config.traces import TraceRequest, read_trace
from prfaas.scheduler.lengths import of_sample
from prfaas.scheduler.planner import Plan, plan
from prfaas.scheduler.policies import PolicyName
from prfaas.scheduler.profile import Workload
from prfaas.scheduler.throughput import ThroughputModel
from prfaas.sim.arrivals import scaled
from prfaas.sim.capacity import unit_requests
from prfaas.sim.run import Run, simulate

CONFIG = Path(__file__).parents[2] / "configs" / "wavering_link.toml"
GRID = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 1e9)
"""Static thresholds, as multiples of the planned one."""
ADAPTIVE: tuple[PolicyName, ...] = ("threshold", "predictive")


@dataclass(frozen=True, slots=True)
class LinkState:
    """How a link is for a while."""

    bandwidth_fraction: float = 1.0
    competing_flows: int = 0
    mean_stay_s: float = 60.0


FULL = LinkState()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A load and a link that changes at random."""

    load: float
    """Of the planned Lambda_max."""
    states: tuple[LinkState, ...] = (FULL,)
    """What the link goes to and fro between, beginning with the first."""
    burst: float = 1.0
    """Every 20th stretch of 10 s has so many times the requests; the mean is as said."""


HALVED = (FULL, LinkState(bandwidth_fraction=0.5))
SCENARIOS = {
    "steady": Scenario(load=0.8),
    "halved": Scenario(load=0.8, states=HALVED),
    "outages": Scenario(
        load=0.8,
        states=(
            LinkState(mean_stay_s=90.0),
            LinkState(bandwidth_fraction=0.0, mean_stay_s=30.0),
        ),
    ),
    "bursts": Scenario(load=0.6, burst=10.0),
    "cross traffic": Scenario(
        load=0.8, states=(FULL, LinkState(competing_flows=8), LinkState(competing_flows=24))
    ),
    "halved, light load": Scenario(load=0.5, states=HALVED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trace on one link."""

    model: ThroughputModel
    plan: Plan
    options: SimulationOptions
    requests: Sequence[TraceRequest]
    seed: int

    def run(self, policy: PolicyName, factor: float = 1.0) -> Run:
        """Simulate a policy, a static one with the planned t times a factor."""
        assert self.plan.threshold_tokens is not None
        at = replace(self.plan, threshold_tokens=factor * self.plan.threshold_tokens)
        return simulate(
            self.model, at, self.requests, policy=policy, options=self.options, seed=self.seed
        )


def drawn(file: PlanFile, scenario: Scenario, *, seed: int, num_requests: int) -> Case:
    """Return a scenario as a seed has it."""
    random, at = Random(f"link {seed}"), file.plans["prfaas"]
    rate = scenario.load * at.rates.lambda_max_rps
    unit = unit_requests(file.model.workload, num_requests=num_requests, seed=seed)
    requests = list(bursty(scaled(unit, rate_factor=rate), scenario.burst))
    changes, now_s, states, index = [], 0.0, scenario.states, 0
    while len(states) > 1 and now_s < requests[-1].arrival_s:
        now_s += random.expovariate(1 / states[index].mean_stay_s)
        index = random.choice([i for i in range(len(states)) if i != index])
        state = states[index]
        changes.append(
            LinkChange(
                at_s=now_s,
                bandwidth_fraction=state.bandwidth_fraction,
                competing_flows=state.competing_flows,
            )
        )
    changes.append(LinkChange(at_s=now_s + 1.0))
    options = replace(file.simulation, link=tuple(changes))
    return Case(model=file.model, plan=at, options=options, requests=requests, seed=seed)


def bursty(requests: Iterator[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """Yield the requests on a clock that runs `factor` times as fast in one stretch of 20."""
    stretch_s, period_s = 10.0, 200.0
    quiet = (period_s - factor * stretch_s) / (period_s - stretch_s)
    for request in requests:
        periods, rest = divmod(request.arrival_s, period_s)
        in_burst = min(rest, factor * stretch_s)
        time_s = periods * period_s + in_burst / factor
        time_s += (rest - in_burst) / quiet if rest > in_burst else 0.0
        yield replace(request, arrival_s=time_s)


def traced(file: PlanFile, path: Path, *, load: float, num_requests: int) -> Case:
    """Return a real trace, as fast as `load` of what the deployment would carry of it."""
    requests = read_trace(path, "azure" if path.suffix == ".csv" else "mooncake")[:num_requests]
    return on_trace(file, requests, load=load)


def on_trace(file: PlanFile, requests: Sequence[TraceRequest], *, load: float) -> Case:
    """Return these requests on the plan's instances, with roles and t as a plan for them has it."""
    base = file.model
    model = ThroughputModel(
        workload=Workload(
            lengths=of_sample(r.input_tokens for r in requests),
            mean_output_tokens=fsum(max(1, r.output_tokens) for r in requests) / len(requests),
        ),
        local=base.local,
        prfaas=base.prfaas,
        link=base.link,
        min_decode_tokens_per_s=1 / base.step_s,
    )
    shape = file.plans["prfaas"].shape
    num_local = shape.num_prefill + shape.num_decode
    at = plan(model, "prfaas", num_prfaas=shape.num_prfaas, num_local=num_local)
    rate = len(requests) / requests[-1].arrival_s
    given = list(scaled(requests, rate_factor=load * at.rates.lambda_max_rps / rate))
    options = replace(file.simulation, link=())
    return Case(model=model, plan=at, options=options, requests=given, seed=0)


def in_time(case: Case, run: Run) -> float:
    """Return the requests in time per second in which requests came: alike for all policies."""
    return run.goodput_rps * run.duration_s / case.requests[-1].arrival_s


def compared(cases: Sequence[Case], progress: Callable[[], object]) -> dict[str, object]:
    """Return the means over the cases of the best static t of each, and of adaptive policies."""
    rows: dict[str, list[Run]] = {name: [] for name in ("static", "planned", *ADAPTIVE)}
    best = []
    for case in cases:
        static = {factor: case.run("static", factor) for factor in GRID}
        factor = max(GRID, key=lambda f: (in_time(case, static[f]), -static[f].ttft_p90_s))
        best.append(factor)
        rows["static"].append(static[factor])
        rows["planned"].append(static[1.0])
        for policy in ADAPTIVE:
            rows[policy].append(case.run(policy))
        progress()
    found: dict[str, object] = {"best_factors": best}
    offered = [len(case.requests) / case.requests[-1].arrival_s for case in cases]
    found["offered_rps"] = fsum(offered) / len(offered)
    base = [in_time(case, run) for case, run in zip(cases, rows["static"], strict=True)]
    for name, runs in rows.items():
        goodputs = [in_time(case, run) for case, run in zip(cases, runs, strict=True)]
        found[name] = {
            "goodput_rps": fsum(goodputs) / len(runs),
            "goodput_vs_best_static": fsum(goodputs) / fsum(base) - 1,
            "worst_seed_vs_best_static": min(
                good / best_good - 1 for good, best_good in zip(goodputs, base, strict=True)
            ),
            "ttft_mean_s": fsum(run.ttft_mean_s for run in runs) / len(runs),
            "ttft_p50_s": fsum(run.ttft_p50_s for run in runs) / len(runs),
            "ttft_p90_s": fsum(run.ttft_p90_s for run in runs) / len(runs),
        }
    return found


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--load", type=float, default=0.7, help="of traces")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    file = read_plan_file(given.config)
    seeds = range(given.first_seed, given.first_seed + given.seeds)

    def tell() -> None:
        print(".", end="", file=sys.stderr, flush=True)

    table = {}
    for name, scenario in SCENARIOS.items():
        cases = [drawn(file, scenario, seed=s, num_requests=given.requests) for s in seeds]
        table[name] = compared(cases, tell)
    for path in given.trace:
        case = traced(file, path, load=given.load, num_requests=given.requests)
        table[path.stem] = compared([case], tell)
    print(file=sys.stderr)
    if given.json:
        print(json.dumps({"slo_s": file.simulation.ttft_slo_s, "scenarios": table}, indent=2))
        return
    print(f"{'goodput (req/s), P90 TTFT (s)':<30}{'best static':>16}{'planned t':>25}", end="")
    print("".join(f"{name:>25}" for name in ADAPTIVE))
    for name, found in table.items():
        cells = []
        for policy in ("static", "planned", *ADAPTIVE):
            row = found[policy]
            assert isinstance(row, dict)
            gain = "" if policy == "static" else f" {row['goodput_vs_best_static']:+7.1%}"
            cells.append(f"{row['goodput_rps']:.3f}{gain} {row['ttft_p90_s']:8.2f}")
        print(f"{name:<30}{cells[0]:>16}" + "".join(f"{cell:>25}" for cell in cells[1:]))


if __name__ == "__main__":
    main()
