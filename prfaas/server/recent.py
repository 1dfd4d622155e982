"""What the last requests were like: quantiles and a balance that a person can read without a query."""

import threading
from collections import deque
from math import ceil

from prfaas.clock import Clock

NUM_RECENT = 1024
HALF_LIFE_S = 60.0


class RecentTimes:
    """Quantiles over the last NUM_RECENT times. Any thread."""

    def __init__(self, num_kept: int = NUM_RECENT) -> None:
        self._times_s: deque[float] = deque(maxlen=num_kept)
        self._lock = threading.Lock()

    def add(self, time_s: float) -> None:
        """Take note of one time."""
        with self._lock:
            self._times_s.append(time_s)

    def quantiles(self, *fractions: float) -> tuple[float, ...] | None:
        """Return the smallest times that no less than each fraction of all are up to; None without any."""
        with self._lock:
            times_s = sorted(self._times_s)
        if not times_s:
            return None
        return tuple(times_s[max(0, ceil(each * len(times_s)) - 1)] for each in fractions)


class Balance:
    """Prompts that were prefilled for each answer that ended, of late: the producers to the consumers.

    1 is balance; above it decoding falls behind, below it prefill does. Any thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._produced = self._consumed = 0.0
        self._at_s = clock()

    def produced(self) -> None:
        """Take note that a prompt is prefilled."""
        with self._lock:
            self._fade()
            self._produced += 1

    def consumed(self) -> None:
        """Take note that an answer that had begun has ended."""
        with self._lock:
            self._fade()
            self._consumed += 1

    @property
    def ratio(self) -> float | None:
        """Return produced over consumed, both half forgotten after HALF_LIFE_S; None while none ended."""
        with self._lock:
            return self._produced / self._consumed if self._consumed > 0 else None

    def _fade(self) -> None:
        now_s = self._clock()
        weight = 0.5 ** (max(0.0, now_s - self._at_s) / HALF_LIFE_S)
        self._at_s = now_s
        self._produced *= weight
        self._consumed *= weight
