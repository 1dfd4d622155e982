"""What `prfaas bench serve` says: one JSON object, or lines for a person.

A percentile is the least value that at least this share does not exceed, as `prfaas simulate` has it: a
value that was seen, nothing interpolated.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil, fsum
from typing import Any

from prfaas.bench.load import Load, Sample

PERCENTILES = (50, 90, 99)
MAX_NAMES = 30
"""Of routes, reasons, nodes and errors; what is beyond the most frequent is `other`."""
LATE_S, LATE_FRACTION = 0.01, 0.01
"""A generator that is later than this and than this part of the median TTFT, once in a hundred times, is the
limit of what is measured."""
BUSY_FRACTION = 0.9
Report = dict[str, Any]


def quantile(ascending: Sequence[float], fraction: float) -> float:
    """Return the least value that at least this share does not exceed."""
    return ascending[max(0, ceil(fraction * len(ascending) - 1e-9) - 1)]


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Return mean, percentiles and greatest of the values; None without any."""
    ascending = sorted(values)
    if not ascending:
        return None
    found = {"mean": fsum(ascending) / len(ascending)}
    found |= {f"p{percent}": quantile(ascending, percent / 100) for percent in PERCENTILES}
    return found | {"max": ascending[-1]}


def ttft_s(sample: Sample) -> float | None:
    """Return the time from when the request was due to its first token."""
    return None if sample.first_s is None else sample.first_s - sample.due_s


def e2e_s(sample: Sample) -> float | None:
    """Return the time from when the request was due to its last token."""
    return None if sample.last_s is None else sample.last_s - sample.due_s


def num_tokens(sample: Sample) -> int:
    """Return the tokens of the answer: as the server counts them, else one for each event."""
    return sample.completion_tokens or (sample.first_s is not None) + len(sample.gaps_s)


def to_json(load: Load, *, ttft_slo_s: float) -> Report:
    """Return all figures of a load, in base units. Latencies are those of whole answers."""
    done = [sample for sample in load.samples if sample.is_done and sample.first_s is not None]
    duration_s = max((sample.ended_s or 0.0 for sample in done), default=load.ended_s)
    duration_s = max(duration_s - load.began_s, 1e-9)
    report: Report = {
        "stopped_by": load.stopped_by,
        "duration_s": duration_s,
        "requests": _counts(load, done),
        "ttft_s": spread(_known(ttft_s, done)),
        "itl_s": spread(gap for sample in done for gap in sample.gaps_s),
        "tpot_s": spread(_tpots(done)),
        "e2e_s": spread(_known(e2e_s, done)),
        "goodput": _goodput(load, done, ttft_slo_s, duration_s),
        "throughput": _throughput(done, duration_s),
        "prompt_tokens": {
            "all": sum(sample.prompt_tokens for sample in done),
            "reused": sum(sample.tokens_reused for sample in done),
            "local": sum(sample.tokens_local for sample in done),
            "remote": sum(sample.tokens_remote for sample in done),
        },
        "kv_bytes_received": sum(sample.bytes_received for sample in load.samples),
        "routes": _routes(done),
        "reasons": _names(sample.reason for sample in done),
        "peers": _names(sample.peer for sample in done),
        "nodes": _names(sample.node for sample in done),
        "prediction_error_s": spread(_prediction_errors(done)),
        "errors": _names(sample.error for sample in load.samples),
        "generator": _generator(load),
    }
    return report | {"warnings": list(_warnings(load, report))}


def _counts(load: Load, done: Sequence[Sample]) -> dict[str, int]:
    cut = sum(sample.error == "unfinished" for sample in load.samples)
    return {
        "planned": load.num_planned,
        "sent": len(load.samples),
        "done": len(done),
        "unfinished": cut,
        "failed": len(load.samples) - len(done) - cut,
    }


def _known(of: Callable[[Sample], float | None], samples: Iterable[Sample]) -> Iterator[float]:
    return (value for sample in samples if (value := of(sample)) is not None)


def _tpots(samples: Iterable[Sample]) -> Iterator[float]:
    for sample in samples:
        if num_tokens(sample) > 1 and sample.last_s is not None and sample.first_s is not None:
            yield (sample.last_s - sample.first_s) / (num_tokens(sample) - 1)


def _goodput(
    load: Load, done: Sequence[Sample], ttft_slo_s: float, duration_s: float
) -> dict[str, float]:
    num_good = sum(time_s <= ttft_slo_s * (1 + 1e-12) for time_s in _known(ttft_s, done))
    return {
        "ttft_slo_s": ttft_slo_s,
        "requests_per_s": num_good / duration_s,
        "fraction": num_good / max(1, len(load.samples)),
    }


def _throughput(done: Sequence[Sample], duration_s: float) -> dict[str, float]:
    return {
        "requests_per_s": len(done) / duration_s,
        "prompt_tokens_per_s": sum(sample.prompt_tokens for sample in done) / duration_s,
        "completion_tokens_per_s": sum(map(num_tokens, done)) / duration_s,
        "kv_bytes_per_s": sum(sample.bytes_received for sample in done) / duration_s,
    }


def _routes(done: Sequence[Sample]) -> dict[str, Any]:
    counts = _names(sample.route for sample in done)
    return {
        route: {
            "requests": count,
            "ttft_s": spread(_known(ttft_s, [each for each in done if each.route == route])),
        }
        for route, count in counts.items()
    }


def _names(names: Iterable[str | None]) -> dict[str, int]:
    counts = Counter(name for name in names if name is not None)
    kept = dict(counts.most_common(MAX_NAMES))
    others = counts.total() - sum(kept.values())
    return kept | ({"other": kept.get("other", 0) + others} if others else {})


def _prediction_errors(done: Iterable[Sample]) -> Iterator[float]:
    for sample in done:
        if sample.predicted_ttft_s is not None and sample.first_s is not None:
            yield abs(sample.first_s - sample.due_s - sample.predicted_ttft_s)


def _generator(load: Load) -> dict[str, Any]:
    lags = [sample.sent_s - sample.due_s for sample in load.samples if sample.sent_s is not None]
    return {
        "send_lag_s": spread(lags),
        "loop_lag_s": spread(load.loop_lags_s),
        "cpu_fraction": load.cpu_s / max(load.ended_s - load.began_s, 1e-9),
    }


def _warnings(load: Load, report: Report) -> Iterator[str]:
    generator, times = report["generator"], report["ttft_s"]
    limit_s = max(LATE_S, LATE_FRACTION * (0.0 if times is None else times["p50"]))
    for what, said in (("send_lag_s", "requests left"), ("loop_lag_s", "the event loop woke")):
        lag = generator[what]
        if lag is not None and lag["p99"] > limit_s:
            yield (
                f"the generator was the limit: {said} up to {1e3 * lag['p99']:.0f} ms late"
                " (P99); latencies hold that"
            )
    if generator["cpu_fraction"] > BUSY_FRACTION:
        yield (
            f"the generator was the limit: it used {generator['cpu_fraction']:.0%} of a core;"
            " divide the load between several"
        )
    if load.stopped_by is not None:
        counts = report["requests"]
        yield (
            f"ended early by {load.stopped_by}: {counts['sent']:,} of {counts['planned']:,} requests"
            f" were sent, {counts['unfinished']:,} of them unfinished"
        )


def to_lines(report: Report) -> Iterator[str]:
    """Yield what `to_json` returned as lines for a person."""
    counts, goodput, rates = report["requests"], report["goodput"], report["throughput"]
    yield (
        f"{counts['done']:,} of {counts['planned']:,} requests answered in {report['duration_s']:.1f} s,"
        f" {counts['failed']:,} failed, {counts['unfinished']:,} unfinished"
    )
    yield ""
    yield f"{'ms':<10}{'mean':>10}{'P50':>10}{'P90':>10}{'P99':>10}{'max':>10}"
    for name, key in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s")):
        yield _spread_line(name, report[key])
    for route, found in report["routes"].items():
        yield _spread_line(f"  {route}", found["ttft_s"])
    yield ""
    yield (
        f"goodput {goodput['requests_per_s']:.3f} req/s with TTFT <= {goodput['ttft_slo_s']:g} s"
        f" ({goodput['fraction']:.1%} of those sent)"
    )
    yield (
        f"throughput {rates['requests_per_s']:.3f} req/s, {rates['prompt_tokens_per_s']:,.0f} prompt and"
        f" {rates['completion_tokens_per_s']:,.0f} completion tokens/s"
    )
    tokens = report["prompt_tokens"]
    if report["routes"]:
        yield (
            f"prompt tokens: {_share(tokens, 'reused')} reused, {_share(tokens, 'local')} computed by the"
            f" node, {_share(tokens, 'remote')} by a peer; {report['kv_bytes_received'] / 1e6:,.1f} MB of"
            f" KVCache received, {rates['kv_bytes_per_s'] * 8 / 1e6:,.1f} Mbit/s"
        )
    yield from _name_lines(report)
    for warning in report["warnings"]:
        yield f"WARNING: {warning}"


def _name_lines(report: Report) -> Iterator[str]:
    routes = {route: found["requests"] for route, found in report["routes"].items()}
    named = {"routes": routes} | {
        key: report[key] for key in ("reasons", "peers", "nodes", "errors")
    }
    for name, counts in named.items():
        if counts:
            yield f"{name}: " + ", ".join(f"{each} {count:,}" for each, count in counts.items())
    error = report["prediction_error_s"]
    if error is not None:
        yield f"predicted TTFT was off by {error['mean']:.3f} s on average"


def _spread_line(name: str, found: dict[str, float] | None) -> str:
    if found is None:
        return f"{name:<10}" + f"{'-':>10}" * 5
    return f"{name:<10}" + "".join(f"{1e3 * value:>10,.1f}" for value in found.values())


def _share(tokens: dict[str, int], key: str) -> str:
    return f"{tokens[key] / max(1, tokens['all']):.1%}"
