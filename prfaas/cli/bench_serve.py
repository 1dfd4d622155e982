"""`prfaas bench serve`: how a running server answers a workload or a trace."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prfaas.cli.progress import shown_progress
from prfaas.cli.ranges import FiniteRange

if TYPE_CHECKING:
    from prfaas.config.traces import TraceRequest

MAX_REQUESTS = 10_000_000
OPEN_FILES = 1 << 16
"""As many as the system lets us have, up to this: each request in flight has a connection."""


@click.command(short_help="Load a running server as a workload or a trace does.")
@click.argument("url")
@click.option(
    "--workload",
    "workload_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Lengths of a workload (configs/workloads), Poisson arrivals; needs --rate.",
)
@click.option(
    "--trace",
    "trace_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Requests of a trace (.jsonl Mooncake, .csv Azure) at its own times.",
)
@click.option(
    "--rate",
    "rate_rps",
    metavar="RPS",
    type=FiniteRange(min=0, min_open=True, max=1e6),
    help="Requests per second on average; of a trace, its times are stretched to that.",
)
@click.option(
    "--requests",
    "num_requests",
    metavar="N",
    type=click.IntRange(1, MAX_REQUESTS),
    default=1000,
    show_default=True,
    help="Of a trace, the first ones.",
)
@click.option(
    "--max-seconds",
    type=FiniteRange(min=0, min_open=True, max=1e6),
    default=600.0,
    show_default=True,
    help="Then it ends, whatever is unanswered.",
)
@click.option(
    "--ttft-slo",
    "ttft_slo_s",
    metavar="SECONDS",
    type=FiniteRange(min=0, min_open=True, max=1e6),
    default=10.0,
    show_default=True,
    help="A first token within it counts as goodput.",
)
@click.option("--seed", type=click.IntRange(0, 2**63), default=0, show_default=True)
@click.option(
    "--same-prompts",
    is_flag=True,
    help="The same prompts for the same seed in every run: what an earlier run left in caches counts.",
)
@click.option("--model", metavar="NAME", help="What the server calls it. Default: its first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def serve(
    url: str,
    workload_path: Path | None,
    trace_path: Path | None,
    rate_rps: float | None,
    num_requests: int,
    max_seconds: float,
    ttft_slo_s: float,
    seed: int,
    model: str | None,
    *,
    same_prompts: bool,
    as_json: bool,
) -> None:
    """Load the server at URL, a pd node or a scheduler, and say how it answered.

    Open loop: each request is sent when it is due, whatever is unanswered. Prompts are made-up token
    ids to /v1/completions, answers are streamed and as long as the workload says. The arrivals and lengths of a
    seed are those that `prfaas simulate` has. PRFAAS_API_KEY is sent if it is set. Ctrl-C
    ends it with a report of what was answered.
    """
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} is no http:// or https:// address", param_hint="URL")
    requests = _requests(workload_path, trace_path, rate_rps, num_requests, seed)
    import asyncio  # slow to import, as is aiohttp behind the next

    import uvloop

    from prfaas.bench.load_client import load_server
    from prfaas.bench.load_prompts import LoadPrompts, planned_requests
    from prfaas.bench.load_report import to_json, to_lines
    from prfaas.cli.conversation import served_model
    from prfaas.errors import PrfaasError

    model = served_model(url, model)
    key = f"{seed}" if same_prompts else f"{seed} {os.urandom(16).hex()}"
    _allow_open_files()
    with (
        shown_progress(is_quiet=as_json) as progress,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        load = runner.run(
            load_server(
                url,
                planned_requests(requests, LoadPrompts(key), model),
                max_s=max_seconds,
                api_key=os.environ.get("PRFAAS_API_KEY"),
                on_sent=lambda num_sent: progress("requests sent", num_sent, len(requests)),
            )
        )
    source = {"url": url, "model": model, "seed": seed, "rate_rps": _rate_of(requests)}
    report: dict[str, Any] = source | to_json(load, ttft_slo_s=ttft_slo_s)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        for line in to_lines(report):
            click.echo(line)
    if not report["requests"]["done"]:
        raise PrfaasError(f"{url} answered no request")


def _requests(
    workload_path: Path | None,
    trace_path: Path | None,
    rate_rps: float | None,
    num_requests: int,
    seed: int,
) -> "list[TraceRequest]":
    """Return what is to be asked, by arrival. ConfigError for options that do not go together."""
    from prfaas.config.traces import read_trace
    from prfaas.config.workloads import read_workload
    from prfaas.errors import ConfigError
    from prfaas.sim.arrivals import scaled
    from prfaas.sim.capacity import unit_requests

    if workload_path is not None and trace_path is None:
        if rate_rps is None:
            raise ConfigError("--workload: has no times of its own; add --rate")
        workload = read_workload(workload_path)
        unit = unit_requests(workload, num_requests=num_requests, seed=seed)
        return list(scaled(unit, rate_factor=rate_rps))
    if trace_path is None or workload_path is not None:
        raise ConfigError("give one of --workload and --trace")
    trace = read_trace(trace_path, "azure" if trace_path.suffix == ".csv" else "mooncake")
    requests = list(trace[:num_requests])
    if rate_rps is None:
        return requests
    own_rps = _rate_of(requests)
    if own_rps is None:
        raise ConfigError(f"--rate: all of the first {len(requests)} requests come at once")
    return list(scaled(requests, rate_factor=rate_rps / own_rps))


def _rate_of(requests: "list[TraceRequest]") -> float | None:
    """Return the requests per second until the last one arrives; None if all come at once."""
    last_s = requests[-1].arrival_s
    return len(requests) / last_s if last_s > 0 else None


def _allow_open_files() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
