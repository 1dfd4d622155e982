"""One node as the fleet sees it: what it said last, what was sent to it since, whether it may be used."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite, isnan
from typing import Literal

from prfaas.scheduler.heartbeat import Heartbeat, Mode
from prfaas.scheduler.view import known_rate
from prfaas.scheduler.work import FIRST_STEP_S, FIRST_TOKEN_S, Assumed, Job, Load, Price

NodeState = Literal["ready", "late", "suspected", "refusing", "not_ready", "draining", "dead"]
"""late: its heartbeat is overdue. suspected: a call to it failed, and it was not heard since. refusing: it asked
for a pause. not_ready: by its own word."""
Refusal = Literal["suspected", "refusing", "not_ready", "draining", "dead"]
"""The states in which nothing is sent to a node."""

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
MAX_REFUSAL_S = 30.0
MAX_COUNT = 10**12
"""Of anything in a heartbeat."""

CROWD_CONCERN = 0.1
"""Of an answer's time, that a full batch costs beside an empty one: its steps take longer."""
FULL_FRACTION = 0.98
"""Of the pages: with more in use, one waits for others to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """After how long without a heartbeat a node counts as what."""

    late_after_s: float = 2.5
    """It is used only where no other was heard."""
    dead_after_s: float = 5.0
    forget_after_s: float = 60.0
    """Nothing remembers it, once none of its requests is in flight."""
    max_nodes: int = 1024

    def __post_init__(self) -> None:
        """Raise ValueError for limits out of order."""
        if not 0 < self.late_after_s <= self.dead_after_s <= self.forget_after_s < inf:
            raise ValueError(f"{self}: late, dead and forgotten come in this order")
        if self.max_nodes < 1:
            raise ValueError(f"{self}: no node")


class Standing:
    """One node's state; its owner feeds it heartbeats and what became of requests."""

    def __init__(
        self, heartbeat: Heartbeat, numerics: str, limits: FleetLimits, now_s: float
    ) -> None:
        self.name, self.cluster = heartbeat.node, heartbeat.cluster
        self.load = Load()
        self.last_chosen = 0
        """The number of the last placement that chose it; 0 is none."""
        self.wanted_mode: Mode | None = None
        """Set while the fleet wants another mode than the node has."""
        self._limits = limits
        self._num_failures = 0
        self._failed_s = -inf
        self._is_suspected = False
        self._retry_at_s = -inf
        self._refuses_until_s = -inf
        self._take(heartbeat, numerics, now_s)

    def heard(self, heartbeat: Heartbeat, numerics: str, now_s: float) -> bool:
        """Take a heartbeat; return False for one of a life that is over.

        It ends a suspicion, unless failures in a row have earned a longer pause. A new life has
        failed at nothing yet, and has the mode it was started with.
        """
        if heartbeat.epoch < self.heartbeat.epoch:
            return False
        if heartbeat.epoch > self.heartbeat.epoch:
            self._num_failures, self._is_suspected = 0, False
            self._retry_at_s = self._refuses_until_s = -inf
            self.wanted_mode = None
        if now_s >= self._retry_at_s:
            self._is_suspected = False
        if heartbeat.mode == self.wanted_mode:
            self.wanted_mode = None
        self._take(heartbeat, numerics, now_s)
        return True

    def moved(self, heartbeat: Heartbeat) -> bool:
        """Return whether a heartbeat of its name is of another role or cluster."""
        old = self.heartbeat
        return (old.role, old.cluster) != (heartbeat.role, heartbeat.cluster)

    def failed(self, now_s: float, started_s: float | None = None) -> None:
        """Take note of a call that failed by the node's fault.

        Those that began before the last failure are of the same one. The first is over with the next
        heartbeat, each one after it takes twice as long.
        """
        if started_s is None or started_s >= self._failed_s:
            self._num_failures += 1
            self._failed_s = now_s
        self._is_suspected = True
        if self._num_failures > 1:
            doublings = min(self._num_failures - 2, 10)
            self._retry_at_s = now_s + min(FIRST_BACKOFF_S * 2.0**doublings, MAX_BACKOFF_S)
        self._settle()

    def answered(self) -> None:
        """Take note that the node did what it was asked for."""
        self._num_failures, self._is_suspected, self._retry_at_s = 0, False, -inf
        self._settle()

    def refused(self, now_s: float, retry_after_s: float) -> None:
        """Take note that the node has no room for so long."""
        wait_s = retry_after_s if isfinite(retry_after_s) else FIRST_BACKOFF_S
        self._refuses_until_s = now_s + min(max(wait_s, 0.0), MAX_REFUSAL_S)
        self._settle()

    def want(self, mode: Mode | None) -> None:
        """Want another mode of it; None and its own are no wish."""
        self.wanted_mode = None if mode == self.heartbeat.mode else mode
        self._settle()

    def price(self, guess: Assumed) -> Price:
        """Return what it takes; worked out once for each change of its load."""
        load = self.load
        price = load.price
        if price is None or price.guess is not guess:
            token_s = guess.token_s if self.token_s is None else self.token_s
            price = load.price = Price(
                guess,
                token_s,
                load.queue_tokens * token_s,
                self._crowd_s(guess),
                self._place_s(guess),
                load.num_active / self.max_running,
                load.free_bytes,
            )
        return price

    def slot_wait_s(self, guess: Assumed, num_sequences: int = 1) -> float:
        """Return the seconds until so many more have a place in the batch: those there end one after the other."""
        num_ahead = self.load.num_active - self.max_running + num_sequences
        if num_ahead <= 0:
            return 0.0
        return num_ahead * self._answer_s(guess) / self.max_running

    def decode_s(self, guess: Assumed, price: Price, job: Job) -> float:
        """Return what it costs to decode here rather than at an empty node of endless room.

        Its own tokens take longer in a fuller batch, and so do all others beside it; and it may have to wait, for
        places in the batch and for pages.
        """
        seconds = job.output_tokens * price.crowd_s
        seconds += (
            price.place_s if job.num_sequences == 1 else self._place_s(guess, job.num_sequences)
        )
        free_bytes = max(0, price.free_bytes)
        if job.num_bytes > free_bytes:
            seconds += self._answer_s(guess) * (1 - free_bytes / job.num_bytes)
        return seconds

    def age_s(self, now_s: float) -> float:
        """Return the seconds since it was heard."""
        return max(0.0, now_s - self.heard_s)

    def state(self, now_s: float) -> NodeState:
        """Return what the fleet thinks of it; the gravest reason of several."""
        if now_s <= self.clear_until_s:
            return "ready"
        age_s = self.age_s(now_s)
        reasons: tuple[tuple[NodeState, bool], ...] = (
            ("dead", age_s >= self._limits.dead_after_s),
            ("draining", self.heartbeat.is_draining),
            ("not_ready", not self.heartbeat.is_ready),
            ("suspected", self._is_suspected),
            ("refusing", now_s < self._refuses_until_s),
            ("late", age_s > self._limits.late_after_s),
        )
        return next((state for state, holds in reasons if holds), "ready")

    def refusal(self, now_s: float) -> Refusal | None:
        """Return why nothing may be sent there now, or None."""
        state = self.state(now_s)
        return None if state == "ready" or state == "late" else state

    def is_second_choice(self, now_s: float) -> bool:
        """Return whether any other node is better: its heartbeat is late, or it is on trial and busy."""
        if now_s <= self.clear_until_s:
            return False
        if self._num_failures > 0 and self.load.num_inflight > 0:
            return True
        return self.age_s(now_s) > self._limits.late_after_s

    def retry_after_s(self, now_s: float) -> float:
        """Return in how many seconds it may be worth another try; 0 is now."""
        return max(0.0, self._refuses_until_s - now_s, self._retry_at_s - now_s)

    def check(self) -> None:
        """Check the counts."""
        self.load.check()
        assert self._num_failures >= 0
        assert self.wanted_mode != self.heartbeat.mode
        assert self.clear_until_s == -inf or self.refusal(self.clear_until_s) is None

    def _answer_s(self, guess: Assumed) -> float:
        """Return what one of the answers there takes, on average."""
        return (self.step_s or guess.step_s) * self.load.mean_output_tokens(guess)

    def _crowd_s(self, guess: Assumed) -> float:
        share = max(self.load.num_active / self.max_running, self.pages_used)
        return CROWD_CONCERN * (self.step_s or guess.step_s) * share

    def _place_s(self, guess: Assumed, num_sequences: int = 1) -> float:
        """Return the wait for places in the batch, and for a page where all are in use."""
        seconds = self.slot_wait_s(guess, num_sequences)
        if self.pages_used > FULL_FRACTION:
            seconds += self._answer_s(guess) / max(1, self.load.num_active)
        return seconds

    def _take(self, heartbeat: Heartbeat, numerics: str, now_s: float) -> None:
        self.heartbeat, self.numerics, self.heard_s = heartbeat, numerics, now_s
        rate, step_s = known_rate(heartbeat.prefill_tokens_per_s), heartbeat.decode_step_s
        self.token_s = None if rate is None else 1 / rate
        """Of a token's prefill; None is unknown."""
        self.step_s = known_rate(step_s)
        """Of one step of its decoding sequences; None is unknown."""
        self.max_running = _count(heartbeat.max_running) or 1
        free = heartbeat.free_pages_fraction
        self.pages_used = 1 - min(max(free, 0.0), 1.0) if isfinite(free) else 0.0
        num_active = _count(heartbeat.num_running) + _count(heartbeat.num_waiting)
        free_bytes = heartbeat.free_kv_bytes
        self.load.reported(
            num_active,
            _count(heartbeat.num_waiting_tokens),
            inf if free_bytes is None else _count(free_bytes),
            now_s,
        )
        self._settle()

    def _settle(self) -> None:
        """Work out once what each decision asks: there are many for one change."""
        modes = (self.heartbeat.mode, self.wanted_mode or self.heartbeat.mode)
        is_pd = self.heartbeat.role == "pd"
        self.can_decode = is_pd and "prefill" not in modes
        """It takes requests, and is to go on taking them."""
        self.only_decodes = self.heartbeat.mode == "decode"
        """It leaves prefill to others, where there are some."""
        self.can_prefill = not is_pd or modes == ("prefill", "prefill")
        """It prefills for others only."""
        is_clear = self.heartbeat.is_ready and not self.heartbeat.is_draining
        is_clear = is_clear and not self._is_suspected and self._num_failures == 0
        self.clear_until_s = self.heard_s + self._limits.late_after_s if is_clear else -inf
        """Until then it may be used like any other, whatever else is true; -inf promises nothing."""
        if self._refuses_until_s > self.heard_s:
            self.clear_until_s = -inf
        self.decodes_until_s = self.clear_until_s if self.can_decode else -inf
        """The same of a request to decode."""


def _count(value: float) -> int:
    """Return a count that a node reported, within bounds; what is none is 0."""
    return 0 if isnan(value) else int(min(max(value, 0), MAX_COUNT))


def assumed(standings: Iterable[Standing], output_tokens: float) -> Assumed:
    """Return the means of what is known of these nodes."""
    token_s = [node.token_s for node in standings if node.token_s is not None]
    step_s = [node.step_s for node in standings if node.step_s is not None]
    return Assumed(
        token_s=sum(token_s) / len(token_s) if token_s else FIRST_TOKEN_S,
        step_s=sum(step_s) / len(step_s) if step_s else FIRST_STEP_S,
        output_tokens=max(1.0, output_tokens),
    )
