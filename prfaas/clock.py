"""The one module that reads the real clock; everything else takes a clock as an argument."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds from an arbitrary start; never goes back."""


def monotonic_s() -> float:
    """Return seconds of the monotonic clock: for durations and deadlines."""
    return time.monotonic()


def wall_s() -> float:
    """Return seconds since the Unix epoch: for `created` fields that a client reads."""
    return time.time()
