"""When the bytes of a transfer came, and at what rate from some moment on. Pure."""

from bisect import bisect_right
from typing import NamedTuple

MAX_ARRIVALS = 512
"""So many are remembered: of more words every second, fourth ... one, evenly over all of them."""


class Arrival(NamedTuple):
    """Totals once a word had come."""

    at_s: float
    num_bytes: int
    """Of the transfer."""
    num_link_bytes: int
    """Of everything that shares its link."""


class Stretch(NamedTuple):
    """What came after the first of some arrivals, up to the last.

    What the first brought is left out: it may have waited for somebody to look.
    """

    num_words: int
    """The first one too; of very many, some."""
    num_bytes: int
    num_link_bytes: int
    seconds: float


class Arrivals:
    """The words of one transfer that brought bytes, in their order."""

    def __init__(self) -> None:
        self._kept: list[Arrival] = []
        self._last: Arrival | None = None
        self._num_words = 0
        self._keep_every = 1

    def __bool__(self) -> bool:
        """Return whether any has come."""
        return self._last is not None

    def add(self, arrival: Arrival) -> None:
        """Take note of the next word; times and totals never fall."""
        if self._num_words % self._keep_every == 0:
            self._kept.append(arrival)
            if len(self._kept) == MAX_ARRIVALS:
                del self._kept[1::2]
                self._keep_every *= 2
        self._num_words += 1
        self._last = arrival

    def behind(self, at_s: float) -> Stretch:
        """Return what came later than a moment; of -inf, everything."""
        first = bisect_right(self._kept, at_s, key=lambda arrival: arrival.at_s)
        end = self._last
        if end is None or end.at_s <= at_s:
            return Stretch(0, 0, 0, 0.0)
        behind = self._kept[first:]
        if not behind or behind[-1] is not end:
            behind.append(end)
        begin = behind[0]
        return Stretch(
            num_words=len(behind),
            num_bytes=end.num_bytes - begin.num_bytes,
            num_link_bytes=end.num_link_bytes - begin.num_link_bytes,
            seconds=end.at_s - begin.at_s,
        )
