"""Charts of a simulation: TTFT as the load grows, or as policies differ."""

from collections.abc import Callable, Mapping

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
