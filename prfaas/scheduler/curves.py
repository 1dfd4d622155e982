"""Functions of a length in tokens that a profile holds: seconds of a prefill, bytes of a KVCache."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PolynomialCurve:
    """c0 + c1 x + c2 x^2 + ..., from coefficients that are not negative, so that it never falls."""

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for a curve that could fall, or that is zero everywhere."""
        if not all(value >= 0 for value in self.coefficients) or not sum(self.coefficients) > 0:
            raise ValueError(f"coefficients {self.coefficients}: none below 0 and one above it")

    def __call__(self, tokens: float) -> float:
        """Return the value at a length."""
        total = 0.0
        for coefficient in reversed(self.coefficients):
            total = total * tokens + coefficient
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCurve:
    """Straight lines through the points; the outer ones go on, below the first not under zero."""

    tokens: tuple[float, ...]
    values: tuple[float, ...]
    _slopes: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError for points that make no curve."""
        check_points(self.tokens, self.values)
        points = pairwise(zip(self.tokens, self.values, strict=True))
        slopes = tuple((y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in points)
        object.__setattr__(self, "_slopes", slopes)

    def __call__(self, tokens: float) -> float:
        """Return the value at a length."""
        if not self._slopes:
            return self.values[0]
        index = _piece(self.tokens, tokens)
        value = self.values[index] + self._slopes[index] * (tokens - self.tokens[index])
        return value if value > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CubicCurve:
    """A cubic through the points that never falls where they do not (Fritsch and Carlson, 1980).

    Beyond the last point it goes on straight. Below the first, too, but not under the line from
    the origin to that point: no length above zero takes no time.
    """

    tokens: tuple[float, ...]
    values: tuple[float, ...]
    _slopes: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError for points that make no curve."""
        check_points(self.tokens, self.values)
        object.__setattr__(self, "_slopes", _monotone_slopes(self.tokens, self.values))

    def __call__(self, tokens: float) -> float:
        """Return the value at a length."""
        first, last = self.tokens[0], self.tokens[-1]
        if tokens <= first:
            straight = self.values[0] + self._slopes[0] * (tokens - first)
            return max(straight, self.values[0] * tokens / first)
        if tokens >= last:
            return self.values[-1] + self._slopes[-1] * (tokens - last)
        index = _piece(self.tokens, tokens)
        width = self.tokens[index + 1] - self.tokens[index]
        s = (tokens - self.tokens[index]) / width
        return (
            (1 + 2 * s) * (1 - s) ** 2 * self.values[index]
            + s * (1 - s) ** 2 * width * self._slopes[index]
            + s * s * (3 - 2 * s) * self.values[index + 1]
            + s * s * (s - 1) * width * self._slopes[index + 1]
        )


Curve = PolynomialCurve | LinearCurve | CubicCurve


def scaled(curve: Curve, factor: float) -> Curve:
    """Return the curve with every value multiplied. Raises ValueError unless the factor is above 0."""
    if not 0 < factor < inf:
        raise ValueError(f"a curve times {factor}")
    if isinstance(curve, PolynomialCurve):
        return PolynomialCurve(coefficients=tuple(c * factor for c in curve.coefficients))
    return type(curve)(tokens=curve.tokens, values=tuple(value * factor for value in curve.values))


def check_points(tokens: Sequence[float], values: Sequence[float]) -> None:
    """Raise ValueError unless lengths above 0 increase and values above 0 do not fall."""
    if not tokens or len(tokens) != len(values):
        raise ValueError(f"{len(tokens)} lengths and {len(values)} values")
    for what, numbers in (("length", tokens), ("value", values)):
        for number in numbers:
            if not number > 0:
                raise ValueError(f"a {what} of {number:g} is not above 0")
    for low, high in pairwise(tokens):
        if not low < high:
            raise ValueError(f"length {high:g} is not above the {low:g} before it")
    for low, high in pairwise(values):
        if not low <= high:
            raise ValueError(f"value {high:g} is below the {low:g} before it")


def _piece(knots: Sequence[float], x: float) -> int:
    """Return the piece between two knots that `x` is in, or the outer one nearest to it."""
    return bisect_right(knots, x, 1, len(knots) - 1) - 1


def _monotone_slopes(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, ...]:
    """Return the slope at each point: weighted harmonic means inside, three-point ends."""
    if len(xs) == 1:
        return (0.0,)
    widths = [high - low for low, high in pairwise(xs)]
    rises = [(high - low) / width for (low, high), width in zip(pairwise(ys), widths, strict=True)]
    if len(xs) == 2:
        return (rises[0], rises[0])
    inner = []
    for (w0, w1), (d0, d1) in zip(pairwise(widths), pairwise(rises), strict=True):
        if d0 == 0 or d1 == 0:
            inner.append(0.0)
        else:
            inner.append((3 * w0 + 3 * w1) / ((2 * w1 + w0) / d0 + (w1 + 2 * w0) / d1))
    return (
        _end_slope(widths[0], widths[1], rises[0], rises[1]),
        *inner,
        _end_slope(widths[-1], widths[-2], rises[-1], rises[-2]),
    )


def _end_slope(width: float, next_width: float, rise: float, next_rise: float) -> float:
    """Return the three-point estimate at an end, between 0 and three times the first rise."""
    slope = ((2 * width + next_width) * rise - width * next_rise) / (width + next_width)
    return min(max(slope, 0.0), 3 * rise)
