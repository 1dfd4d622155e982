#!/usr/bin/env python
"""What going through the scheduler adds to a direct call of the same pd node: TTFT and E2E, P50 and P99, and processor time.

    scripts/bench/scheduler_overhead.py --json
    scripts/bench/scheduler_overhead.py --rate 50 --seconds 2 --rounds 1

A scheduler and a pd node that replays a fast engine run on loopback, the load comes from this process:
three processes that want a core each. Rounds go directly and through the scheduler in turns, the same arrivals and lengths
each, prompts that no cache knows. Latencies here begin when a request is sent, not when it was due: how late this process
is has nothing to do with the scheduler. Percentiles are of all rounds together; the added ones of
single rounds stand beside them, for they show what is noise.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.bench.load import Load, Sample
from prfaas.bench.load_report import quantile, to_json
from prfaas.config.traces import TraceRequest
from scripts.bench.local_nodes import MODEL, Node, free_port, load_now, print_json, started

PROFILE = """
name = "fast"
hardware = "made up: an engine that is never what one waits for"
gpus_per_instance = 1
[prefill]
curve = "linear"
tokens = [1, 4096]
seconds = [0.0005, 0.008]
provenance = "fitted"
source = "made up"
[kv]
tokens = [1, 4096]
bytes = [64, 262144]
[decode]
batch = [1, 64]
step_s = [0.0005, 0.001]
max_batch = 64
provenance = "fitted"
source = "made up"
"""
PERCENTS = (50, 99)
WAYS = ("direct", "scheduler")
PROCESSES = {"direct": "node", "scheduler": "scheduler"}
"""Whom each way asks."""


def arrivals(rate_rps: float, seconds: float, options: argparse.Namespace) -> list[TraceRequest]:
    """Return Poisson arrivals of equal requests; of one seed the same."""
    random, now_s, requests = Random(options.seed), 0.0, []
    while now_s < seconds:
        requests.append(TraceRequest(now_s, options.prompt_tokens, options.output_tokens))
        now_s += random.expovariate(rate_rps)
    return requests


def latencies(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Return TTFT and E2E of whole answers since they were sent, ascending."""
    found: dict[str, list[float]] = {"ttft_s": [], "e2e_s": []}
    for sample in samples:
        if sample.is_done and sample.sent_s is not None:
            assert sample.first_s is not None, "an answer is at least a token"
            assert sample.last_s is not None
            found["ttft_s"].append(sample.first_s - sample.sent_s)
            found["e2e_s"].append(sample.last_s - sample.sent_s)
    return {name: sorted(values) for name, values in found.items()}


def compared(rounds: dict[str, list[Load]]) -> dict[str, Any]:
    """Return the percentiles of both ways and what the scheduler adds, of all rounds and of each."""
    found: dict[str, Any] = {}
    whole = {
        way: latencies([sample for load in loads for sample in load.samples])
        for way, loads in rounds.items()
    }
    each = {way: [latencies(load.samples) for load in loads] for way, loads in rounds.items()}
    for name in ("ttft_s", "e2e_s"):
        for percent in PERCENTS:
            of = {way: quantile(whole[way][name], percent / 100) for way in WAYS}
            single = [
                quantile(through[name], percent / 100) - quantile(direct[name], percent / 100)
                for direct, through in zip(each["direct"], each["scheduler"], strict=True)
            ]
            added_s = of["scheduler"] - of["direct"]
            found[f"{name[:-2]}_p{percent}_s"] = of | {"added": added_s, "added_by_round": single}
    return found


def measured(
    nodes: dict[str, Node], rate_rps: float, options: argparse.Namespace
) -> tuple[dict[str, list[Load]], dict[str, dict[str, float]]]:
    """Return the rounds of one rate, the ways in turns and each first as often as the other.

    Beside them stands what a request took of a processor in each process, by way.
    """
    requests = arrivals(rate_rps, options.seconds, options)
    rounds: dict[str, list[Load]] = {way: [] for way in WAYS}
    cpu_s = {way: dict.fromkeys(nodes, 0.0) for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            before_s = {name: node.cpu_s() for name, node in nodes.items()}
            load = load_now(nodes[way].url, requests, max_s=4 * options.seconds + 30)
            for name, node in nodes.items():
                cpu_s[way][name] += node.cpu_s() - before_s[name]
            if not all(sample.is_done for sample in load.samples):
                errors = to_json(load, ttft_slo_s=1.0)["errors"]
                raise RuntimeError(
                    f"{way} at {rate_rps:g} req/s: {errors}; more than this machine carries?"
                )
            rounds[way].append(load)
    num_requests = options.rounds * len(requests)
    return rounds, {
        way: {name: seconds / num_requests for name, seconds in of.items()}
        for way, of in cpu_s.items()
    }


def measure(options: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of each rate."""
    profile = work / "fast.toml"
    profile.write_text(PROFILE)
    replay = ["--engine", "replay", "--profile", str(profile), "--served-model-name", MODEL]
    with ExitStack() as undo:
        port = free_port()
        fleet = ["--role", "scheduler", *replay]
        scheduler = undo.enter_context(started(work, *fleet, port=port))
        join = ["--scheduler", f"127.0.0.1:{port}", "--cache-ram", "256MiB", *replay]
        pd = undo.enter_context(started(work, *join))
        for node in (pd, scheduler):
            node.wait_until_ready()
        nodes = {"direct": pd, "scheduler": scheduler}
        warm_up(nodes, options)
        for rate_rps in options.rate:
            yield found_at(rate_rps, *measured(nodes, rate_rps, options))


def warm_up(nodes: dict[str, Node], options: argparse.Namespace) -> None:
    """Open connections and load what is loaded late."""
    for node in nodes.values():
        load_now(node.url, arrivals(50.0, min(1.0, options.seconds), options), max_s=60.0)


def found_at(
    rate_rps: float, rounds: dict[str, list[Load]], cpu_s: dict[str, dict[str, float]]
) -> dict[str, Any]:
    reports = {
        way: [to_json(load, ttft_slo_s=1.0)["generator"] for load in loads]
        for way, loads in rounds.items()
    }
    return {
        "rate_rps": rate_rps,
        "num_requests": len(rounds["direct"][0].samples),
        "num_rounds": len(rounds["direct"]),
        **compared(rounds),
        "cpu_s": {
            way: {PROCESSES[name]: each for name, each in cpu_s[way].items()} for way in WAYS
        },
        "generator": {
            way: {
                "loop_lag_p99_s": max(each["loop_lag_s"]["p99"] for each in of),
                "cpu_fraction": max(each["cpu_fraction"] for each in of),
            }
            for way, of in reports.items()
        },
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['rate_rps']:g} requests/s, {found['num_rounds']} rounds of {found['num_requests']:,}"
    for name in ("ttft", "e2e"):
        for percent in PERCENTS:
            row = found[f"{name}_p{percent}_s"]
            spread = ", ".join(f"{1e3 * each:+.2f}" for each in row["added_by_round"])
            yield (
                f"  {name.upper()} P{percent}: direct {1e3 * row['direct']:.2f} ms, through the scheduler"
                f" {1e3 * row['scheduler']:.2f} ms, added {1e3 * row['added']:+.2f} ms ({spread})"
            )
    for way, of_way in found["cpu_s"].items():
        took = ", ".join(f"{name} {1e3 * each:.2f} ms" for name, each in of_way.items())
        yield f"  a processor's time a request, {way}: {took}"
    for way, lag in found["generator"].items():
        yield (
            f"  the generator, {way}: loop late by up to {1e3 * lag['loop_lag_p99_s']:.1f} ms (P99),"
            f" {lag['cpu_fraction']:.0%} of a core"
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rate", type=float, nargs="+", default=[50.0, 200.0], help="50 200")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round: 10")
    parser.add_argument("--rounds", type=int, default=5, help="each way: 5")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="64")
    parser.add_argument("--output-tokens", type=int, default=2, help="2")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals: 0")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    report: dict[str, Any] = {"rates": []}
    with tempfile.TemporaryDirectory() as name:
        for found in measure(options, Path(name)):
            report["rates"].append(found)
            for line in lines(found):
                print(line, file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print_json(report)


if __name__ == "__main__":
    main()
