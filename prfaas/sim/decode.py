"""A decode instance: fluid, or step by step where the difference is to be seen.

Continuous batching: every sequence of the batch gets one token a step, and a step takes as long as the
batch is large. Sequences join and leave between steps; beyond `max_batch` they wait.
"""

from collections import deque
from dataclasses import dataclass

from prfaas.scheduler.profile import DecodeProfile
from prfaas.sim.events import Action, Event, Events
from prfaas.sim.sharing import SharedServer


class _Speeds(dict[int, float]):
    """Batch size -> tokens per second of each sequence, found when first asked for."""

    def __init__(self, decode: DecodeProfile) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, batch: int) -> float:
        self[batch] = speed = 1 / self._decode.step_s(batch)
        return speed


def fluid_decode(events: Events, decode: DecodeProfile, *, max_batch: int) -> SharedServer:
    """Return an instance whose sequences get 1 / T_decode(batch) tokens per second each.

    It ends a sequence of n tokens within one step of `SteppedDecode`, with two events a sequence
    instead of one a step.
    """
    return SharedServer(events, rate_each=_Speeds(decode).__getitem__, max_jobs=max_batch)


LAST = 1_000
"""Priority: after everything else of the moment."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence: waiting, in the batch, or gone."""

    tokens_left: int
    on_done: Action
    is_gone: bool = False


class SteppedDecode:
    """An instance that takes every step.

    arrivals = done + withdrawn + in the batch + waiting, always.
    """

    def __init__(self, events: Events, decode: DecodeProfile, *, max_batch: int) -> None:
        self._events = events
        self._decode = decode
        self._max_batch = max_batch
        self._batch: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._step: Event | None = None
        self.num_arrivals = 0
        self.num_done = 0
        self.num_withdrawn = 0
        self.num_steps = 0

    @property
    def num_active(self) -> int:
        """Return the sequences of the running step."""
        return sum(not sequence.is_gone for sequence in self._batch)

    @property
    def num_waiting(self) -> int:
        """Return the sequences that wait for the next step, or for a place."""
        return sum(not sequence.is_gone for sequence in self._waiting)

    def submit(self, num_tokens: int, on_done: Action) -> Sequence:
        """Let a sequence in; `on_done` is called after the step of its last token.

        Raises:
            ValueError: fewer than one token.
        """
        if num_tokens < 1:
            raise ValueError(f"a sequence of {num_tokens} tokens")
        sequence = Sequence(num_tokens, on_done)
        self.num_arrivals += 1
        self._waiting.append(sequence)
        if self._step is None:  # who comes at the same moment joins the first step
            self._step = self._events.after(0, self._begin, priority=LAST)
        return sequence

    def withdraw(self, sequence: Sequence) -> bool:
        """Take a sequence out; return whether it was still here. A running step goes on."""
        if sequence.is_gone:
            return False
        sequence.is_gone = True
        self.num_withdrawn += 1
        return True

    def check(self) -> None:
        """Assert that no sequence was lost or made, and that the batch has a step."""
        here = self.num_active + self.num_waiting
        assert self.num_arrivals == self.num_done + self.num_withdrawn + here
        assert len(self._batch) <= self._max_batch
        assert self._step is not None or not (self._batch or self.num_waiting)

    def _begin(self) -> None:
        """Fill the batch and start its step; without a sequence, rest."""
        self._batch = [sequence for sequence in self._batch if not sequence.is_gone]
        while self._waiting and len(self._batch) < self._max_batch:
            sequence = self._waiting.popleft()
            if not sequence.is_gone:
                self._batch.append(sequence)
        self._step = None
        if self._batch:
            step_s = self._decode.step_s(len(self._batch))
            self._step = self._events.after(step_s, self._end)

    def _end(self) -> None:
        self.num_steps += 1
        ended = []
        for sequence in self._batch:
            sequence.tokens_left -= 1
            if not sequence.tokens_left and not sequence.is_gone:
                sequence.is_gone = True
                ended.append(sequence)
        self.num_done += len(ended)
        self._begin()
        for sequence in ended:
            sequence.on_done()
