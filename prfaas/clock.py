"""The one module that reads the real clock; everything else takes a clock as an argument."""

import time
from collections.abc import Callable
from pathlib import Path

Clock = Callable[[], float]
"""Seconds from an arbitrary start; never goes back."""


def monotonic_s() -> float:
    """Return seconds of the monotonic clock: for durations and deadlines."""
    return time.monotonic()


def thread_cpu_s(native_id: int) -> float:
    """Return the CPU seconds that a thread of this process has used; 0 where nobody counts them.

    Linux counts; a thread that has ended is not found, either.
    """
    try:
        nanoseconds, _, _ = Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0
    return int(nanoseconds) / 1e9


def wall_s() -> float:
    """Return seconds since the Unix epoch: for `created` fields that a client reads."""
    return time.time()
