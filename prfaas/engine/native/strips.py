"""Loops over the elements of rows, LANES at a time; the last strip may be narrower."""

from collections.abc import Callable
from dataclasses import dataclass

from prfaas.engine.native.code import Code, Pointer, Value, Variable

LANES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Elements at, at + 1, ... of any array."""

    at: Value
    count: Value | None
    """So many of them are there; None: LANES."""

    def load(self, row: Pointer) -> Value:
        """Return the elements of a row; zeros past its end."""
        place = row + self.at
        return place.load(LANES) if self.count is None else place.load_some(self.count, LANES)

    def store(self, row: Pointer, value: Value) -> None:
        """Put the elements into a row; nothing past its end."""
        if self.count is None:
            (row + self.at).store(value)
        else:
            (row + self.at).store_some(value, self.count)


def each_strip(code: Code, start: Value | int, stop: Value, body: Callable[[Strip], None]) -> None:
    """Write `body` for all strips between start and stop: once for whole ones, once for the last."""
    first = code.whole(start) if isinstance(start, int) else start
    whole_end = stop - (stop - first) % LANES
    with code.loop(first, whole_end, LANES) as at:
        body(Strip(at=at, count=None))
    with code.when(whole_end < stop):
        body(Strip(at=whole_end, count=stop - whole_end))


def sum_of_squares(code: Code, size: Value, load: Callable[[Strip], Value]) -> Value:
    """Return the sum of the squares of what `load` returns of a row's strips, in fixed lanes."""
    total: Variable = code.variable(code.real(0.0, LANES))

    def add(strip: Strip) -> None:
        x = load(strip)
        total.set(code.fma(x, x, total.value))

    each_strip(code, 0, size, add)
    lanes, half = total.value, LANES // 2
    while half:
        low, high = range(half), range(half, 2 * half)
        lanes = code.shuffle(lanes, lanes, low) + code.shuffle(lanes, lanes, high)
        half //= 2
    return code.lane(lanes, 0)
