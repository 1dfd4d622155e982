"""Decides what each step computes: admission, chunked prefill, growth, preemption. Pure.

The batcher knows sequences by number and counts tokens; it sees no token, tensor, page or clock.
A sequence has `num_tokens` known tokens (prompt and drawn ones), of which the first `num_computed`
have their KV; the rest is its remaining work. One that decodes has one token of it a step.

- Every decoding sequence steps each time, and waits for what else the step does: beside it prefill is
  at most `mixed_chunk_tokens`, else `chunk_tokens`; at least one block, cut at absolute multiples of
  the block except at the end of what is known.
- Of the steps in which sequences decode, a share can be set that carries prefill.
- Prefill goes to the least remaining work first, so that a long prompt does not block short ones.
  A quarter of it goes to the oldest pending sequence, so that short ones do not starve a long one.
- A sequence is admitted when it gets tokens, never before: long prompts do not fill the batch while
  they wait. If the batch is full, one that waits takes the place of a half-prefilled one that has
  more left, does not run in this step and is not the oldest.
- If a decoding sequence cannot grow, the youngest sequence is preempted. The oldest always can:
  what could not fit alone was refused.
- A sequence that begins like a running one waits while that makes what both begin with.
- If memory stays too full for the oldest waiting sequence, no younger one is admitted after
  `AGEING_STEPS` steps, until it fits.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prfaas.engine.options import EngineOptions
from prfaas.engine.prefill_share import PrefillShare
from prfaas.engine.step_plan import Draft, Grant, StepPlan, reservations
from prfaas.errors import BadRequest, ConfigError, Overloaded

AGEING_STEPS = 64
_OLDEST_SHARE = 4
"""The oldest pending sequence gets a guaranteed 1 / _OLDEST_SHARE of the prefill tokens."""
_MIN_HEADROOM_TOKENS = 64


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    """One sequence; it runs if and only if it has a capacity."""

    key: int
    age: tuple[int, int]
    """(arrival, key): smaller is older. The choices of one request share the arrival."""
    num_tokens: int
    num_computed: int
    max_kv_tokens: int
    capacity_tokens: int = 0
    was_admitted: bool = False
    num_starved_steps: int = 0
    """Steps as the oldest waiting sequence that memory had no room for."""

    @property
    def num_remaining(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def order(self) -> tuple[int, tuple[int, int]]:
        """Least remaining work first, ties by age."""
        return (self.num_remaining, self.age)


class Batcher:
    """The sequences of one engine and what each step does with them.

    Args:
        options: the limits.
        block_tokens: prefill is cut at multiples of it.
        kv_bytes: tokens -> bytes of a working copy of that many; never falls.
    """

    def __init__(
        self, *, options: EngineOptions, block_tokens: int, kv_bytes: Callable[[int], int]
    ) -> None:
        if options.chunk_tokens < block_tokens or options.chunk_tokens % block_tokens:
            raise ConfigError(
                f"engine.chunk_tokens = {options.chunk_tokens} is not a multiple of the block: "
                f"{block_tokens} tokens"
            )
        self._options = options
        self._block_tokens = block_tokens
        self._kv_bytes = kv_bytes
        self._running: dict[int, _Entry] = {}
        self._waiting: dict[int, _Entry] = {}
        self._used_bytes = 0
        self._num_arrivals = 0
        self._oldest_credit = 0
        """Prefill tokens, times _OLDEST_SHARE, that the oldest pending sequence may claim."""
        self._share = PrefillShare()
        self._barrier: _Entry | None = None
        """A starved sequence: while it waits, no younger one is admitted."""

    @property
    def num_running(self) -> int:
        """Sequences that have a working copy."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have none: new ones and preempted ones."""
        return len(self._waiting)

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens that are still to be computed, of all sequences."""
        entries = (*self._running.values(), *self._waiting.values())
        return sum(entry.num_remaining for entry in entries)

    @property
    def num_decoding(self) -> int:
        """Running sequences that have one token to compute, as far as is known."""
        return sum(entry.num_remaining == 1 for entry in self._running.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of the working copies that running sequences may fill."""
        return self._used_bytes

    def max_kv_tokens(self, limit: int) -> int:
        """Return the most tokens, up to `limit`, whose KV the budget holds for one sequence."""
        return bisect_right(range(1, limit + 1), self._options.kv_ram_bytes, key=self._kv_bytes)

    def set_prefill_share(self, share: float) -> None:
        """Let this share of the steps in which sequences decode carry prefill; 1 is all of them.

        Raises ValueError for one below MIN_PREFILL_SHARE or above 1.
        """
        self._share.set(share)

    def add(
        self,
        key: int,
        *,
        num_tokens: int,
        num_computed: int,
        max_kv_tokens: int,
        has_begun: bool = False,
    ) -> None:
        """Queue a new sequence of which `num_computed` tokens lie ready to be imported.

        `max_kv_tokens` is the most it can grow to. Raises BadRequest if that can never fit, and
        Overloaded if the queue is full, unless the answer `has_begun`.
        """
        assert 0 <= num_computed <= num_tokens <= max_kv_tokens
        max_bytes = self._kv_bytes(max_kv_tokens)
        if max_bytes > self._options.kv_ram_bytes:
            raise BadRequest(
                f"prompt and completion of {max_kv_tokens} tokens need {max_bytes} bytes of KV "
                f"memory; the limit is {self._options.kv_ram_bytes}",
                code="context_length_exceeded",
            )
        num_queued = sum(not entry.was_admitted for entry in self._waiting.values())
        if num_queued >= self._options.max_waiting_requests and not has_begun:
            raise Overloaded(
                f"{num_queued} requests are waiting; "
                f"the limit is {self._options.max_waiting_requests}"
            )
        self._num_arrivals += 1
        self._waiting[key] = _Entry(
            key=key,
            age=(self._num_arrivals, key),
            num_tokens=num_tokens,
            num_computed=num_computed,
            max_kv_tokens=max_kv_tokens,
        )

    def fork(self, parent: int, key: int, *, num_tokens: int, num_saved: int) -> int | None:
        """Add a sequence that goes on from the KV of the running `parent`.

        Returns the capacity in tokens of its working copy, which starts as a copy of the parent's.
        If there is no room now, returns None, and the sequence waits with its first `num_saved`
        tokens ready to be imported.
        """
        origin = self._running[parent]
        entry = _Entry(
            key=key,
            age=(origin.age[0], key),
            num_tokens=num_tokens,
            num_computed=origin.num_computed,
            max_kv_tokens=origin.max_kv_tokens,
            was_admitted=True,
        )
        if self._has_room(entry):
            self._start(entry)
            return entry.capacity_tokens
        entry.num_computed = num_saved
        self._waiting[key] = entry
        return None

    def stored(self, key: int, num_tokens: int) -> None:
        """Note that a waiting sequence can go on from its first `num_tokens` tokens, which lie ready."""
        self._waiting[key].num_computed = num_tokens

    def computed(self, key: int, num_computed: int) -> None:
        """Note that the KV of a running sequence now covers `num_computed` tokens."""
        entry = self._running[key]
        assert num_computed <= min(entry.num_tokens, entry.capacity_tokens)
        entry.num_computed = num_computed

    def known(self, key: int, num_tokens: int) -> None:
        """Note that a sequence now has `num_tokens` known tokens."""
        self._find(key).num_tokens = num_tokens

    def remove(self, key: int) -> None:
        """Forget a sequence and free its room."""
        entry = self._find(key)
        if entry.capacity_tokens:
            self._stop(entry)
        else:
            del self._waiting[key]

    def plan(self, leaders: Mapping[int, int] | None = None) -> StepPlan:
        """Decide the next step; its preemptions, admissions and growth have then taken place.

        Args:
            leaders: waiting sequence -> running one that makes what it could start from. It is not
                admitted in a step that computes tokens of that one.
        """
        draft = Draft(leaders=leaders or {})
        self._plan_decodes(draft)
        may_prefill = not draft.decodes or self._share.begin()
        self._plan_prefills(draft, may_prefill=may_prefill)
        if draft.decodes:
            self._share.end(has_prefill=bool(draft.granted))
        self._age_oldest_waiting()
        return StepPlan(
            preempted=tuple(draft.preempted),
            admitted=reservations(draft.admitted),
            grown=reservations(draft.grown),
            decodes=tuple(self._grant(key, 1) for key in draft.decodes),
            prefills=tuple(self._grant(key, count) for key, count in draft.granted.items()),
            is_prefill_held_back=draft.is_prefill_held_back,
        )

    def check(self) -> None:
        """Re-derive every count; AssertionError names what is wrong."""
        assert not self._running.keys() & self._waiting.keys()
        for key, entry in self._running.items():
            assert key == entry.key
            assert entry.was_admitted
            assert 0 <= entry.num_computed <= entry.capacity_tokens <= entry.max_kv_tokens
        for key, entry in self._waiting.items():
            assert key == entry.key
            assert entry.capacity_tokens == 0
        for entry in (*self._running.values(), *self._waiting.values()):
            assert 0 <= entry.num_computed <= entry.num_tokens
        used = sum(self._kv_bytes(entry.capacity_tokens) for entry in self._running.values())
        assert self._used_bytes == used <= self._options.kv_ram_bytes
        assert len(self._running) <= self._options.max_batch_sequences

    # ------------------------------------------------------------ decode

    def _plan_decodes(self, draft: Draft) -> None:
        for entry in sorted(self._running.values(), key=lambda e: e.age):
            # An older one may have preempted it just now; more (drawn elsewhere) is prefill.
            if entry.key in self._running and self._grow(entry, draft) and entry.num_remaining == 1:
                draft.decodes.append(entry.key)

    def _grow(self, entry: _Entry, draft: Draft) -> bool:
        """Make room for all known tokens; False if `entry` itself was the youngest and had to go."""
        if entry.num_tokens <= entry.capacity_tokens:
            return True
        capacity_tokens = self._wanted_capacity(entry)
        extra_bytes = self._kv_bytes(capacity_tokens) - self._kv_bytes(entry.capacity_tokens)
        while self._used_bytes + extra_bytes > self._options.kv_ram_bytes:
            youngest = max(self._running.values(), key=lambda e: e.age)
            self._preempt(youngest, draft)
            if youngest is entry:
                return False
        entry.capacity_tokens = capacity_tokens
        self._used_bytes += extra_bytes
        draft.grown[entry.key] = capacity_tokens
        return True

    # ------------------------------------------------------------ prefill

    def _plan_prefills(self, draft: Draft, *, may_prefill: bool) -> None:
        """Share a chunk among what is pending, or admit only what lacks no token."""
        decoding = set(draft.decodes)
        pending = [entry for entry in self._running.values() if entry.key not in decoding]
        pending += [e for e in self._waiting.values() if e.key not in draft.preempted]
        if not pending:
            self._oldest_credit = 0
            return
        budget = self._options.chunk_tokens
        if decoding:
            budget = max(self._block_tokens, self._options.most_mixed_tokens)
        if not may_prefill:
            draft.is_prefill_held_back = any(entry.num_remaining for entry in pending)
            budget = 0
        oldest = min(pending, key=lambda e: e.age)
        self._oldest_credit = min(
            self._oldest_credit + budget, _OLDEST_SHARE * self._options.chunk_tokens
        )
        share = min(budget, self._oldest_credit // _OLDEST_SHARE)
        num_granted = self._serve(oldest, share, oldest, draft)
        self._oldest_credit -= _OLDEST_SHARE * num_granted
        budget -= num_granted
        for entry in sorted(pending, key=lambda e: e.order):
            if entry.key not in draft.preempted:
                budget -= self._serve(entry, budget, oldest, draft)

    def _serve(self, entry: _Entry, limit: int, oldest: _Entry, draft: Draft) -> int:
        """Grant up to `limit` more tokens, admitting the sequence if need be; return how many."""
        granted = draft.granted.get(entry.key, 0)
        start = entry.num_computed + granted
        end = start + limit
        end = entry.num_tokens if end >= entry.num_tokens else end - end % self._block_tokens
        if end <= start and entry.num_remaining > 0:
            return 0
        if not entry.capacity_tokens:
            is_held_back = draft.leaders.get(entry.key) in draft.granted
            if is_held_back or not self._admit(entry, oldest, draft):
                return 0
        if end > start:
            draft.granted[entry.key] = end - entry.num_computed
        return end - start

    def _admit(self, entry: _Entry, oldest: _Entry, draft: Draft) -> bool:
        """Start a waiting sequence, displacing half-prefilled longer ones if that makes room."""
        victims: list[_Entry] = []
        if not self._has_room(entry):
            idle = (
                e
                for e in self._running.values()
                if e.num_remaining > max(1, entry.num_remaining) and e is not oldest
            )  # the least remaining work is served first: those with more have no tokens yet
            for victim in sorted(idle, key=lambda e: e.order, reverse=True):
                victims.append(victim)
                if self._has_room(entry, without=victims):
                    break
        if not self._has_room(entry, without=victims):
            return False
        for victim in victims:
            self._preempt(victim, draft)
        self._start(entry)
        draft.admitted[entry.key] = entry.capacity_tokens
        return True

    # ------------------------------------------------------------ room

    def _has_room(self, entry: _Entry, without: list[_Entry] | None = None) -> bool:
        """Return whether a waiting sequence could start now, with the given ones gone."""
        barrier = self._barrier
        if barrier is not None and barrier.key in self._waiting and entry.age > barrier.age:
            return False
        gone = without or []
        num_running = len(self._running) - len(gone)
        freed_bytes = sum(self._kv_bytes(e.capacity_tokens) for e in gone)
        return num_running < self._options.max_batch_sequences and self._fits(entry, freed_bytes)

    def _fits(self, entry: _Entry, freed_bytes: int = 0) -> bool:
        wanted_bytes = self._kv_bytes(self._wanted_capacity(entry))
        return self._used_bytes - freed_bytes + wanted_bytes <= self._options.kv_ram_bytes

    def _wanted_capacity(self, entry: _Entry) -> int:
        """Tokens to reserve: what is known and an eighth to grow into, so that copies amortise."""
        headroom = max(_MIN_HEADROOM_TOKENS, entry.num_tokens // 8)
        return min(entry.max_kv_tokens, entry.num_tokens + headroom)

    def _age_oldest_waiting(self) -> None:
        self._barrier = None
        entry = min(self._waiting.values(), key=lambda e: e.age, default=None)
        if entry is not None and not self._fits(entry):
            entry.num_starved_steps += 1
            if entry.num_starved_steps >= AGEING_STEPS:
                self._barrier = entry

    # ------------------------------------------------------------ state

    def _start(self, entry: _Entry) -> None:
        self._waiting.pop(entry.key, None)
        entry.capacity_tokens = self._wanted_capacity(entry)
        entry.was_admitted = True
        entry.num_starved_steps = 0
        self._used_bytes += self._kv_bytes(entry.capacity_tokens)
        self._running[entry.key] = entry

    def _stop(self, entry: _Entry) -> None:
        del self._running[entry.key]
        self._used_bytes -= self._kv_bytes(entry.capacity_tokens)
        entry.capacity_tokens = 0

    def _preempt(self, entry: _Entry, draft: Draft) -> None:
        self._stop(entry)
        entry.num_computed = 0  # until `stored` says better
        self._waiting[entry.key] = entry
        draft.preempted.append(entry.key)

    def _grant(self, key: int, num_tokens: int) -> Grant:
        return Grant(key=key, start=self._running[key].num_computed, num_tokens=num_tokens)

    def _find(self, key: int) -> _Entry:
        entry = self._running.get(key) or self._waiting.get(key)
        assert entry is not None, f"sequence {key} is unknown"
        return entry
