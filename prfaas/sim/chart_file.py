"""Writes charts to a file: SVG by ourselves, PNG through matplotlib, an extra."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError
from prfaas.sim.chart import Chart, svg

SUFFIXES = (".svg", ".png")


def check_chart_path(path: Path) -> None:
    """Raise ConfigError for a file that no chart could be written to, before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the name ends in none of {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no directory {path.parent}")
    if path.suffix.lower() == ".png":
        _figure_class()


def write_charts(charts: Sequence[Chart], path: Path) -> None:
    """Write the charts side by side; the suffix of the name is the format.

    Raises:
        ConfigError: the file cannot be written, or a PNG without matplotlib.
    """
    check_chart_path(path)
    try:
        if path.suffix.lower() == ".svg":
            path.write_text(svg(charts), encoding="utf-8")
        else:
            _draw(charts).savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}") from error


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a PNG needs matplotlib: pip install 'prfaas[plot]'; FILE.svg needs nothing"
        ) from error
    return Figure


def _draw(charts: Sequence[Chart]) -> Any:
    figure = _figure_class()(figsize=(6 * len(charts), 4.2), layout="constrained")
    for chart, axes in zip(charts, figure.subplots(1, len(charts), squeeze=False)[0], strict=True):
        for line in chart.series:
            axes.plot(*zip(*line.points, strict=True), label=line.name)
        if chart.marked_x is not None:
            axes.axvline(chart.marked_x, color="0.5", linestyle=":", label=chart.mark_label)
        axes.set(
            title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label, ylim=(0, chart.y_max)
        )
        axes.legend(fontsize="small")
    return figure
