"""A server that all its jobs share alike: a link's flows, or the sequences of a decode batch.

Every job progresses at the same rate, which depends on how many there are: bytes per second of each
flow, or tokens per second of each sequence. So the jobs' amounts left keep their order, one common
odometer counts what each job has got since the beginning, and only the next job to end needs an event.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

from prfaas.sim.events import Action, Event, Events

RateEach = Callable[[int], float]
"""How many jobs -> amount per second that each of them gets."""


@dataclass(slots=True, eq=False)
class Share:
    """One job: waiting, in progress, or gone."""

    amount: float
    on_done: Action
    end_at: float | None = None
    """On the odometer; None while it waits, and when it is gone."""
    is_gone: bool = False


class SharedServer:
    """Jobs in progress up to a limit, the others wait in the order of arrival.

    arrivals = done + withdrawn + in progress + waiting, always.
    """

    def __init__(self, events: Events, *, rate_each: RateEach, max_jobs: int | None = None) -> None:
        self._events = events
        self._rate_each = rate_each
        self._max_jobs = max_jobs
        self._odometer = 0.0
        self._read_s = events.now_s
        self._rate = 0.0
        self._ends: list[tuple[float, int, Share]] = []
        self._waiting: deque[Share] = deque()
        self._sequence = count().__next__
        self._next: Event | None = None
        self._on_end = self._end
        self._num_active = 0
        self._num_waiting = 0
        self.num_arrivals = 0
        self.num_done = 0
        self.num_withdrawn = 0

    @property
    def num_active(self) -> int:
        """Return the jobs in progress."""
        return self._num_active

    @property
    def num_waiting(self) -> int:
        """Return the jobs that have no place yet."""
        return self._num_waiting

    def submit(self, amount: float, on_done: Action) -> Share:
        """Let a job in; `on_done` is called when it has got its amount.

        Raises:
            ValueError: an amount below 0 or that is none.
        """
        if not 0 <= amount < inf:
            raise ValueError(f"an amount of {amount}")
        share = Share(amount, on_done)
        self.num_arrivals += 1
        now_s = self._events.now_s
        self._odometer += self._rate * (now_s - self._read_s)
        self._read_s = now_s
        if self._waiting or self._num_active == self._max_jobs:
            self._num_waiting += 1
            self._waiting.append(share)
            self._fill()
        else:
            self._take(share)
        self._settle()
        return share

    def withdraw(self, share: Share) -> bool:
        """Take a job out; return whether it was still here."""
        if share.is_gone:
            return False
        self._read()
        share.is_gone = True
        self.num_withdrawn += 1
        if share.end_at is None:
            self._num_waiting -= 1
        else:
            self._num_active -= 1
        self._fill()
        self._settle()
        return True

    def set_rate(self, rate_each: RateEach) -> None:
        """Go on at another rate from now on; 0 stands still."""
        self._read()
        self._rate_each = rate_each
        self._settle()

    def amount_left(self, share: Share) -> float:
        """Return what a job has still to get; 0 once it is gone."""
        if share.is_gone:
            return 0.0
        if share.end_at is None:
            return share.amount
        got = self._odometer + self._rate * (self._events.now_s - self._read_s)
        return max(0.0, share.end_at - got)

    def check(self) -> None:
        """Assert that no job was lost or made, and that no place is empty beside a queue."""
        here = self._num_active + self._num_waiting
        assert self.num_arrivals == self.num_done + self.num_withdrawn + here
        active = [share for _, _, share in self._ends if not share.is_gone]
        assert len(active) == self._num_active
        assert sum(not share.is_gone for share in self._waiting) == self._num_waiting
        if self._max_jobs is not None:
            assert self._num_active <= self._max_jobs
            assert not self._num_waiting or self._num_active == self._max_jobs
        else:
            assert not self._num_waiting

    def _read(self) -> None:
        """Bring the odometer to now."""
        now_s = self._events.now_s
        self._odometer += self._rate * (now_s - self._read_s)
        self._read_s = now_s

    def _take(self, share: Share) -> None:
        """Give a place."""
        self._num_active += 1
        share.end_at = end_at = self._odometer + share.amount
        heappush(self._ends, (end_at, self._sequence(), share))

    def _fill(self) -> None:
        """Give places to who waits."""
        while self._waiting and self._num_active != self._max_jobs:
            share = self._waiting.popleft()
            if not share.is_gone:
                self._num_waiting -= 1
                self._take(share)

    def _settle(self) -> None:
        """Find out anew who ends next."""
        ends = self._ends
        while ends and ends[0][2].is_gone:
            heappop(ends)
        if self._next is not None:
            self._events.cancel(self._next)
            self._next = None
        if not self._num_active:
            self._rate = self._odometer = 0.0  # nobody is measured by it: keep its digits
            return
        self._rate = rate = self._rate_each(self._num_active)
        if rate > 0:
            left = ends[0][0] - self._odometer
            self._next = self._events.after(left / rate if left > 0 else 0.0, self._on_end)

    def _end(self) -> None:
        """The job at the head has got its amount, and so have those that ask for no more."""
        self._next = None
        now_s = self._events.now_s
        self._odometer += self._rate * (now_s - self._read_s)
        self._read_s = now_s
        ends = self._ends
        if self._odometer < ends[0][0]:
            self._odometer = ends[0][0]  # rounding must not leave a rest
        ended = []
        while ends and ends[0][0] <= self._odometer:
            _, _, share = heappop(ends)
            if not share.is_gone:
                share.is_gone = True
                ended.append(share)
        self._num_active -= len(ended)
        self.num_done += len(ended)
        if self._waiting:
            self._fill()
        self._settle()
        for share in ended:
            share.on_done()
