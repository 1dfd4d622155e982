"""Curves go through their points and never fall."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.curves import CubicCurve, LinearCurve, PolynomialCurve, scaled

# T_prefill of PrfaaS Table 5.
TABLE_5 = {1024.0: 0.44, 8192.0: 0.72, 32768.0: 1.84, 131072.0: 7.40}


@st.composite
def points(draw, *, at_least=1):
    """Lengths that ascend and values that do not fall."""
    gaps = draw(st.lists(st.integers(1, 5000), min_size=at_least, max_size=8))
    rises = draw(st.lists(st.integers(0, 500), min_size=len(gaps), max_size=len(gaps)))
    tokens, values, x, y = [], [], 0, 1
    for gap, rise in zip(gaps, rises, strict=True):
        x, y = x + gap, y + rise
        tokens.append(float(x))
        values.append(y / 100)
    return {"tokens": tuple(tokens), "values": tuple(values)}


@pytest.mark.parametrize("curve", [CubicCurve, LinearCurve])
@given(given_points=points())
def test_a_curve_goes_through_its_points(curve, given_points):
    made = curve(**given_points)
    for length, value in zip(given_points["tokens"], given_points["values"], strict=True):
        assert made(length) == pytest.approx(value)


@pytest.mark.parametrize("curve", [CubicCurve, LinearCurve])
@given(given_points=points(), lengths=st.lists(st.floats(0.01, 60_000), min_size=2, max_size=50))
def test_a_curve_never_falls_and_a_cubic_is_above_zero(curve, given_points, lengths):
    made = curve(**given_points)
    values = [made(length) for length in sorted(lengths)]
    assert all(high >= low - 1e-9 for low, high in pairwise(values))
    assert min(values) > 0 or curve is LinearCurve
    assert min(values) >= 0


@given(given_points=points(at_least=2), where=st.floats(0, 1))
def test_a_cubic_stays_between_neighbouring_points(given_points, where):
    made = CubicCurve(**given_points)
    tokens, values = given_points["tokens"], given_points["values"]
    for i in range(len(tokens) - 1):
        value = made(tokens[i] + where * (tokens[i + 1] - tokens[i]))
        assert values[i] - 1e-9 <= value <= values[i + 1] + 1e-9


def test_a_cubic_follows_a_straight_line_exactly():
    line = CubicCurve(tokens=(10.0, 20.0, 50.0, 60.0), values=(2.0, 3.0, 6.0, 7.0))
    for length in (5.0, 13.0, 37.5, 55.0, 100.0):
        assert line(length) == pytest.approx(1 + length / 10)


def test_the_cubic_through_table_5_has_the_slopes_of_fritsch_and_carlson():
    curve = CubicCurve(tokens=tuple(TABLE_5), values=tuple(TABLE_5.values()))
    # Worked by hand: the weighted harmonic mean of the rises beside the second point.
    w0, w1 = 7168, 24576
    d0, d1 = 0.28 / w0, 1.12 / w1
    slope = 3 * (w0 + w1) / ((2 * w1 + w0) / d0 + (w1 + 2 * w0) / d1)
    step = 1e-3
    assert (curve(8192 + step) - curve(8192 - step)) / (2 * step) == pytest.approx(slope, rel=1e-5)


def test_a_polynomial_is_what_its_coefficients_say():
    h20 = PolynomialCurve(coefficients=(1.0, 6.72e-5, 1.066e-9))
    assert h20(0) == 1.0
    assert h20(10_000) == pytest.approx(1.0 + 0.672 + 0.1066)


@pytest.mark.parametrize(
    ("coefficients", "why"),
    [
        ((), "none below 0 and one above it"),
        ((0.0,), "none below 0 and one above it"),
        ((1.0, -1e-9), "none below 0 and one above it"),
        ((math.nan,), "none below 0 and one above it"),
    ],
)
def test_a_polynomial_that_could_fall_is_refused(coefficients, why):
    with pytest.raises(ValueError, match=why):
        PolynomialCurve(coefficients=coefficients)


@pytest.mark.parametrize(
    ("tokens", "values", "why"),
    [
        ((), (), "0 lengths and 0 values"),
        ((1.0,), (1.0, 2.0), "1 lengths and 2 values"),
        ((0.0, 1.0), (1.0, 2.0), "a length of 0 is not above 0"),
        ((-1.0,), (1.0,), "a length of -1 is not above 0"),
        ((math.nan,), (1.0,), "a length of nan is not above 0"),
        ((1.0, 1.0), (1.0, 2.0), "length 1 is not above the 1 before it"),
        ((1.0, 2.0), (0.0, 2.0), "a value of 0 is not above 0"),
        ((1.0, 2.0), (2.0, 1.0), "value 1 is below the 2 before it"),
        ((1.0, 2.0), (2.0, math.nan), "a value of nan is not above 0"),
    ],
)
@pytest.mark.parametrize("curve", [CubicCurve, LinearCurve])
def test_points_that_make_no_curve_are_refused(curve, tokens, values, why):
    with pytest.raises(ValueError, match=why):
        curve(tokens=tokens, values=values)


@pytest.mark.parametrize(
    "curve",
    [
        PolynomialCurve(coefficients=(1.0, 2.0, 3.0)),
        LinearCurve(tokens=(1.0, 5.0), values=(2.0, 3.0)),
        CubicCurve(tokens=(1.0, 5.0, 9.0), values=(2.0, 3.0, 7.0)),
    ],
)
def test_a_scaled_curve_is_that_many_times_as_high_everywhere(curve):
    made = scaled(curve, 2.5)
    assert type(made) is type(curve)
    for length in (0.5, 1.0, 3.0, 7.0, 100.0):
        assert made(length) == pytest.approx(2.5 * curve(length))


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_a_factor_that_makes_no_curve_is_refused(factor):
    with pytest.raises(ValueError, match="a curve times"):
        scaled(PolynomialCurve(coefficients=(1.0,)), factor)
