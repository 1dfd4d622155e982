"""Open-loop load: each request is sent when it is due, however many are still unanswered.

Times count from the moment a request was due, so that a generator that falls behind shows as latency
instead of hiding it; how late it was, and whether its loop or its processor was the limit, is measured
beside it.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from prfaas.clock import Clock

LAG_PERIOD_S = 0.02
"""Between two looks at how late the loop is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request to be sent."""

    due_s: float
    """Since the load began."""
    prompt_tokens: int
    body: Callable[[], bytes]
    """Made just before it is due: bodies may be large."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """What became of one request. Times are of one clock; None is what has not happened."""

    due_s: float
    prompt_tokens: int
    sent_s: float | None = None
    first_s: float | None = None
    """Its first token came."""
    last_s: float | None = None
    """Its latest token came."""
    ended_s: float | None = None
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Between its tokens, as they came."""
    is_done: bool = False
    """The whole answer is here."""
    error: str | None = None
    """What kind of failure ended it."""
    completion_tokens: int = 0
    route: str | None = None
    reason: str | None = None
    peer: str | None = None
    node: str | None = None
    tokens_reused: int = 0
    tokens_local: int = 0
    tokens_remote: int = 0
    bytes_received: int = 0
    """KVCache that came from a peer for it."""
    predicted_ttft_s: float | None = None

    def token(self, now_s: float) -> None:
        """A token came."""
        if self.last_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s


Ask = Callable[[bytes, Sample], Awaitable[None]]
"""Sends a body and fills in the sample; failures are in the sample and never raised."""


@dataclass(slots=True, kw_only=True)
class Load:
    """A load that has ended, or was ended."""

    began_s: float
    samples: list[Sample]
    """Of the requests that were due, in that order."""
    num_planned: int
    ended_s: float
    stopped_by: str | None
    """Why before all were answered; None if they were."""
    loop_lags_s: "array[float]"
    """How much later than asked for the loop woke up, every LAG_PERIOD_S."""
    cpu_s: float
    """Of this process."""


class OpenLoop:
    """Sends one load. `stop` may be called at any time, also from a signal handler of the loop.

    Args:
        ask: sends one request.
        clock: of all times.
        cpu_clock: CPU seconds of this process.
    """

    def __init__(self, ask: Ask, *, clock: Clock, cpu_clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._over = asyncio.Event()
        self._stopped_by: str | None = None
        self._is_all_sent = False
        self._in_flight: set[asyncio.Task[None]] = set()
        self._lags_s: array[float] = array("d")
        self._samples: list[Sample] = []

    @property
    def num_ended(self) -> int:
        """How many requests are answered or have failed."""
        return len(self._samples) - len(self._in_flight)

    def stop(self, why: str) -> None:
        """Send no more, and leave the requests that are in flight."""
        if self._stopped_by is None and not self._over.is_set():
            self._stopped_by = why
            self._over.set()

    async def run(
        self,
        planned: Iterable[Planned],
        *,
        num_planned: int,
        max_s: float,
        on_sent: Callable[[int], object] = lambda _: None,
    ) -> Load:
        """Return what became of the requests, which come in the order of their times.

        After `max_s` seconds the load ends by itself: what is in flight then is cut.
        """
        began_s, began_cpu_s = self._clock(), self._cpu_clock()
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(max_s, self.stop, f"the limit of {max_s:g} s")
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch_loop())
                await self._send_all(planned, began_s, tasks, on_sent)
                self._is_all_sent = True
                if self._in_flight:
                    await self._over.wait()
                for task in [*self._in_flight, watching]:
                    task.cancel()
        finally:
            deadline.cancel()
        return Load(
            began_s=began_s,
            samples=self._samples,
            num_planned=num_planned,
            ended_s=self._clock(),
            stopped_by=self._stopped_by,
            loop_lags_s=self._lags_s,
            cpu_s=self._cpu_clock() - began_cpu_s,
        )

    async def _send_all(
        self,
        planned: Iterable[Planned],
        began_s: float,
        tasks: asyncio.TaskGroup,
        on_sent: Callable[[int], object],
    ) -> None:
        for request in planned:
            body = request.body()
            due_s = began_s + request.due_s
            await self._wait_until(due_s)
            if self._over.is_set():
                return
            sample = Sample(due_s=due_s, prompt_tokens=request.prompt_tokens)
            self._samples.append(sample)
            task = tasks.create_task(self._one(body, sample))
            self._in_flight.add(task)
            task.add_done_callback(self._ended)
            on_sent(len(self._samples))

    async def _wait_until(self, due_s: float) -> None:
        """Return at that time or once the load is over; others get a turn in any case."""
        await asyncio.sleep(0)
        while (wait_s := due_s - self._clock()) > 0 and not self._over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._over.wait()

    async def _one(self, body: bytes, sample: Sample) -> None:
        sample.sent_s = self._clock()
        await self._ask(body, sample)
        sample.ended_s = self._clock()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if self._is_all_sent and not self._in_flight:
            self._over.set()

    async def _watch_loop(self) -> None:
        while True:
            asked_s = self._clock()
            await asyncio.sleep(LAG_PERIOD_S)
            self._lags_s.append(max(0.0, self._clock() - asked_s - LAG_PERIOD_S))
