#!/usr/bin/env python
"""Compares `predictive` with and without moving cached prefixes between clusters, on links from wide to thin.

    scripts/bench/cache_movement.py --trace mooncake_conversation.jsonl --json

Everything is simulated: the parts of a trace with block ids, one after the other, on the deployment of a
plan file. The mean over the parts is shown.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import fsum
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.config.plan_file import PlanFile, read_plan_file
from prfaas.config.traces import TraceRequest, read_trace
from prfaas.scheduler.profile import Link
from prfaas.scheduler.throughput import ThroughputModel
from prfaas.sim.run import Run
from scripts.bench.policies import CONFIG, Case, in_time, on_trace

GBPS = (100.0, 14.0, 7.0, 3.0)


@dataclass(frozen=True, slots=True)
class Caches:
    """What the clusters hold, in tokens; of PrfaaS clusters each."""

    name: str
    local_tokens: int
    prfaas_tokens: int
    clusters: int = 1


PLACES = (
    Caches("large here, none there", 10**8, 0),
    Caches("large here, small there", 10**8, 2 * 10**6),
    Caches("large here, in each of 4 there", 10**8, 10**8, clusters=4),
    Caches("small here, large there", 2 * 10**6, 10**8),
)


def parts(requests: list[TraceRequest], num_parts: int) -> Iterator[list[TraceRequest]]:
    """Yield equally many requests each, each part beginning at 0 s."""
    size = len(requests) // num_parts
    for start in range(0, size * num_parts, size):
        part = requests[start : start + size]
        began_s = part[0].arrival_s
        yield [replace(each, arrival_s=each.arrival_s - began_s) for each in part]


def over(file: PlanFile, gbps: float) -> PlanFile:
    """Return the plan file with another link between the clusters."""
    base = file.model
    assert base.link is not None, "the plan has a link"
    model = ThroughputModel(
        workload=base.workload,
        local=base.local,
        prfaas=base.prfaas,
        link=Link(bytes_per_s=gbps * 1e9 / 8, rtt_s=base.link.rtt_s),
        min_decode_tokens_per_s=1 / base.step_s,
    )
    return replace(file, model=model)


def ran(case: Case, caches: Caches, *, moves_cache: bool) -> Run:
    """Simulate `predictive` with these caches."""
    options = replace(
        case.options,
        local_cache_tokens=caches.local_tokens,
        prfaas_cache_tokens=caches.prfaas_tokens,
        clusters=caches.clusters,
        moves_cache=moves_cache,
    )
    return replace(case, options=options).run("predictive")


def row(cases: list[Case], caches: Caches) -> dict[str, dict[str, float]]:
    """Return the means over the parts, alone and with moves."""
    found = {}
    for name, moves_cache in (("alone", False), ("moving", True)):
        runs = [ran(case, caches, moves_cache=moves_cache) for case in cases]
        figures: dict[str, list[float]] = {
            "goodput_rps": [in_time(case, run) for case, run in zip(cases, runs, strict=True)],
            "ttft_mean_s": [run.ttft_mean_s for run in runs],
            "ttft_p90_s": [run.ttft_p90_s for run in runs],
            "hit_fraction": [run.hit_fraction for run in runs],
            "num_moved": [run.num_moved for run in runs],
            "moved_bytes": [run.moved_bytes for run in runs],
        }
        found[name] = {figure: fsum(values) / len(values) for figure, values in figures.items()}
    return found


def main() -> None:
    """Print a row for each link and placement of caches, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--trace", type=Path, required=True, help="with block ids (.jsonl)")
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument(
        "--load", type=float, action="append", help="of the capacity without caches"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    file = read_plan_file(given.config)
    requests = [*read_trace(given.trace, "mooncake")[: given.requests]]
    rows = []
    for load in given.load or [0.9, 1.1]:
        for gbps in GBPS:
            at = over(file, gbps)
            cases = [on_trace(at, part, load=load) for part in parts(requests, given.parts)]
            for caches in PLACES:
                found = row(cases, caches)
                rows.append({"load": load, "gbps": gbps, "caches": asdict(caches), **found})
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    head = f"{'load':>5}{'Gbps':>6}  {'caches':<32}{'mean TTFT':>10}{'moving':>16}{'P90':>8}{'moving':>16}"
    print(head + f"{'cached':>8}{'moving':>8}{'moved':>8}{'GB':>8}")
    for each in rows:
        alone, moving = each["alone"], each["moving"]
        cells = f"{each['load']:>5}{each['gbps']:>6.0f}  {each['caches']['name']:<32}"
        for figure, width in (("ttft_mean_s", 10), ("ttft_p90_s", 8)):
            gain = moving[figure] / alone[figure] - 1
            cells += f"{alone[figure]:>{width}.2f}{moving[figure]:>8.2f} {gain:>+7.1%}"
        cells += f"{alone['hit_fraction']:>8.1%}{moving['hit_fraction']:>8.1%}"
        print(cells + f"{moving['num_moved']:>8.0f}{moving['moved_bytes'] / 1e9:>8.0f}")


if __name__ == "__main__":
    main()
