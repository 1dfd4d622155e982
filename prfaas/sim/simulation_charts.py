"""Charts of a simulation: TTFT as the load grows, or the TTFTs and the backlog of single runs."""

from collections.abc import Callable, Iterator, Mapping

from prfaas.sim.chart import Chart, Series
from prfaas.sim.run import Run
from prfaas.sim.simulation import Simulated


def load_charts(found: Mapping[str, Simulated]) -> tuple[Chart, ...]:
    """Return mean and P90 TTFT of each deployment over the rate."""
    return (
        _chart("Mean TTFT", found, lambda run: run.ttft_mean_s),
        _chart("P90 TTFT", found, lambda run: run.ttft_p90_s),
    )


def _chart(title: str, found: Mapping[str, Simulated], figure: Callable[[Run], float]) -> Chart:
    series = tuple(
        Series(
            name=name,
            points=tuple((load.rate_rps, figure(load.run)) for load in simulated.loads),
        )
        for name, simulated in found.items()
    )
    below = [y for line in series for _, y in line.points[:-1]] or [
        y for line in series for _, y in line.points
    ]
    return Chart(
        title=title,
        x_label="requests per second",
        y_label="seconds",
        series=series,
        y_max=1.1 * max(below),  # at the capacity itself the queue is as long as the run
    )


def run_charts(found: Mapping[str, Simulated]) -> tuple[Chart, ...]:
    """Return what share of requests had its first token by when, and the backlog over time.

    One line for each deployment, and one for each policy that it was run under.
    """
    runs = dict(_runs(found))
    within = {
        name: tuple(
            (ttft_s, i / len(run.ttft_curve_s)) for i, ttft_s in enumerate(run.ttft_curve_s)
        )
        for name, run in runs.items()
    }
    backlogs = {name: run.backlog_curve for name, run in runs.items()}
    return (
        Chart(
            title="TTFT",
            x_label="seconds",
            y_label="share of requests within them",
            series=tuple(Series(name=name, points=points) for name, points in within.items()),
            y_max=1.0,
        ),
        Chart(
            title="Requests in the system",
            x_label="seconds since the start",
            y_label="requests",
            series=tuple(Series(name=name, points=points) for name, points in backlogs.items()),
            y_max=1.1 * max(y for points in backlogs.values() for _, y in points),
        ),
    )


def _runs(found: Mapping[str, Simulated]) -> Iterator[tuple[str, Run]]:
    for name, simulated in found.items():
        for load in (*simulated.loads, *simulated.policies):
            yield f"{name} {load.run.policy}", load.run
