"""Judges a running transfer: keep waiting, or prefill the rest locally.

A sans-I/O state machine. Its driver feeds it on every verified frame and asks for a verdict then
and when a timer fires.
"""

import math
from dataclasses import dataclass
from typing import Literal

from prfaas.scheduler.arrivals import Arrival, Arrivals, Stretch

Verdict = Literal["wait", "stuck", "slower_than_local"]

GRACE_S = 2.0
"""No pace is judged on less than this."""
SLOWER_FACTOR = 1.5
SLOWER_MARGIN_S = 1.0
LAGGING_FRACTION = 0.5
"""Of the time in which bytes came: if they lagged so long, their rate is the link's."""
LATE_FRACTION = 0.2
"""Of the bytes: if so many came after all was computed, nothing but the link has paced these."""
MIN_WORDS, MIN_STRETCH_S = 3, 0.02
"""Bytes that fewer words brought, or that came sooner, lay in some buffer: they tell of no link."""
IDLE_FACTOR = 10.0
"""A peer that lives but moves nothing is stuck after this many stall timeouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRates:
    """What a transfer reached; None where there was too little to tell."""

    prefill_tokens_per_s: float | None
    link_bytes_per_s: float | None
    is_link_bound: bool = True
    """Bytes waited for the link; else it carries that at least."""
    wire_fraction: float | None = None
    """Of each byte of KV, what crossed the link."""


class TransferMonitor:
    """What has come of one transfer, and what that says of the rest."""

    def __init__(
        self,
        *,
        started_s: float,
        num_tokens: int,
        tokens_done: int,
        num_kv_bytes: int,
        num_streamed_bytes: int,
        local_estimate_s: float | None,
        stall_timeout_s: float,
    ) -> None:
        """Begin to watch.

        Args:
            started_s: when the peer was asked.
            num_tokens: length of the prompt.
            tokens_done: leading tokens that the peer need not compute.
            num_kv_bytes: page bytes that will come in all.
            num_streamed_bytes: of these, the bytes that come in step with the tokens; windows are
                sent at the end.
            local_estimate_s: seconds a local prefill would take from now; None is unknown.
            stall_timeout_s: the peer is stuck after this long without a verified frame.
        """
        self.local_estimate_s = local_estimate_s
        """May be set anew when the local load changes."""
        self._started_s = started_s
        self._num_tokens = num_tokens
        self._num_kv_bytes = num_kv_bytes
        self._num_streamed_bytes = num_streamed_bytes
        self._stall_timeout_s = stall_timeout_s
        self._num_bytes = 0
        self._first_done = tokens_done
        self._tokens_done = tokens_done
        self._tokens_ahead = 0
        self._most_work = max(0, num_tokens - tokens_done)
        """The longest the queue up to our last token has been."""
        self._heard_s = started_s
        self._moved_s = started_s
        self._computing: tuple[float, int] | None = None
        """(since when, tokens done then) nobody's tokens are ahead of ours."""
        self._computed_s: float | None = None
        self._told: tuple[float, float, int] | None = None
        """(from when, until when, tokens computed meanwhile), by the peer's own word."""
        self._arrivals = Arrivals()
        self._lag: tuple[float, int] | None = None
        """(since when, bytes then) the bytes that came are fewer than those that were ready."""
        self._lagged_s = 0.0
        """For so long they were, since the first came."""

    def progressed(
        self,
        *,
        now_s: float,
        num_bytes: int,
        tokens_done: int,
        tokens_ahead: int,
        num_link_bytes: int | None = None,
    ) -> None:
        """Take note of a verified frame and the totals after it.

        `tokens_ahead` are other prompts' tokens that the peer computes before ours, `num_link_bytes` what has
        come over the link in all: other transfers share it. None: nothing else has come.
        """
        before_s, self._heard_s = self._heard_s, max(self._heard_s, now_s)
        now_s = self._heard_s
        if self._lag is not None and self._arrivals:
            self._lagged_s += now_s - before_s
        if tokens_ahead == 0 and self._computing is None:
            self._computing = (now_s, tokens_done)
        if num_bytes > self._num_bytes:
            in_all = num_bytes if num_link_bytes is None else num_link_bytes
            self._arrivals.add(Arrival(now_s, num_bytes, in_all))
        totals = (num_bytes, tokens_done, tokens_ahead)
        if totals != (self._num_bytes, self._tokens_done, self._tokens_ahead):
            self._moved_s = now_s
        self._num_bytes, self._tokens_done, self._tokens_ahead = totals
        if self._tokens_left == 0 and self._computed_s is None:
            self._computed_s = now_s
        self._most_work = max(self._most_work, self._work_left)
        if num_bytes >= self._num_ready_bytes:
            self._lag = None
        elif self._lag is None:
            self._lag = (now_s, num_bytes)

    def computed(self, *, began_s: float, ended_s: float, num_tokens: int) -> None:
        """Take the peer's word on when it began with the prompt and had computed it, on our clock.

        `num_tokens` it computed meanwhile, of all prompts that it worked on.
        """
        self._told = (began_s, ended_s, num_tokens)

    def verdict(self, now_s: float) -> Verdict:
        """Return what to do about the transfer now.

        "stuck": nothing verified came for the stall timeout, or nothing moved for ten of them.
        "slower_than_local": the time left is predicted above 1.5 local estimates plus 1 s.
        """
        if now_s - self._heard_s >= self._stall_timeout_s:
            return "stuck"
        if now_s - self._moved_s >= IDLE_FACTOR * self._stall_timeout_s:
            return "stuck"
        estimate_s = self.local_estimate_s
        if estimate_s is None or not math.isfinite(estimate_s) or estimate_s < 0:
            return "wait"
        if self.time_left_s(now_s) > SLOWER_FACTOR * estimate_s + SLOWER_MARGIN_S:
            return "slower_than_local"
        return "wait"

    def time_left_s(self, now_s: float) -> float:
        """Return the predicted seconds to the end; 0 while it is too early to tell.

        The slower of two paces that run at once: the peer's through its queue and our tokens, and,
        once bytes lag behind what was computed, the link's. Where nothing has moved yet, as much
        time is expected as has passed.
        """
        left_s = 0.0
        elapsed_s = now_s - self._started_s
        if elapsed_s >= GRACE_S:
            left_s = _at_pace(self._most_work - self._work_left, self._work_left, elapsed_s)
        if self._lag is not None:
            since_s, num_bytes = self._lag
            if now_s - since_s >= GRACE_S:
                bytes_left = max(0, self._num_kv_bytes - self._num_bytes)
                link_left_s = _at_pace(self._num_bytes - num_bytes, bytes_left, now_s - since_s)
                left_s = max(left_s, link_left_s)
        return left_s

    def rates(self, now_s: float) -> TransferRates:
        """Return what the transfer has reached so far, waiting for its turn left out.

        Once the peer has said when it had computed all, only what came later is paced by the link alone; before,
        bytes that lag behind those that can have been sent are taken to wait for it.
        """
        late = self._late_stretch
        if late is not None:
            return TransferRates(
                prefill_tokens_per_s=self._tokens_per_s(now_s),
                link_bytes_per_s=_rate(late.num_link_bytes, late.seconds),
            )
        whole = self._arrivals.behind(-math.inf)
        return TransferRates(
            prefill_tokens_per_s=self._tokens_per_s(now_s),
            link_bytes_per_s=_rate(whole.num_link_bytes, whole.seconds)
            if _shows_pace(whole)
            else None,
            is_link_bound=self._told is None and self._lagged_s >= LAGGING_FRACTION * whole.seconds,
        )

    @property
    def _late_stretch(self) -> Stretch | None:
        """What came after all was computed, where that is enough to show the link's pace."""
        if self._told is None:
            return None
        late = self._arrivals.behind(self._told[1])
        is_much = late.num_bytes >= LATE_FRACTION * self._num_bytes
        return late if is_much and _shows_pace(late) else None

    def _tokens_per_s(self, now_s: float) -> float | None:
        """The peer's rate by its own word, else as far as it could be seen from here."""
        if self._told is not None:
            began_s, ended_s, num_tokens = self._told
            return _rate(num_tokens, ended_s - began_s)
        if self._computing is None:
            return None
        since_s, tokens_done = self._computing
        end_s = now_s if self._computed_s is None else self._computed_s
        return _rate(self._tokens_done - tokens_done, end_s - since_s)

    @property
    def _tokens_left(self) -> int:
        return max(0, self._num_tokens - self._tokens_done)

    @property
    def _work_left(self) -> int:
        """Tokens up to and with our last one; none once ours are computed."""
        left = self._tokens_left
        return left + max(0, self._tokens_ahead) if left else 0

    @property
    def _num_ready_bytes(self) -> int:
        """Bytes that the peer can have sent by now."""
        to_compute = self._num_tokens - self._first_done
        if self._tokens_left == 0 or to_compute <= 0:
            return self._num_kv_bytes
        done = max(0, self._tokens_done - self._first_done)
        return self._num_streamed_bytes * done // to_compute


def _shows_pace(stretch: Stretch) -> bool:
    return stretch.num_words >= MIN_WORDS and stretch.seconds >= MIN_STRETCH_S


def _at_pace(done: int, left: int, elapsed_s: float) -> float:
    if left <= 0:
        return 0.0
    return elapsed_s if done <= 0 else left * elapsed_s / done


def _rate(amount: int, elapsed_s: float) -> float | None:
    return amount / elapsed_s if amount > 0 and elapsed_s > 0 else None
