"""The report of `prfaas simulate` as lines for a person."""

from collections.abc import Iterator, Mapping
from typing import Any

FIGURES = {
    "throughput_rps": (".3f", 1.0),
    "ttft_mean_s": (".2f", 1.0),
    "ttft_p90_s": (".2f", 1.0),
    "offload_fraction": (".1%", 1.0),
    "egress_bytes_per_s": (".2f", 8e-9),
}
LABELS = {
    "throughput_rps": "throughput (req/s)",
    "ttft_mean_s": "TTFT mean (s)",
    "ttft_p90_s": "TTFT P90 (s)",
    "offload_fraction": "offloaded",
    "egress_bytes_per_s": "egress (Gbps)",
}
GAIN_LABELS = {"throughput_rps": "throughput", "ttft_p90_s": "P90 TTFT"}
CELL_WIDTH = 24
RUN_HEAD = (
    f"{'':<26}{'req/s':>8}{'done/s':>8}{'in SLO':>8}{'TTFT mean':>11}{'P50':>8}{'P90':>9}{'P99':>9}"
    f"{'offload':>9}{'Gbps':>7}{'prfaas':>8}{'prefill':>8}{'cached':>8}{'off by':>8}"
)
"""in SLO: goodput. prfaas, prefill: busy. off by: predicted against actual TTFT."""


def simulation_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the deployments side by side, each at its loads, and the policies that were asked for."""
    if facts["is_capacity"]:
        seeds = f"seeds {facts['seed']} to {facts['seed'] + 2}"
        yield f"{facts['num_requests']:,} requests a run, {seeds}; throughput is the highest rate without a"
        yield "growing backlog, TTFT is at low load, offload and egress are at the capacity"
    else:
        yield f"{facts['num_requests']:,} requests, seed {facts['seed']}"
    yield ""
    names = list(facts["deployments"])
    yield f"{'':<22}" + "".join(f"{name:>{CELL_WIDTH}}" for name in names)
    for figure in FIGURES:
        cells = "".join(f"{_cell(facts, name, figure):>{CELL_WIDTH}}" for name in names)
        yield f"{LABELS[figure]:<22}{cells}".rstrip()
    if facts["is_capacity"]:
        spread = "".join(
            f"{min(found):.3f} - {max(found):.3f}".rjust(CELL_WIDTH - 7) + " " * 7
            for found in facts["capacities_rps"].values()
        )
        yield f"{'  of the seeds':<22}{spread}".rstrip()
        if facts["error_vs_paper"]:
            yield ""
            yield "Beside a figure: how far it is from the published one."
    yield from _gain_lines(facts)
    yield ""
    yield RUN_HEAD
    for name, loads in facts["loads"].items():
        for load in loads:
            yield _run_line(f"{name} {_fraction(load)}", load)
    for name, policies in facts["policies"].items():
        yield ""
        yield f"policies of {name}"
        for policy, load in policies.items():
            yield _run_line(f"  {policy}", load)
    yield ""
    yield "in SLO: requests per second with their first token in time; prfaas, prefill: busy instances;"
    yield "cached: of the prompts; off by: mean distance of the predicted from the actual TTFT, seconds."


def _cell(facts: Mapping[str, Any], name: str, figure: str) -> str:
    form, factor = FIGURES[figure]
    value = facts["deployments"][name][figure]
    error = facts.get("error_vs_paper", {}).get(name, {}).get(figure)
    beside = "" if error is None else f"{error:+.1%}"
    return f"{value * factor:{form}} {beside:>6}"


def _gain_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    for name, gains in facts.get("gains", {}).items():
        parts = []
        for figure, label in GAIN_LABELS.items():
            gain = gains[figure]
            paper = gain["published"]
            beside = "" if paper is None or not facts["is_capacity"] else f" (paper {paper:+.0%})"
            parts.append(f"{label} {gain['gain']:+.1%}{beside}")
        yield f"against {name}: {', '.join(parts)}"


def _fraction(load: Mapping[str, Any]) -> str:
    fraction = load["fraction_of_capacity"]
    return "" if fraction is None else f"at {fraction:.0%}"


def _run_line(label: str, load: Mapping[str, Any]) -> str:
    return (
        f"{label:<26}{load['rate_rps']:>8.3f}{load['throughput_rps']:>8.3f}{load['goodput_rps']:>8.3f}"
        f"{load['ttft_mean_s']:>11.2f}{load['ttft_p50_s']:>8.2f}{load['ttft_p90_s']:>9.2f}"
        f"{load['ttft_p99_s']:>9.2f}{load['offload_fraction']:>9.1%}"
        f"{load['egress_bytes_per_s'] * 8e-9:>7.2f}{_busy(load['prfaas_busy_fraction']):>8}"
        f"{_busy(load['prefill_busy_fraction']):>8}{load['hit_fraction']:>8.1%}"
        f"{load['prediction_error_s']:>8.2f}{_moves(load)}"
    )


def _moves(load: Mapping[str, Any]) -> str:
    """Return how many prefixes moved ahead of their prefills, where any did."""
    if not load["num_moved"] + load["num_moves_given_up"]:
        return ""
    moved = f"  {load['num_moved']:,} prefixes moved, {load['moved_bytes'] / 1e9:,.1f} GB"
    lost = load["num_moves_given_up"]
    return f"{moved}, {lost:,} given up" if lost else moved


def _busy(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.0%}"
