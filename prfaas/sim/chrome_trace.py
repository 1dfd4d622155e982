"""What simulations did, as trace events for Perfetto and chrome://tracing.

A process is a cluster's role or its link, a thread one place there: an instance, one of the sequences of
a decode batch, one of the transfers of a link. Only the first requests of a run are recorded.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError
from prfaas.sim.events import Action, Events
from prfaas.sim.journey import Journey
from prfaas.sim.movement import PrefixMove
from prfaas.sim.remote_cluster import RemotePrefill

Counters = Callable[[], Mapping[tuple[str, str], float]]
"""(process, name) -> value at this moment."""
LostSequence = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Span:
    """Work for one request at one place."""

    process: str
    instance: int | None
    """Of a decode pool; elsewhere it is whichever is free."""
    name: str
    start_s: float
    end_s: float
    outcome: str
    journey: Journey


class Recorder:
    """Keeps what becomes of the first requests of one run, and counters as each of them comes.

    It changes nothing: what it returns in the place of a callback calls that.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._events = Events()
        self.spans: list[Span] = []
        self.samples: list[tuple[float, Mapping[tuple[str, str], float]]] = []

    def begin(self, events: Events) -> None:
        """Record the run of this clock."""
        self._events = events

    def arrived(self, journey: Journey, counters: Counters) -> None:
        """Take the counters as a request arrives."""
        if self._heeds(journey):
            self.samples.append((self._events.now_s, counters()))

    def prefill(
        self, journey: Journey, on_done: Action, on_lost: Action
    ) -> tuple[Action | None, Action, Action]:
        """Return what to call when a local prefill starts, is done, or is lost."""
        if not self._heeds(journey):
            return None, on_done, on_lost
        started: list[float] = []

        def end(outcome: str, then: Action) -> None:
            self._add(
                Span("local prefill", None, "prefill", started[0], self._now, outcome, journey)
            )
            then()

        return (
            lambda: started.append(self._now),
            partial(end, "done", on_done),
            partial(end, "lost", on_lost),
        )

    def remote(self, journey: Journey, prefill: RemotePrefill, outcome: str) -> None:
        """Take note of a remote prefill that has arrived or was given up just now."""
        if not self._heeds(journey) or prefill.job is None or prefill.job.started_s is None:
            return
        place = f"prfaas-{prefill.index}"
        began_s, now_s = prefill.job.started_s, self._now
        computed_s = now_s if prefill.computed_s is None else prefill.computed_s
        self._add(Span(f"{place} prefill", None, "prefill", began_s, computed_s, outcome, journey))
        sent_s = prefill.transfer.first_sent_s
        if sent_s is not None:
            self._add(Span(f"{place} link", None, "transfer", sent_s, now_s, outcome, journey))

    def moved(self, move: PrefixMove, outcome: str) -> None:
        """Take note of a prefix that has arrived or was given up just now."""
        if not self._heeds(move.journey) or move.began_s is None:
            return
        place = f"prfaas-{move.index} link" + ("" if move.is_to_here else " there")
        self._add(Span(place, None, "movement", move.began_s, self._now, outcome, move.journey))

    def decode(
        self, journey: Journey, on_done: Action, on_lost: LostSequence
    ) -> tuple[Action, LostSequence, Callable[[int], object] | None]:
        """Return what to call when a sequence is done, is lost, or has joined an instance."""
        if not self._heeds(journey):
            return on_done, on_lost, None
        joined: list[tuple[int, float]] = []

        def end(outcome: str) -> None:
            index, start_s = joined[-1]
            self._add(Span("local decode", index, "decode", start_s, self._now, outcome, journey))

        def done() -> None:
            end("done")
            on_done()

        def lost(tokens_left: int) -> None:
            end("lost")
            on_lost(tokens_left)

        return done, lost, lambda index: joined.append((index, self._now))

    @property
    def _now(self) -> float:
        return self._events.now_s

    def _heeds(self, journey: Journey) -> bool:
        return journey.number < self._num_requests

    def _add(self, span: Span) -> None:
        self.spans.append(span)


def trace_events(runs: Mapping[str, Recorder]) -> Iterator[dict[str, Any]]:
    """Yield the events of several runs, each under its name: metadata, spans, counters."""
    pids = count(1)
    for name, recorder in runs.items():
        by_process: defaultdict[str, list[Span]] = defaultdict(list)
        for span in recorder.spans:
            by_process[span.process].append(span)
        counted = {process for _, values in recorder.samples for process, _ in values}
        pid_of = {process: next(pids) for process in sorted(counted | set(by_process))}
        for process, pid in pid_of.items():
            yield _named("process_name", pid, 0, f"{name}: {process}")
            yield from _process_events(pid, by_process[process])
        for time_s, values in recorder.samples:
            for (process, counter), value in values.items():
                yield {
                    "ph": "C",
                    "pid": pid_of[process],
                    "name": counter,
                    "ts": _us(time_s),
                    "args": {counter: value},
                }


def write_trace(runs: Mapping[str, Recorder], path: Path) -> None:
    """Write the events of all runs. Raises ConfigError if the file cannot be written."""
    document = {"displayTimeUnit": "ms", "traceEvents": list(trace_events(runs))}
    try:
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _process_events(pid: int, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """The spans of a process, each on a thread where nothing else is at that time."""
    by_instance: defaultdict[int | None, list[Span]] = defaultdict(list)
    for span in spans:
        by_instance[span.instance].append(span)
    tids = count(1)
    for instance, own in sorted(by_instance.items(), key=lambda item: item[0] or 0):
        tid_of: dict[int, int] = {}
        for place, span in _placed(own):
            if place not in tid_of:
                tid_of[place] = next(tids)
                label = f"{place}" if instance is None else f"{instance} sequence {place}"
                yield _named("thread_name", pid, tid_of[place], label)
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tid_of[place],
                "name": span.name,
                "ts": _us(span.start_s),
                "dur": _us(span.end_s - span.start_s),
                "args": {
                    "request": span.journey.number,
                    "prompt_tokens": span.journey.request.input_tokens,
                    "answer_tokens": span.journey.request.output_tokens,
                    "outcome": span.outcome,
                },
            }


def _placed(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with the lowest place that is free as it starts."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    num_places = 0
    for span in sorted(spans, key=lambda span: (span.start_s, span.journey.number)):
        while busy and busy[0][0] <= span.start_s:
            heappush(free, heappop(busy)[1])
        if free:
            place = heappop(free)
        else:
            place, num_places = num_places, num_places + 1
        heappush(busy, (span.end_s, place))
        yield place, span


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
