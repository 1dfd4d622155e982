"""A queue before several servers that each serve one job at a time, in the order of arrival."""

from collections import deque
from dataclasses import dataclass
from functools import partial

from prfaas.sim.events import Action, Event, Events


@dataclass(slots=True, eq=False)
class Job:
    """One job: waiting, in service, or gone."""

    service_s: float
    arrived_s: float
    on_done: Action
    on_start: Action | None = None
    on_lost: Action | None = None
    started_s: float | None = None
    """None until a server begins it."""
    end: Event | None = None
    is_gone: bool = False


class Station:
    """First come, first served, by the servers that there are now.

    arrivals = done + withdrawn + in service + waiting, always.
    """

    def __init__(self, events: Events, *, num_servers: int) -> None:
        self._events = events
        self._num_servers = num_servers
        self._waiting: deque[Job] = deque()
        self._serving: dict[Job, None] = {}
        self._num_waiting = 0
        self._busy_s = 0.0
        self._changed_s = events.now_s
        self._waiting_work_s = 0.0
        self._ends_s = 0.0
        self.num_arrivals = 0
        self.num_done = 0
        self.num_withdrawn = 0

    @property
    def now_s(self) -> float:
        """Return the virtual time."""
        return self._events.now_s

    @property
    def num_servers(self) -> int:
        """Return the servers that take jobs; ones that are to go may still be at one."""
        return self._num_servers

    @property
    def num_waiting(self) -> int:
        """Return the jobs that no server has begun."""
        return self._num_waiting

    @property
    def num_serving(self) -> int:
        """Return the jobs that are being served."""
        return len(self._serving)

    @property
    def waiting_work_s(self) -> float:
        """Return the seconds of service that the waiting jobs will take."""
        return self._waiting_work_s if self._num_waiting else 0.0

    @property
    def residual_work_s(self) -> float:
        """Return the seconds of service that the jobs in service still take, together."""
        return max(0.0, self._ends_s - len(self._serving) * self._events.now_s)

    @property
    def busy_s(self) -> float:
        """Return the seconds of service given so far, of all servers together."""
        return self._busy_s + len(self._serving) * (self._events.now_s - self._changed_s)

    def submit(
        self,
        service_s: float,
        on_done: Action,
        on_start: Action | None = None,
        on_lost: Action | None = None,
    ) -> Job:
        """Let a job in; `on_start` and `on_done` are called at those moments.

        `on_lost` is called if its server fails; the job counts as withdrawn.

        Raises:
            ValueError: a service time below 0 or that is none.
        """
        if not service_s >= 0:
            raise ValueError(f"a service of {service_s} s")
        job = Job(service_s, self._events.now_s, on_done, on_start, on_lost)
        self.num_arrivals += 1
        self._waiting_work_s += service_s
        if not self._waiting and len(self._serving) < self._num_servers:
            self._begin(job)
        else:
            self._waiting.append(job)
            self._num_waiting += 1
            self._fill()
        return job

    def withdraw(self, job: Job) -> bool:
        """Take a job out, waiting or in service; return whether it was still here."""
        if job.is_gone:
            return False
        if job.end is not None:
            self._events.cancel(job.end)
            self._leave(job)
        else:
            job.is_gone = True  # its place in the queue is skipped when it comes up
            self._num_waiting -= 1
            self._waiting_work_s -= job.service_s
        self.num_withdrawn += 1
        self._fill()
        return True

    def set_servers(self, num_servers: int) -> None:
        """Have so many servers from now on; one too many goes when its job is done.

        Raises:
            ValueError: a count below 0.
        """
        if num_servers < 0:
            raise ValueError(f"{num_servers} servers")
        self._num_servers = num_servers
        self._fill()

    def lose(self, num_servers: int) -> None:
        """Take servers away at once, busy ones first, the longest at work before the others."""
        self._num_servers = max(0, self._num_servers - num_servers)
        for job in list(self._serving)[:num_servers]:
            assert job.end is not None, "in service"
            self._events.cancel(job.end)
            self._leave(job)
            self.num_withdrawn += 1
            if job.on_lost is not None:
                job.on_lost()
        self._fill()

    def check(self) -> None:
        """Assert that no job was lost or made, and that no server is idle beside a queue."""
        here = self.num_waiting + self.num_serving
        assert self.num_arrivals == self.num_done + self.num_withdrawn + here
        waiting = [job for job in self._waiting if not job.is_gone]
        assert len(waiting) == self._num_waiting
        assert not self.num_waiting or self.num_serving >= self._num_servers
        work_s = sum(job.service_s for job in waiting)
        assert abs(work_s - self.waiting_work_s) <= 1e-6 * (1 + work_s)

    def _fill(self) -> None:
        while self._waiting and len(self._serving) < self._num_servers:
            job = self._waiting.popleft()
            if job.is_gone:
                continue
            self._num_waiting -= 1
            self._begin(job)

    def _begin(self, job: Job) -> None:
        self._waiting_work_s -= job.service_s
        self._count_busy()
        job.started_s = self._events.now_s
        self._serving[job] = None
        job.end = self._events.after(job.service_s, partial(self._end, job))
        self._ends_s += job.end.time_s
        if job.on_start is not None:
            job.on_start()

    def _end(self, job: Job) -> None:
        self._leave(job)
        self.num_done += 1
        self._fill()
        job.on_done()

    def _leave(self, job: Job) -> None:
        self._count_busy()
        del self._serving[job]
        job.is_gone = True
        assert job.end is not None, "in service"
        self._ends_s = self._ends_s - job.end.time_s if self._serving else 0.0

    def _count_busy(self) -> None:
        now_s = self._events.now_s
        self._busy_s += len(self._serving) * (now_s - self._changed_s)
        self._changed_s = now_s
