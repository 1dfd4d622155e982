"""Decision tables of a knob: what is taken, and what is refused with which words."""

import math
from collections.abc import Iterator

from tests.config.plan_files import UNSET

NAN, INF = math.nan, math.inf
Case = tuple[str, object, str | None]
"""Key, value, what the error says; None: it is taken."""


def number(
    key: str,
    *,
    above: float | None = None,
    minimum: float | None = None,
    maximum: float,
    is_needed: bool = True,
) -> Iterator[Case]:
    """Yield the decisions about a number at its bounds, beyond them, and for what is none."""
    if above is not None:
        yield key, above, f"{above:g} must be above {above:g}"
        yield key, above - 1, f"must be above {above:g}"
    if minimum is not None:
        yield key, minimum, None
        yield key, minimum - 1, f"{minimum - 1:g} is below the minimum of {minimum:g}"
    yield key, maximum, None
    yield key, maximum * 2, f"is above the maximum of {maximum:.15g}"
    yield key, 1e300, f"1e+300 is above the maximum of {maximum:.15g}"
    yield key, -1e300, "-1e+300 "
    yield key, NAN, "expected a finite number, not nan"
    yield key, INF, "expected a finite number, not inf"
    yield key, -INF, "expected a finite number, not -inf"
    yield key, True, "expected a number, not true"
    yield key, "1", "expected a number, not '1'"
    yield key, UNSET, "is not set" if is_needed else None


def integer(key: str, *, minimum: int, maximum: int, is_needed: bool = True) -> Iterator[Case]:
    """Yield the decisions about a whole number."""
    yield key, minimum, None
    yield key, minimum - 1, f"{minimum - 1} is below the minimum of {minimum}"
    yield key, -(10**18), f"is below the minimum of {minimum}"
    yield key, maximum, None
    yield key, maximum + 1, f"{maximum + 1} is above the maximum of {maximum}"
    yield key, 10**18, f"is above the maximum of {maximum}"
    yield key, 1.5, "expected a whole number, not 1.5"
    yield key, NAN, "expected a whole number, not nan"
    yield key, False, "expected a whole number, not false"
    yield key, UNSET, "is not set" if is_needed else None
