"""Prompts that wait at the scheduler: decided again when anything has changed, the shortest first.

One in line is due sooner or later: however full the clusters are, the oldest of those that are late goes
once a period.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from prfaas.scheduler.forecast import Prompt
from prfaas.scheduler.policies import Decision

LOOK = 8
"""So many of those that may still be in time are decided again at a time."""

K = TypeVar("K")
Decide = Callable[[Prompt], Decision]


@dataclass(frozen=True, slots=True)
class _Held(Generic[K]):
    key: K
    prompt: Prompt
    late_at_s: float


class HeldPrompts(Generic[K]):
    """What a policy has held back, each under the key of its owner.

    Those younger than `period_s`, the SLO, are in the order of what they lack; late ones in the order
    in which they came.
    """

    def __init__(self, *, period_s: float) -> None:
        self._period_s = period_s
        self._sequence = 0
        self._order: deque[int] = deque()
        """Of all that are in time, in the order of holding; gone ones are skipped."""
        self._by_length: list[tuple[int, int]] = []
        """(uncached tokens, sequence) of those."""
        self._late: deque[int] = deque()
        self._held: dict[int, _Held[K]] = {}
        self._went_s: float | None = None
        """When a late one went last, or when the first one was held."""

    def __len__(self) -> int:
        """Return how many are held."""
        return len(self._held)

    def hold(self, key: K, prompt: Prompt, now_s: float) -> None:
        """Hold a prompt until `release` gives it back. One without `arrived_s` is refused."""
        assert prompt.arrived_s is not None, "it has to go now"
        if not self._held:
            self._went_s = now_s
        self._sequence += 1
        sequence = self._sequence
        self._held[sequence] = _Held(key, prompt, prompt.arrived_s + self._period_s)
        self._order.append(sequence)
        insort(self._by_length, (prompt.uncached_tokens, sequence))

    def release(self, decide: Decide, now_s: float) -> Iterator[tuple[K, Decision]]:
        """Yield who goes now, and where; `decide` counts what it decides.

        Called when an instance, a link or a view of one has changed.
        """
        if not self._held:
            return
        self._age(now_s)
        for _, sequence in self._by_length[:LOOK]:
            decision = decide(self._held[sequence].prompt)
            if not decision.is_held:
                yield self._gone(sequence), decision
        while self._late:
            sequence = self._late[0]
            decision = decide(self._held[sequence].prompt)
            if decision.is_held:
                break
            self._late.popleft()
            self._went_s = now_s
            yield self._gone(sequence), decision
        if self._late and self._is_due(now_s):
            sequence = self._late.popleft()
            self._went_s = now_s
            decision = decide(replace(self._held[sequence].prompt, arrived_s=None))
            yield self._gone(sequence), decision

    def check(self) -> None:
        """Re-derive who is held from the two lines."""
        young = {sequence for _, sequence in self._by_length}
        assert self._by_length == sorted(self._by_length), "not in the order of length"
        assert young | set(self._late) == set(self._held), "held in no line"
        assert len(young) + len(self._late) == len(self._held), "held twice"
        assert young <= set(self._order), "never late"

    def _is_due(self, now_s: float) -> bool:
        return self._went_s is None or now_s - self._went_s >= self._period_s

    def _age(self, now_s: float) -> None:
        """Move those that have become late to their line."""
        while self._order:
            sequence = self._order[0]
            held = self._held.get(sequence)
            if held is not None and now_s < held.late_at_s:
                return
            self._order.popleft()
            if held is not None:
                self._unlist(sequence, held)
                self._late.append(sequence)

    def _gone(self, sequence: int) -> K:
        held = self._held.pop(sequence)
        self._unlist(sequence, held)
        return held.key

    def _unlist(self, sequence: int, held: _Held[K]) -> None:
        entry = (held.prompt.uncached_tokens, sequence)
        index = bisect_left(self._by_length, entry)
        if index < len(self._by_length) and self._by_length[index] == entry:
            del self._by_length[index]
