"""The one thread that steps the engine, and the loop's side of it.

Submissions and aborts go in through a thread-safe inbox that is emptied before each step; events
come out in one batch a step. A request's events wait in a buffer bounded by what it may draw
(choices times max_tokens), so that a consumer that falls behind delays nobody and costs a known
amount of memory; the engine never waits for a consumer.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from prfaas.clock import Clock, thread_cpu_s
from prfaas.engine.prefill_share import check_prefill_share
from prfaas.engine.submission import EngineEvent, EngineLoad, Submission
from prfaas.errors import EngineError, PrfaasError
from prfaas.log import get_logger
from prfaas.types import RequestEnded

EXTRA_EVENTS = 4
"""Events a request may have besides its tokens: logits and the end, with slack."""
STOP_TIMEOUT_S = 60.0
MAX_STEP_S = 60.0
"""A step that does nothing for this long means that the engine hangs."""
HEARTBEAT_CPU_S = 0.05
"""CPU time of the engine's thread that counts as a sign of life."""


class StepEngine(Protocol):
    """What the thread needs of `engine.runner.Runner`; every method runs on the engine thread."""

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        ...

    @property
    def num_layers_run(self) -> int:
        """Layers run since the start, of all steps; read from another thread as a heartbeat."""
        ...

    def stop_choice(self, request_id: str, choice_index: int) -> None:
        """End one choice without an event for it; unknown ones are ignored."""
        ...

    def submit(self, submission: Submission) -> None:
        """Queue a request, taking over one hold on its table; raises PrfaasError if it cannot."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request at the next step; unknown ones are ignored."""
        ...

    def step(self) -> list[EngineEvent]:
        """Do one batch's work; return what happened, in order."""
        ...

    def set_prefill_share(self, share: float) -> None:
        """Let this share of the steps in which sequences decode carry prefill, from 0.1 to 1."""
        ...

    def load(self) -> EngineLoad:
        """Return how busy it is."""
        ...


@dataclass(frozen=True, slots=True)
class _Refused:
    request_id: str
    error: PrfaasError


class EngineStream:
    """The events of one submission, up to and including its RequestEnded."""

    def __init__(self, request_id: str, max_events: int) -> None:
        self.request_id = request_id
        self._events: asyncio.Queue[EngineEvent | PrfaasError] = asyncio.Queue(max_events)

    def __aiter__(self) -> AsyncIterator[EngineEvent]:
        """Yield events; raises BadRequest or Overloaded first, EngineError at any time."""
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[EngineEvent]:
        while True:
            event = await self._events.get()
            if isinstance(event, PrfaasError):
                raise event
            if isinstance(event, RequestEnded) and event.error is not None:
                raise EngineError(event.error)
            yield event
            if isinstance(event, RequestEnded):
                return

    def put(self, event: EngineEvent | PrfaasError) -> None:
        """Add an event; QueueFull means that the engine drew more than it was asked for."""
        self._events.put_nowait(event)


class EngineThread:
    """Runs an engine in a thread of its own. All methods are for the event loop's thread."""

    def __init__(self, engine: StepEngine, *, clock: Clock, name: str = "engine") -> None:
        self._engine = engine
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wakeup = threading.Condition()
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, EngineStream] = {}
        self._refused: list[_Refused] = []
        self._held: set[str] = set()
        """Requests that the engine has accepted and not ended; the engine thread's."""
        self._load = EngineLoad(
            num_running=0,
            num_waiting=0,
            num_waiting_tokens=0,
            kv_used_bytes=0,
            prefill_tokens_per_s=0.0,
            step_count=0,
        )
        self._step_began_s: float | None = None
        self._failure: str | None = None
        self._last_beat = (0, 0)
        self._last_beat_s = 0.0
        self._ended: asyncio.Event | None = None

    def start(self) -> None:
        """Start the thread; events go to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread.start()

    def set_prefill_share(self, share: float) -> None:
        """Let this share of the steps in which sequences decode carry prefill, from the next on.

        Raises ValueError if it is not from MIN_PREFILL_SHARE to 1.
        """
        check_prefill_share(share)
        self._post(lambda: self._engine.set_prefill_share(share))

    async def stop(self) -> None:
        """Abort all requests, let them end, and end the thread. Idempotent.

        Returns when the thread has left; raises EngineError if a step does not end.
        """
        if self._ended is None:
            return
        for request_id in list(self._streams):
            self.abort(request_id)
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError as error:
            raise EngineError(f"the engine is in one step for {STOP_TIMEOUT_S} s") from error
        self._thread.join()

    def submit(self, submission: Submission) -> EngineStream:
        """Hand a request to the engine, with one hold on its table; return its events.

        A refusal (BadRequest, Overloaded) is raised by the first step of the iteration, and the hold
        is released. Raises EngineError, after the release, if the engine is not running or still has a
        request of that name.
        """
        request = submission.request
        if not self.is_running:
            submission.table.release()
            raise EngineError(self._failure or "the engine is not running")
        if request.request_id in self._streams:
            submission.table.release()
            raise EngineError(f"request {request.request_id} runs here already")
        max_events = request.num_choices * request.sampling.max_tokens + EXTRA_EVENTS
        stream = EngineStream(request.request_id, max_events)
        self._streams[request.request_id] = stream
        self._post(lambda: self._submit(submission))
        return stream

    def abort(self, request_id: str) -> None:
        """End a request within a step; its stream still gets RequestEnded. Unknown ids are fine."""
        if request_id in self._streams:
            self._post(lambda: self._engine.abort(request_id))

    def stop_choice(self, request_id: str, choice_index: int) -> None:
        """End one choice of a request within a step; others go on. Unknown ones are fine."""
        if request_id in self._streams:
            self._post(lambda: self._engine.stop_choice(request_id, choice_index))

    def heartbeat(self) -> tuple[int, int]:
        """Return a value that changes as long as the engine really works.

        It counts layers, and the thread's CPU time, since one layer of a long prompt can take many
        seconds.
        """
        native_id = self._thread.native_id
        cpu_s = 0.0 if native_id is None else thread_cpu_s(native_id)
        return self._engine.num_layers_run, int(cpu_s / HEARTBEAT_CPU_S)

    def load(self) -> EngineLoad:
        """Return how busy the engine was after its last step."""
        return self._load

    @property
    def is_running(self) -> bool:
        """The thread takes requests."""
        return self._ended is not None and not self._ended.is_set() and not self._is_stopping

    @property
    def is_ready(self) -> tuple[bool, str]:
        """(False, why) while the engine cannot serve: dead, stopped, or hanging in a step."""
        if self._failure is not None:
            return False, f"engine_failed: {self._failure}"
        if not self.is_running:
            return False, "engine_stopped"
        began_s, now_s = self._step_began_s, self._clock()
        if (beat := self.heartbeat()) != self._last_beat:
            self._last_beat, self._last_beat_s = beat, now_s
        if began_s is not None and now_s - max(began_s, self._last_beat_s) > MAX_STEP_S:
            return False, f"engine_stuck: a step has stood still for more than {MAX_STEP_S:g} s"
        return True, ""

    # ------------------------------------------------------------ the engine's thread

    def _post(self, command: Callable[[], None]) -> None:
        with self._wakeup:
            self._inbox.append(command)
            self._wakeup.notify()

    def _submit(self, submission: Submission) -> None:
        try:
            self._engine.submit(submission)
        except PrfaasError as error:
            submission.table.release()
            self._refused.append(_Refused(submission.request.request_id, error))
        else:
            self._held.add(submission.request.request_id)

    def _run(self) -> None:
        failure: str | None = None
        try:
            while self._await_work():
                self._step()
        except Exception as error:  # noqa: BLE001  # whatever it is, every request must hear of it
            failure = f"{type(error).__name__}: {error}"
            get_logger().error("engine.failed", error=failure, exc_info=True)
            self._abandon()
        self._call_loop(lambda: self._finish(failure))

    def _await_work(self) -> bool:
        """Run the inbox; return True when there is a step to do, False to end the thread."""
        while True:
            with self._wakeup:
                while not (self._inbox or self._engine.has_work or self._is_stopping):
                    self._wakeup.wait()
                commands = list(self._inbox)
                self._inbox.clear()
                is_stopping = self._is_stopping
            for command in commands:
                command()
            if self._engine.has_work or self._refused:
                return True
            if is_stopping:
                return False
            self._load = self._engine.load()

    def _step(self) -> None:
        refused, self._refused = self._refused, []
        self._step_began_s = self._clock()
        events = self._engine.step() if self._engine.has_work else []
        self._step_began_s = None
        self._held -= {event.request_id for event in events if isinstance(event, RequestEnded)}
        self._load = self._engine.load()
        if events or refused:
            self._call_loop(lambda: self._deliver(events, refused))

    def _abandon(self) -> None:
        """Let a failed engine give up what it holds for its requests, if it still can."""
        try:
            for request_id in self._held:
                self._engine.abort(request_id)
            self._engine.step()
        except Exception as error:  # noqa: BLE001  # it has failed before; the pages stay held
            get_logger().error("engine.pages_lost", error=f"{type(error).__name__}: {error}")

    def _call_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback)

    # ------------------------------------------------------------ back on the loop

    def _deliver(self, events: list[EngineEvent], refused: list[_Refused]) -> None:
        for refusal in refused:
            self._streams.pop(refusal.request_id).put(refusal.error)
        for event in events:
            stream = self._streams[event.request_id]
            if isinstance(event, RequestEnded):
                del self._streams[event.request_id]
            stream.put(event)

    def _finish(self, failure: str | None) -> None:
        self._failure = failure
        for stream in self._streams.values():
            stream.put(EngineError(failure or "the engine was stopped"))
        self._streams.clear()
        assert self._ended is not None
        self._ended.set()
