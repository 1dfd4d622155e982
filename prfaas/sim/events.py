"""A virtual clock and what is to happen on it."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf, isfinite

Action = Callable[[], object]
"""What it returns is of no interest."""


class Event:
    """Something to happen at a time, until it has or is cancelled."""

    __slots__ = ("action", "time_s")

    def __init__(self, time_s: float, action: Action | None) -> None:
        self.time_s = time_s
        self.action = action
        """None once it has happened or was cancelled."""

    @property
    def is_pending(self) -> bool:
        """Return whether it is still to happen."""
        return self.action is not None


class Events:
    """Runs actions in the order of (time, priority, time of scheduling): always the same order.

    Time never goes back. An action may schedule and cancel others, at its own moment too.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        """The virtual time; only `run` sets it."""
        self._heap: list[tuple[float, int, int, Event]] = []
        self._sequence = count().__next__
        self._num_cancelled = 0
        self.num_run = 0
        """Actions run so far."""

    @property
    def num_pending(self) -> int:
        """Return how many events are still to happen."""
        return len(self._heap) - self._num_cancelled

    def at(self, time_s: float, action: Action, *, priority: int = 0) -> Event:
        """Schedule an action; of one moment, the least priority comes first.

        Raises:
            ValueError: a time that has passed, or that is none.
        """
        if not self.now_s <= time_s < inf:
            raise ValueError(f"an event at {time_s} s, at {self.now_s} s")
        event = Event(time_s, action)
        heappush(self._heap, (time_s, priority, self._sequence(), event))
        return event

    def after(self, delay_s: float, action: Action, *, priority: int = 0) -> Event:
        """Schedule an action some seconds from now; raises ValueError as `at`."""
        time_s = self.now_s + delay_s
        if not self.now_s <= time_s < inf:
            raise ValueError(f"an event at {time_s} s, at {self.now_s} s")
        event = Event(time_s, action)
        heappush(self._heap, (time_s, priority, self._sequence(), event))
        return event

    def cancel(self, event: Event) -> None:
        """Let an event not happen; one that has, or was cancelled, is left alone."""
        if event.action is not None:
            event.action = None
            self._num_cancelled += 1

    def run(self, *, until_s: float = inf, max_actions: int | None = None) -> None:
        """Run until nothing is left, the next event is later than `until_s`, or enough was run.

        With `until_s`, the time is then `until_s`, unless `max_actions` ended it before.
        """
        heap = self._heap
        last = inf if max_actions is None else self.num_run + max_actions
        while heap and heap[0][0] <= until_s:
            if self.num_run >= last:
                return
            time_s, _, _, event = heappop(heap)
            action = event.action
            if action is None:
                self._num_cancelled -= 1
                continue
            event.action = None
            self.now_s = time_s
            self.num_run += 1
            action()
        if isfinite(until_s):
            self.now_s = max(self.now_s, until_s)

    def check(self) -> None:
        """Re-derive the counters, and assert that nothing is scheduled in the past."""
        pending = [entry for entry in self._heap if entry[3].is_pending]
        assert len(pending) == self.num_pending, f"{len(pending)} pending, {self.num_pending} said"
        assert all(entry[0] >= self.now_s for entry in pending)
