"""`prfaas simulate`: what deployments would carry, found by running them on a virtual clock."""

import json
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prfaas.scheduler.policies import POLICIES

if TYPE_CHECKING:
    from prfaas.config.traces import TraceRequest

MAX_REQUESTS = 100_000_000
MAX_RECORDED = 1_000_000


@click.command(short_help="Simulate deployments of a plan, request by request.")
@click.argument("config_path", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option(
    "--trace",
    "trace_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Requests of a trace (.jsonl Mooncake, .csv Azure) instead of the workload's.",
)
@click.option(
    "--rate-factor",
    type=click.FloatRange(min=0, min_open=True, max=1e9),
    default=1.0,
    show_default=True,
    help="Let the trace come so many times as fast.",
)
@click.option(
    "--rate",
    "rate_rps",
    metavar="RPS",
    type=click.FloatRange(min=0, min_open=True, max=1e9),
    help="Simulate at this rate instead of searching the capacity.",
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice(POLICIES),
    multiple=True,
    help="Compare policies; may be given several times.",
)
@click.option("--seed", type=click.IntRange(0, 2**63), default=0, show_default=True)
@click.option(
    "--requests",
    "num_requests",
    metavar="N",
    type=click.IntRange(1, MAX_REQUESTS),
    default=20_000,
    show_default=True,
    help="Of a run; of a trace, the first ones.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot",
    "plot_path",
    metavar="FILE.svg|png",
    type=click.Path(path_type=Path),
    help="Draw TTFT over the rate, or of one run how TTFT and backlog were; PNG needs `plot`.",
)
@click.option(
    "--chrome-trace",
    "trace_events_path",
    metavar="FILE.json",
    type=click.Path(path_type=Path),
    help="Write what happened, for Perfetto; needs --rate or --trace.",
)
@click.option(
    "--chrome-trace-requests",
    "num_recorded",
    metavar="N",
    type=click.IntRange(1, MAX_RECORDED),
    default=1_000,
    show_default=True,
    help="Of each run, the first ones are in it.",
)
def simulate(
    config_path: Path,
    trace_path: Path | None,
    rate_factor: float,
    rate_rps: float | None,
    policies: tuple[str, ...],
    seed: int,
    num_requests: int,
    plot_path: Path | None,
    trace_events_path: Path | None,
    num_recorded: int,
    *,
    as_json: bool,
) -> None:
    """Simulate every deployment of CONFIG, a file as for `prfaas plan`.

    Without --rate and --trace, search the highest rate that each keeps up with, and show it at several
    loads. The same seed prints the same.
    """
    from prfaas.cli.progress import shown_progress
    from prfaas.cli.simulate_lines import simulation_lines
    from prfaas.config.plan_file import read_plan_file
    from prfaas.errors import ConfigError
    from prfaas.scheduler.policies import as_policy
    from prfaas.sim.chart_file import write_charts
    from prfaas.sim.chrome_trace import write_trace
    from prfaas.sim.simulation import Simulation
    from prfaas.sim.simulation_charts import load_charts, run_charts
    from prfaas.sim.simulation_report import report

    has_runs = trace_path is not None or rate_rps is not None
    _check_options(trace_path, rate_factor, rate_rps, plot_path)
    _check_trace_events(trace_events_path, has_runs=has_runs)
    file = read_plan_file(config_path)
    trace = None if trace_path is None else _trace(trace_path)[:num_requests]
    chosen = [as_policy(name) for name in dict.fromkeys(policies)]
    if chosen and all(plan.kind != "prfaas" for plan in file.plans.values()):
        raise ConfigError(f"--policy: {config_path} has no deployment of the kind prfaas")
    with shown_progress() as progress:
        simulation = Simulation(
            file,
            policies=chosen,
            num_requests=num_requests,
            seed=seed,
            progress=progress,
            num_recorded=0 if trace_events_path is None else num_recorded,
        )
        if trace is not None:
            found = simulation.of_trace(trace, rate_factor)
        elif rate_rps is not None:
            found = simulation.at_rate(rate_rps)
        else:
            found = simulation.capacities()
    if plot_path is not None:
        write_charts(run_charts(found) if has_runs else load_charts(found), plot_path)
    if trace_events_path is not None:
        write_trace(simulation.recorders, trace_events_path)
    num_simulated = num_requests if trace is None else len(trace)
    facts = report(file, found, seed=seed, num_requests=num_simulated)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for line in simulation_lines(facts):
        click.echo(line)
    if plot_path is not None:
        click.echo(f"drawn in {plot_path}")
    if trace_events_path is not None:
        click.echo(f"open {trace_events_path} in https://ui.perfetto.dev")


def _check_trace_events(path: Path | None, *, has_runs: bool) -> None:
    """Raise ConfigError where there would be no run to record, or no place for the file."""
    from prfaas.errors import ConfigError

    if path is None:
        return
    if not has_runs:
        raise ConfigError("--chrome-trace: records single runs; add --rate or --trace")
    if not path.parent.is_dir():
        raise ConfigError(f"--chrome-trace {path}: there is no directory {path.parent}")


def _check_options(
    trace_path: Path | None, rate_factor: float, rate_rps: float | None, plot_path: Path | None
) -> None:
    """Raise ConfigError for options that do not go together, before any work is done."""
    from prfaas.errors import ConfigError
    from prfaas.sim.chart_file import check_chart_path

    for option, value in (("--rate", rate_rps), ("--rate-factor", rate_factor)):
        if value is not None and isnan(value):
            raise ConfigError(f"{option}: {value} is no number")
    if trace_path is not None and rate_rps is not None:
        raise ConfigError("--rate: a trace has its own times; use --rate-factor")
    if trace_path is None and rate_factor != 1:
        raise ConfigError("--rate-factor: only a trace has a rate to change; use --rate")
    if plot_path is not None:
        check_chart_path(plot_path)


def _trace(path: Path) -> "tuple[TraceRequest, ...]":
    from prfaas.config.traces import read_trace

    return read_trace(path, "azure" if path.suffix == ".csv" else "mooncake")
