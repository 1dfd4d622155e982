"""Workloads as TOML: a truncated log-normal, a trace, or a mixture of these."""

from math import fsum
from pathlib import Path
from typing import cast, get_args

from prfaas.config.tables import Table, read_toml
from prfaas.config.traces import TraceFormat, read_trace, uncached_lengths
from prfaas.scheduler.lengths import mixture, of_sample, truncated_lognormal
from prfaas.scheduler.profile import Workload

KINDS = ("lognormal", "trace", "mixture")
CACHES = ("none", "unbounded")
MAX_TOKENS = 100_000_000
MAX_WEIGHT = 1e9


def read_workload(path: Path) -> Workload:
    """Return the workload in a TOML file.

    Raises:
        ConfigError: an unknown or missing key, or a value that makes no sense; names both.
    """
    return _workload(read_toml(path), KINDS)


def _workload(table: Table, kinds: tuple[str, ...]) -> Workload:
    kind = table.choice("kind", kinds)
    match kind:
        case "lognormal":
            workload = _lognormal(table)
        case "trace":
            workload = _trace(table)
        case _:
            workload = _mixture(table)
    table.finish()
    return workload


def _lognormal(table: Table) -> Workload:
    mean_output_tokens = table.number("output_tokens", above=0, maximum=MAX_TOKENS)
    min_tokens = table.number("min_tokens", minimum=1, maximum=MAX_TOKENS)
    max_tokens = table.number("max_tokens", above=min_tokens, maximum=MAX_TOKENS)
    mu = table.number("mu", minimum=-100, maximum=100)
    sigma = table.number("sigma", above=0, maximum=100)
    try:
        lengths = truncated_lognormal(
            mu=mu, sigma=sigma, min_tokens=min_tokens, max_tokens=max_tokens
        )
    except ValueError as error:
        raise table.error("mu", error) from None
    return Workload(lengths=lengths, mean_output_tokens=mean_output_tokens)


def _trace(table: Table) -> Workload:
    """The trace's lengths; with an unbounded cache, without the blocks seen before."""
    path = table.file("file")
    trace_format = cast("TraceFormat", table.choice("format", get_args(TraceFormat)))
    cache = table.choice("cache", CACHES, "none")
    if cache != "none" and trace_format == "azure":
        raise table.error("cache", f"{cache!r} needs block ids; an azure trace has none")
    requests = read_trace(path, trace_format)
    mean_output_tokens = fsum(request.output_tokens for request in requests) / len(requests)
    if mean_output_tokens == 0:
        raise table.error("file", f"no request of {path} has an output token")
    if cache == "none":
        lengths = of_sample(request.input_tokens for request in requests)
    else:
        lengths = of_sample(uncached_lengths(requests))
    return Workload(lengths=lengths, mean_output_tokens=mean_output_tokens)


def _mixture(table: Table) -> Workload:
    weighted = []
    for part in table.tables("parts"):
        weight = part.number("weight", above=0, maximum=MAX_WEIGHT)
        weighted.append((weight, _workload(part, KINDS[:2])))
    total = fsum(weight for weight, _ in weighted)
    return Workload(
        lengths=mixture([(weight, workload.lengths) for weight, workload in weighted]),
        mean_output_tokens=fsum(
            weight / total * workload.mean_output_tokens for weight, workload in weighted
        ),
    )
