"""The reports of `prfaas plan` as lines for a person."""

from collections.abc import Iterator, Mapping
from typing import Any

from prfaas.config.plan_file import PlanFile

ROWS = {
    "threshold_tokens": ("t (tokens)", ",.0f", 1.0),
    "num_prfaas": ("N_prfaas", "d", 1),
    "num_prefill": ("N_p", "d", 1),
    "num_decode": ("N_d", "d", 1),
    "theta_prfaas_rps": ("Theta_prfaas (req/s)", ".3f", 1.0),
    "theta_prefill_rps": ("Theta_pd_p (req/s)", ".3f", 1.0),
    "theta_decode_rps": ("Theta_pd_d (req/s)", ".3f", 1.0),
    "lambda_max_rps": ("Lambda_max (req/s)", ".3f", 1.0),
    "ttft_mean_s": ("TTFT mean (s)", ".2f", 1.0),
    "ttft_p90_s": ("TTFT P90 (s)", ".2f", 1.0),
    "egress_bytes_per_s": ("egress (Gbps)", ".2f", 8e-9),
    "offload_fraction": ("offloaded", ".1%", 1.0),
}
"""Metric -> label, format, factor."""
SIGNS = {"independent": " ", "fitted": "*", "mixed": "~"}
LABEL_WIDTH = 22
CELL_WIDTH = 26


def plan_lines(facts: Mapping[str, Any], file: PlanFile) -> Iterator[str]:
    """Yield every deployment beside its published figures, and the comparison."""
    workload, link = file.model.workload, file.model.link
    yield (
        f"{workload.lengths.mean_tokens:,.0f} uncached and {workload.mean_output_tokens:,.0f} output"
        f" tokens a request on average; {file.model.batch} sequences a decode step of"
        f" {file.model.step_s * 1000:g} ms"
    )
    yield ""
    names = list(facts["deployments"])
    yield _row("", [_head(name, facts["detail"][name]) for name in names])
    for metric in ROWS:
        yield _row(ROWS[metric][0], [_cell(facts, name, metric) for name in names])
    if link is not None:
        shares = [facts["detail"][name]["egress_fraction_of_link"] for name in names]
        yield _row(f"  of {link.bytes_per_s * 8e-9:g} Gbps", [f"{share:.1%}" for share in shares])
    yield _row("limited by", [facts["detail"][name]["bottleneck"] for name in names])
    yield ""
    yield "Beside a figure: how far it is from the published one. TTFT is the service time, without queues."
    yield "* rests on inputs fitted to published rates, ~ on fitted and on independent ones."
    if "gains" in facts:
        yield ""
        yield from _gain_lines(facts, file)


def feasibility_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield each model's table, the clusters and the links."""
    yield (
        f"KVCache in {facts['kv_dtype']}, states in float32, on {facts['hardware']['name']}; Phi_kv ="
        " S_kv / T_prefill"
    )
    yield ""
    yield (
        f"{'model':<20}{'tokens':>8}{'S_kv MiB':>11}{'T_prefill s':>13}{'Phi Gbps':>10}"
        f"{'paper':>8}{'error':>8}{'Phi at most':>13}  T_prefill"
    )
    for name, model in facts["models"].items():
        for point in (*model["points"], *model["further_points"]):
            yield _point_line(name, point)
    yield ""
    yield "implied: T_prefill follows from the paper's Phi_kv, which is therefore not checked here; S_kv and"
    yield "that T_prefill is not below the roofline are. independent: T_prefill is from elsewhere."
    yield "Phi at most: at the roofline of T_prefill, active weights and attention at the bfloat16 peak."
    yield ""
    for cluster in facts["clusters"]:
        yield (
            f"{cluster['gpus']:>7,} GPUs of {cluster['model']} at {cluster['tokens']:,} tokens send"
            f" {_rate(cluster['egress_bytes_per_s'])}; paper {_rate(cluster['published_bytes_per_s'])}"
            f" ({cluster['error_vs_paper']:+.1%})"
        )
    yield ""
    names = list(facts["models"])
    yield f"{'GPUs that a link carries':<26}" + "".join(f"{name:>20}" for name in names)
    for link in facts["links"]:
        cells = (link["gpus"][name] for name in names)
        yield f"{link['name']:<26}" + "".join(f"{gpus or 'none':>20}" for gpus in cells)
    for link in facts["links"]:
        fitting = ", ".join(link["fits_cluster"]) or "no model"
        yield f"{facts['cluster_gpus']} GPUs fit {link['name']}: {fitting}"


def _head(name: str, detail: Mapping[str, Any]) -> str:
    cost = "" if detail["cost"] is None else f" (cost {detail['cost']:g})"
    return name + cost


def _row(label: str, cells: list[str]) -> str:
    return (f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)).rstrip()


def _cell(facts: Mapping[str, Any], name: str, metric: str) -> str:
    value = facts["deployments"][name][metric]
    if value is None:
        return "-"
    _, form, factor = ROWS[metric]
    sign = SIGNS[facts["provenance"][name].get(metric, "independent")]
    error = facts["error_vs_paper"].get(name, {}).get(metric)
    beside = "" if error is None else f"{error:+.1%}"
    return f"{value * factor:{form}} {sign} {beside:>6}"


def _gain_lines(facts: Mapping[str, Any], file: PlanFile) -> Iterator[str]:
    assert file.compare is not None
    ours = file.compare.deployment
    for name, gains in facts["gains"].items():
        said = _gain(gains, facts["gains_vs_paper"].get(name, {}))
        yield f"{ours} against {name}: {said}"
    if facts["equal_cost"] is not None:
        equal = facts["equal_cost"]
        said = _gain(equal["gains"], equal["gains_vs_paper"])
        mark = SIGNS[equal["provenance"]].strip()
        yield (
            f"{ours} against {file.compare.equal_cost} at equal cost ({equal['cost']:g},"
            f" {equal['deployment']['num_prefill']} : {equal['deployment']['num_decode']})"
            f"{mark}: {said}"
        )


def _gain(gains: Mapping[str, float], errors: Mapping[str, Mapping[str, float]]) -> str:
    labels = {"lambda_max_rps": "Lambda_max", "ttft_p90_s": "P90 TTFT"}
    parts = []
    for metric, gain in gains.items():
        published = errors.get(metric)
        beside = "" if published is None else f" (paper {published['published']:+.0%})"
        parts.append(f"{labels[metric]} {gain:+.1%}{beside}")
    return ", ".join(parts)


def _point_line(name: str, point: Mapping[str, Any]) -> str:
    error = point["error_vs_paper"]
    beside = "-" if error is None else f"{error:+.1%}"
    return (
        f"{name:<20}{point['tokens']:>8,}{point['kv_bytes'] / 2**20:>11,.1f}"
        f"{point['prefill_s']:>13.3f}{point['phi_bytes_per_s'] * 8e-9:>10.2f}"
        f"{point['published_bytes_per_s'] * 8e-9:>8.2f}{beside:>8}"
        f"{point['roofline_phi_bytes_per_s'] * 8e-9:>13,.1f}  {point['prefill_source']},"
        f" {point['source']}"
    )


def _rate(bytes_per_s: float) -> str:
    gbps = bytes_per_s * 8e-9
    return f"{gbps / 1000:.2f} Tbps" if gbps >= 1000 else f"{gbps:.0f} Gbps"
