#!/usr/bin/env python
"""Policies in running nodes over a link that changes, beside what `prfaas simulate` says of the same.

    scripts/bench/live_policies.py --json                    about half an hour; wants the machine to itself
    scripts/bench/live_policies.py --speed 8 --requests 60   a look at it
    scripts/bench/live_policies.py --files DIR               keeps the plans, for `prfaas simulate DIR/plan-halved.toml`

A prefill node and a pd node replay the profiles of the case study (one instance each, so many times as fast), with a relay
between them that holds the rate of a link: 70% of it is filled at the planned threshold. Scenarios: the link stays as it is, or
it is halved after a third of the requests' time and whole again after two thirds. For each, every policy gets fresh nodes
and the same requests: of the same seed, those of the simulation. Looked at meanwhile: t, and what has come over the link.
docs/load.md says how to read it.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import uvloop

from prfaas.bench.load import Load
from prfaas.bench.load_report import to_json
from prfaas.clock import monotonic_s
from prfaas.config.profiles import read_profile
from prfaas.config.traces import TraceRequest
from prfaas.scheduler.policies import PolicyName
from scripts.bench.link_peers import End
from scripts.bench.live_plan import SCENARIOS, SOURCES, Case, write_case, write_profiles
from scripts.bench.local_nodes import MODEL, Node, load_now, loaded, print_json, started

RELAY = Path(__file__).with_name("shaped_relay.py")
POLICIES: tuple[PolicyName, ...] = ("predictive", "static", "always-remote")
THRESHOLD = "prfaas_threshold_tokens"
LINK_RATE = "prfaas_peer_link_bytes_per_second"
LOOK_EVERY_S = 0.5
STALL_TIMEOUT_S = 5.0
PROMPTS_SEEN = 60
"""By the long time scale; from a quarter of them on it decides."""
KV_LENGTHS = (2_000, 16_000, 64_000)
"""Of prompts that show what a transfer moves; no multiples of a block."""
MOST_SLOWER = 1.5
"""Times as long as a profile says; beyond it the machine is measured more than the policies."""
AIM_FRACTION = 0.1
"""How far a live figure may be from the simulated one."""
ALONE: dict[str, PolicyName] = {"local": "local", "remote": "always-remote"}
"""The policy by which all prompts go to a side."""
STRETCHES = ("before", "halved", "recovered")
COMPARED = ("ttft_p50_s", "ttft_p90_s", "goodput_rps", "egress_bytes_per_s")


@dataclass(frozen=True, kw_only=True)
class Link:
    """The relay, from this side; any thread may ask."""

    end: End
    port: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def set(self, bytes_per_s: float | None) -> None:
        with self.lock:
            self.end.ask({"bytes_per_s": bytes_per_s})

    def num_bytes(self) -> int:
        with self.lock:
            return int(self.end.ask({})["num_bytes"])


@contextmanager
def running(
    work: Path, flags: Sequence[str], options: argparse.Namespace
) -> Iterator[tuple[Node, Link]]:
    """Run a pd node with these flags and its peer, with a link of no limit between them."""
    replay = ["--engine", "replay", "--bytes-scale", str(options.bytes_scale)]
    replay += ["--cache-ram", "512MiB", "--profile"]
    with ExitStack() as undo:
        prefill = undo.enter_context(
            started(
                work,
                "--role",
                "prefill",
                "--max-transfers",
                "1000",
                *replay,
                str(work / "remote.toml"),
            )
        )
        prefill.wait_until_ready()
        command = [sys.executable, str(RELAY), "--target", str(prefill.port)]
        end = End(command, work / "relay.log")
        undo.callback(end.close)
        link = Link(end=end, port=int(end.read()["port"]))
        peer = ["--peer", f"127.0.0.1:{link.port}", "--stall-timeout-s", str(STALL_TIMEOUT_S)]
        pd = undo.enter_context(
            started(
                work, "--served-model-name", MODEL, *peer, *replay, str(work / "local.toml"), *flags
            )
        )
        pd.wait_until_ready()
        wait_for_peer(pd)
        yield pd, link


def wait_for_peer(pd: Node) -> None:
    """Return once the pd node has found its peer."""
    for _ in range(300):
        if pd.metric("prfaas_peer_usable") == 1:
            return
        time.sleep(0.1)
    raise RuntimeError("the pd node does not find its peer")


def single_prompts(
    work: Path, options: argparse.Namespace, side: str, policy: PolicyName
) -> list[dict[str, float]]:
    """Return what prompts of some lengths move and take on a side, each alone over a link without a limit."""
    profile = read_profile(work / f"{side}.toml")
    rows = []
    with running(work, ["--policy", policy], options) as (pd, _):
        for length in (KV_LENGTHS[0], *KV_LENGTHS):  # the first opens connections
            load = load_now(pd.url, [TraceRequest(0.0, length, 2)], max_s=120.0)
            sample = load.samples[0]
            if sample.route != side or sample.first_s is None:
                raise RuntimeError(f"{length} tokens went {sample.route}: {sample.reason}")
            rows.append(
                {
                    "num_tokens": length,
                    "num_bytes": sample.bytes_received,
                    "ttft_s": sample.first_s - sample.due_s,
                    "profile_s": profile.prefill_s(length),
                }
            )
    return rows[1:]


def slower(rows: Sequence[dict[str, float]]) -> float:
    """Return how many times as long as the profile says these prompts took: pages take a processor's time."""
    return max(1.0, statistics.median(row["ttft_s"] / row["profile_s"] for row in rows))


def too_slow(factors: Mapping[str, float]) -> str | None:
    """Return a warning if this machine is far from keeping the profiles' time."""
    side, factor = max(factors.items(), key=lambda item: item[1])
    if factor <= MOST_SLOWER:
        return None
    return (
        f"WARNING: {side} prompts alone took {factor:.2f} times what the profile says:"
        " the machine is busy or too slow for --speed and --bytes-scale"
    )


async def look(pd: Node, link: Link, began_s: float, seen: list[dict[str, float | None]]) -> None:
    """Note t, what the node takes the link for, and the bytes that came over it, again and again."""
    while True:
        threshold, rate, num_bytes = await asyncio.to_thread(
            lambda: (pd.metric(THRESHOLD), pd.metric(LINK_RATE), link.num_bytes())
        )
        seen.append(
            {
                "at_s": monotonic_s() - began_s,
                "threshold_tokens": threshold,
                "link_bytes_per_s": rate,
                "num_bytes": num_bytes,
            }
        )
        await asyncio.sleep(LOOK_EVERY_S)


async def change(link: Link, case: Case, began_s: float) -> None:
    """Let the link be what the plan says when the plan says so."""
    for each in case.file.simulation.link:
        await asyncio.sleep(max(0.0, began_s + each.at_s - monotonic_s()))
        await asyncio.to_thread(link.set, each.bandwidth_fraction * case.link_bytes_per_s)


async def run(pd: Node, link: Link, case: Case, max_s: float) -> tuple[Load, list[dict[str, Any]]]:
    """Return the load of a case, and what was seen while it lasted."""
    seen: list[dict[str, Any]] = []
    link.set(case.link_bytes_per_s)
    began_s = monotonic_s()
    async with asyncio.TaskGroup() as tasks:
        beside = [
            tasks.create_task(look(pd, link, began_s, seen)),
            tasks.create_task(change(link, case, began_s)),
        ]
        load = await loaded(pd.url, case.requests, max_s=max_s)
        for task in beside:
            task.cancel()
    return load, seen


def flags_of(policy: PolicyName, case: Case, options: argparse.Namespace) -> list[str]:
    """Return what the pd node is told: a static t is the plan's, any other is found."""
    flags = ["--policy", policy]
    if policy == "static":
        return [*flags, "--threshold-tokens", str(case.threshold_tokens)]
    if policy in {"threshold", "predictive"}:
        period_s = options.period_s
        flags += ["--rebalance-period-s", str(period_s), "--rebalance-dwell-s", str(2 * period_s)]
        flags += ["--rebalance-prompts", str(PROMPTS_SEEN)]
    return flags


def live_figures(load: Load, seen: Sequence[dict[str, Any]], case: Case) -> dict[str, Any]:
    """Return the figures that a simulated run has, too, and what went where why."""
    report = to_json(load, ttft_slo_s=case.slo_s)
    last_s, times = case.requests[-1].arrival_s, report["ttft_s"]
    if times is None:
        raise RuntimeError(f"nothing was answered: {report['errors']}")
    moved = [each["num_bytes"] for each in seen if each["at_s"] <= last_s]
    return {
        "ttft_p50_s": times["p50"],
        "ttft_p90_s": times["p90"],
        "ttft_mean_s": times["mean"],
        "goodput_rps": report["goodput"]["requests_per_s"],
        "egress_bytes_per_s": (moved[-1] - moved[0]) / last_s,
        "offload_fraction": report["routes"].get("remote", {"requests": 0})["requests"]
        / max(1, report["requests"]["done"]),
        "requests": report["requests"],
        "reasons": report["reasons"],
        "errors": report["errors"],
        "prediction_error_s": report["prediction_error_s"],
        "generator_warnings": report["warnings"],
    }


def simulated_figures(policy: PolicyName, case: Case) -> dict[str, float]:
    found = case.simulated(policy)
    return {name: getattr(found, name) for name in (*COMPARED, "ttft_mean_s", "offload_fraction")}


def thresholds(seen: Sequence[dict[str, Any]], case: Case) -> dict[str, float | None]:
    """Return t in the second half of each stretch in which the link stays the same where it is halved: the median."""
    last_s = case.requests[-1].arrival_s
    starts = [0.0, *(share * last_s for share, _ in SCENARIOS["halved"].changes), last_s]
    found: dict[str, float | None] = {}
    for name, begin_s, end_s in zip(STRETCHES, starts, starts[1:], strict=False):
        middle_s = (begin_s + end_s) / 2
        values = [
            each["threshold_tokens"]
            for each in seen
            if middle_s <= each["at_s"] < end_s and each["threshold_tokens"] is not None
        ]
        found[name] = statistics.median(values) if values else None
    return found


def aims(found: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what was aimed at in one scenario beside what was found."""
    for policy, row in found.items():
        for name in COMPARED:
            live, simulated = row["live"][name], row["simulated"][name]
            off = live / simulated - 1 if simulated else None
            yield {
                "aim": f"{policy}: live {name} within {AIM_FRACTION:.0%} of the simulated",
                "live": live,
                "simulated": simulated,
                "off_fraction": off,
                "is_met": off is not None and abs(off) <= AIM_FRACTION,
            }
    if {"predictive", "static"} <= found.keys():
        ours, theirs = (found[each]["live"]["goodput_rps"] for each in ("predictive", "static"))
        yield {
            "aim": "predictive has at least the goodput of static",
            "predictive": ours,
            "static": theirs,
            "is_met": ours >= theirs,
        }


def movement(
    steady: Mapping[str, float | None], halved: Mapping[str, float | None]
) -> dict[str, Any] | None:
    """Return what was aimed at in t, over that of the same requests while the link stayed as it was.

    What prompts there were moves t, too, in both alike. None: t was not seen.
    """
    if None in steady.values() or None in halved.values():
        return None
    over = {name: halved[name] / steady[name] for name in STRETCHES}  # type: ignore[operator]
    return {
        "aim": "t is higher while the link is halved, and comes back when it recovers",
        "of_steady": over,
        "is_met": over["halved"] > 1 + AIM_FRACTION and over["recovered"] < over["halved"],
    }


def measured(
    options: argparse.Namespace, work: Path, factors: Mapping[str, float], kv: dict[int, int]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (scenario, policy, figures)."""
    for name in options.scenario:
        case = write_case(
            work,
            SCENARIOS[name],
            speed=options.speed,
            slower=factors,
            kv=kv,
            load=options.load,
            num_requests=options.requests,
            output_tokens=2,
            stall_timeout_s=STALL_TIMEOUT_S,
            seed=options.seed,
        )
        for policy in options.policy:
            yield name, policy, one_run(options, work, case, policy)


def one_run(
    options: argparse.Namespace, work: Path, case: Case, policy: PolicyName
) -> dict[str, Any]:
    """Return the figures of one policy on fresh nodes."""
    max_s = 2 * case.requests[-1].arrival_s + 120
    with running(work, flags_of(policy, case, options), options) as (pd, link):
        warm_up(pd, case)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            load, seen = runner.run(run(pd, link, case, max_s))
    return {
        "rate_rps": case.rate_rps,
        "link_bytes_per_s": case.link_bytes_per_s,
        "planned_threshold_tokens": case.threshold_tokens,
        "slo_s": case.slo_s,
        "live": live_figures(load, seen, case),
        "simulated": simulated_figures(policy, case),
        "thresholds": thresholds(seen, case),
        "seen": seen,
    }


def warm_up(pd: Node, case: Case) -> None:
    """Ask prompts of each side of t, one after the other: a simulation knows all rates from the start."""
    for length in [case.threshold_tokens // 4, 2 * case.threshold_tokens] * 2:
        load_now(pd.url, [TraceRequest(0.0, length, 2)], max_s=120.0)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--requests", type=int, default=240, help="of each run: 240")
    parser.add_argument("--load", type=float, default=0.7, help="of the planned Lambda_max: 0.7")
    parser.add_argument("--speed", type=float, default=2.0, help="of the profiles: 2")
    parser.add_argument("--bytes-scale", type=float, default=0.01, help="of the KV: 0.01")
    parser.add_argument("--period-s", type=float, default=5.0, help="of the long time scale: 5")
    parser.add_argument("--seed", type=int, default=0, help="of the requests: 0")
    parser.add_argument("--files", type=Path, help="a directory that keeps plans and logs")
    return parser.parse_args(argv)


def line(scenario: str, policy: str, found: dict[str, Any]) -> str:
    live, simulated = found["live"], found["simulated"]
    cells = [
        f"{label} {live[name] * factor:.2f} ({simulated[name] * factor:.2f})"
        for label, name, factor in (
            ("TTFT P50", "ttft_p50_s", 1.0),
            ("P90", "ttft_p90_s", 1.0),
            ("goodput", "goodput_rps", 1.0),
            ("egress Mbit/s", "egress_bytes_per_s", 8e-6),
            ("offloaded", "offload_fraction", 1.0),
        )
    ]
    t = ", ".join(f"{when} {value}" for when, value in found["thresholds"].items())
    return f"{scenario}, {policy}: {'; '.join(cells)}; t: {t}"


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    output = sys.stderr if options.json else sys.stdout
    report: dict[str, Any] = {"scenarios": {}}
    with tempfile.TemporaryDirectory() as name:
        work = options.files or Path(name)
        work.mkdir(parents=True, exist_ok=True)
        write_profiles(work, options.speed)
        rows = {side: single_prompts(work, options, side, ALONE[side]) for side in SOURCES}
        factors = {side: slower(rows[side]) for side in SOURCES}
        report["single_prompts"], report["slower"] = rows, factors
        report["warning"] = too_slow(factors)
        print(report["warning"] or "", "live (simulated)", sep="\n", file=output, flush=True)
        kv = {int(row["num_tokens"]): int(row["num_bytes"]) for row in rows["remote"]}
        for scenario, policy, found in measured(options, work, factors, kv):
            told = report["scenarios"].setdefault(scenario, {"policies": {}})
            told["policies"][policy] = found
            print(line(scenario, policy, found), file=output, flush=True)
    t = [
        report["scenarios"][name]["policies"]["predictive"]["thresholds"]
        for name in SCENARIOS
        if "predictive" in report["scenarios"].get(name, {}).get("policies", {})
    ]
    for told in report["scenarios"].values():
        told["aims"] = list(aims(told["policies"]))
    moved = movement(*t) if len(t) == len(SCENARIOS) else None
    if moved is not None:
        report["scenarios"]["halved"]["aims"].append(moved)
    for told in report["scenarios"].values():
        for aim in told["aims"]:
            print(f"{'met' if aim['is_met'] else 'MISSED'}: {aim['aim']}", file=output)
    if options.json:
        print_json(report)


if __name__ == "__main__":
    main()
