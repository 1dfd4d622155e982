"""Charts are SVG that a browser reads, with every line where its numbers say."""

import math
from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.sim.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Series, svg, ticks
from prfaas.sim.chart_file import check_chart_path, write_charts

SVG = "{http://www.w3.org/2000/svg}"


def chart(*lines: Iterable[tuple[float, float]], **changes: Any) -> Chart:
    fields: dict[str, Any] = {
        "title": "a <title> & more",
        "x_label": "x",
        "y_label": "y",
        "series": tuple(Series(name=f"s{i}", points=tuple(line)) for i, line in enumerate(lines)),
        "y_max": 10.0,
    }
    return Chart(**(fields | changes))


def drawn(made: Chart) -> list[list[Any]]:
    """Return the points of each polyline of one chart."""
    root = ElementTree.fromstring(svg([made]))
    return [
        [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        for line in root.iter(f"{SVG}polyline")
    ]


def test_a_line_is_where_its_numbers_say():
    (line,) = drawn(chart([(0, 0), (50, 5), (100, 10)]))
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    middle = ((LEFT + right) / 2, (TOP + bottom) / 2)
    assert line == [(LEFT, bottom), pytest.approx(middle, abs=0.1), (right, TOP)]


def test_what_is_above_the_top_or_infinite_is_cut_off():
    lines = drawn(chart([(0, 5), (10, 15), (20, 5), (30, math.inf), (40, 5), (50, 5)]))
    top = float(TOP)
    assert [len(line) for line in lines] == [2, 2, 2]
    assert lines[0][-1][1] == lines[1][0][1] == top
    step = (WIDTH - RIGHT - LEFT) / 50
    assert lines[0][-1][0] == pytest.approx(LEFT + 5 * step, abs=0.1)
    assert lines[1][0][0] == pytest.approx(LEFT + 15 * step, abs=0.1)


@example([(0.0, 1.0), (5e-324, 2.0)])
@example([(1e6 - 1e-10, 1.0), (1e6, 2.0)])
@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0, 30) | st.just(math.inf)), min_size=1, max_size=30
    )
)
def test_nothing_is_drawn_outside_the_axes(points):
    for line in drawn(chart(sorted(points, key=lambda point: point[0]))):
        for x, y in line:
            assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1
            assert TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1


def test_text_is_escaped_and_charts_stand_side_by_side():
    text = svg([chart([(0, 1)]), chart([(0, 1)], marked_x=0.0, mark_label="t < 5")])
    root = ElementTree.fromstring(text)
    assert root.attrib["width"] == str(2 * WIDTH)
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert words.count("a <title> & more") == 2
    assert "t < 5" in words


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_even_and_inside(low, width):
    high = low + width
    found = ticks(low, high)
    assert 2 <= len(found) <= 10
    assert all(low - width * 1e-6 <= tick <= high + width * 1e-6 for tick in found)


def test_the_suffix_names_the_format(tmp_path):
    write_charts([chart([(0, 1), (1, 2)])], tmp_path / "f.svg")
    ElementTree.parse(tmp_path / "f.svg")
    for name in ("f", "f.pdf", "f.svgz"):
        with pytest.raises(ConfigError, match=r"ends in none of \.svg, \.png"):
            check_chart_path(tmp_path / name)
    with pytest.raises(ConfigError, match="there is no directory"):
        check_chart_path(tmp_path / "no" / "f.svg")
    (tmp_path / "d.svg").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        write_charts([chart([(0, 1)])], tmp_path / "d.svg")


def test_a_png_needs_matplotlib_and_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'prfaas\[plot\]'"):
        write_charts([chart([(0, 1)])], tmp_path / "f.png")
    assert not (tmp_path / "f.png").exists()


def test_matplotlib_draws_the_same_charts(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    write_charts([chart([(0, 1), (1, math.inf)], marked_x=0.5)], tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_many_lines_look_unlike_each_other_and_their_names_have_room():
    lines = [[(0, index), (1, index + 1)] for index in range(12)]
    root = ElementTree.fromstring(svg([chart(*lines, y_max=20.0)]))
    looks = [
        (line.attrib["stroke"], line.attrib["stroke-dasharray"])
        for line in root.iter(f"{SVG}polyline")
    ]
    assert len(set(looks)) == 12
    names = {text.text: float(text.attrib["y"]) for text in root.iter(f"{SVG}text")}
    assert max(names[f"s{index}"] for index in range(12)) < float(root.attrib["height"])
