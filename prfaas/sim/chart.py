"""Line charts as SVG text, side by side, from nothing but the numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 92
COLOURS = ("#0b6e99", "#c2571a", "#4c8c2b", "#222222")
DASHES = ("", "6 3", "2 3", "")
MORE_DASHES = ("2 3", "", "6 3", "8 3 2 3", "8 3 2 3", "8 3 2 3", "", "6 3")
"""Of the lines after the first ones, none of them on a colour that has it."""
LEGEND_ROWS, ROW = 2, 18
"""Lines of names that HEIGHT has room for, two names each, and what one more takes."""
MIN_SPREAD = 1e-9
"""Of their size, by which x have to differ to be drawn apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: points (x, y); a y that is not finite leaves a gap."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over one pair of axes, and a marked x."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    marked_x: float | None = None
    mark_label: str = ""
    y_max: float
    """What is above is cut off."""


def svg(charts: Sequence[Chart]) -> str:
    """Return one SVG document with the charts in a row."""
    rows = max((len(chart.series) + 1) // 2 for chart in charts)
    height = HEIGHT + ROW * max(0, rows - LEGEND_ROWS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * len(charts)}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, chart in enumerate(charts):
        parts.append(f'<g transform="translate({WIDTH * index} 0)">')
        parts += _chart(chart)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """Return 3 to 9 round numbers from `low` to `high`, evenly apart."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 8)
    return [
        step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def x_range(chart: Chart) -> tuple[float, float]:
    """Return the least and the greatest x of any line; apart even if there is but one, or as good as one."""
    xs = [x for line in chart.series for x, _ in line.points]
    low, high = min(xs), max(xs)
    return (low, high) if high - low > MIN_SPREAD * max(1.0, abs(high)) else (low - 0.5, high + 0.5)


def _chart(chart: Chart) -> Iterator[str]:
    low, high = x_range(chart)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def x_at(x: float) -> float:
        return LEFT + (x - low) / (high - low) * (right - LEFT)

    def y_at(y: float) -> float:
        return bottom - y / chart.y_max * (bottom - TOP)

    yield _text(WIDTH / 2, 22, chart.title, "middle", "font-weight='bold'")
    for x in ticks(low, high):
        yield _line(x_at(x), bottom, x_at(x), bottom + 4, "#222222")
        yield _text(x_at(x), bottom + 17, f"{x:,.6g}" if x < 1000 else f"{x:,.0f}", "middle")
    for y in ticks(0, chart.y_max):
        yield _line(LEFT, y_at(y), right, y_at(y), "#dddddd")
        yield _text(LEFT - 6, y_at(y) + 4, f"{y:g}", "end")
    yield _line(LEFT, bottom, right, bottom, "#222222")
    yield _line(LEFT, TOP, LEFT, bottom, "#222222")
    yield _text((LEFT + right) / 2, bottom + 34, chart.x_label, "middle")
    middle = (TOP + bottom) / 2
    yield _text(16, middle, chart.y_label, "middle", f"transform='rotate(-90 16 {middle:g})'")
    if chart.marked_x is not None:
        yield _line(x_at(chart.marked_x), TOP, x_at(chart.marked_x), bottom, "#888888", "4 4")
        is_left = x_at(chart.marked_x) < WIDTH / 2
        anchor, offset = ("start", 5) if is_left else ("end", -5)
        yield _text(x_at(chart.marked_x) + offset, TOP + 12, chart.mark_label, anchor)
    dashes = DASHES + MORE_DASHES
    for index, line in enumerate(chart.series):
        colour = COLOURS[index % len(COLOURS)]
        dash = dashes[index % len(dashes)]
        for run in _runs(line, chart.y_max):
            points = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in run)
            yield (
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"'
                f' stroke-dasharray="{dash}"/>'
            )
        x, y = LEFT + 240 * (index % 2), bottom + 56 + ROW * (index // 2)
        yield _line(x, y - 4, x + 22, y - 4, colour, dash)
        yield _text(x + 28, y, line.name, "start")


def _runs(line: Series, y_max: float) -> Iterator[list[tuple[float, float]]]:
    """The stretches of a line that can be seen, cut where it leaves through the top."""
    run: list[tuple[float, float]] = []
    last: tuple[float, float] | None = None
    for x, y in line.points:
        is_seen = math.isfinite(y) and y <= y_max
        if last is not None and math.isfinite(y) and is_seen != bool(run):
            x0, y0 = last
            cut = (x0 + (y_max - y0) / (y - y0) * (x - x0), y_max)
            run.append(cut)
        if is_seen:
            run.append((x, y))
        elif run:
            yield run
            run = []
        last = (x, y) if math.isfinite(y) else None
    if run:
        yield run


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
        f' stroke-dasharray="{dash}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    words = escape(text)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{words}</text>'
