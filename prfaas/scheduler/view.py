"""What is known of the peers and of the local engine, how old it is, and what it predicts.

Values only: `router.Router` makes the next one from what it hears.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from prfaas.scheduler.pace import Pace, Prefill
from prfaas.scheduler.profile import Link

PeerState = Literal["unknown", "ready", "not_ready", "down", "incompatible", "overloaded"]
"""not_ready: by its own word, as while it loads or drains."""

STALE_AFTER_S = 10.0
"""A peer that was not heard for this long may be gone: it gets one request at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """One prefill peer, as last heard of and as used by us since."""

    peer: str
    state: PeerState = "unknown"
    prefill_tokens_per_s: float | None = None
    """What our transfers from it have reached, all lengths together."""
    prefills: tuple[Prefill, ...] = ()
    """The last ones there, the newest first."""
    pace: Pace | None = None
    """The line through them; None: every prompt has the one rate."""
    link_bytes_per_s: float | None = None
    """What the link carries: a moving average of transfers that waited for it, and no less than what came
    over it since."""
    link_floor_bytes_per_s: float | None = None
    """What came over it while none has waited for it: it carries that at least."""
    egress_limit_bytes_per_s: float | None = None
    """What it sends at most, by its own word: the link carries no more."""
    wire_fraction: float = 1.0
    """Of each byte of KV, what crossed the link of late: the limit is of these."""
    goodput_bytes_per_s: float | None = None
    """What came over it lately, idle times included."""
    rtt_s: float | None = None
    """Of the KV connections to it, while some are open."""
    expected_link: Link | None = None
    """As it was once measured; stands in for rate and round trip until they are known."""
    reported_tokens_per_s: float | None = None
    """Its own word on its prefill rate; stands in until a transfer has shown one."""
    num_queue_tokens: int = 0
    """Tokens waiting there, everyone's, as it last said, without those of ours that have ended since."""
    queue_heard_s: float | None = None
    """When it said so."""
    heard_s: float | None = None
    used_s: float | None = None
    """When our last transfer from it ended that showed something of its prefill."""
    num_failures: int = 0
    """Transfers in a row that failed by its fault; those of one moment count once."""
    num_silences: int = 0
    """Times in a row that it could not be reached."""
    failed_s: float | None = None
    retry_at_s: float | None = None
    """When a down or overloaded peer may be tried again."""
    num_inflight: int = 0
    num_inflight_tokens: int = 0
    """Tokens that we have asked it for; counted from the decision on."""
    num_inflight_bytes: int = 0
    """Their KVCache."""
    spent_bytes: float = 0.0
    """Of the egress budget, at `spent_at_s`; it has come back since at the budget's rate."""
    spent_at_s: float = 0.0
    excesses_s: tuple[float, ...] = ()
    """By how much our last prefills there took longer than rates, queues and round trips explain."""
    queue_s: float = field(init=False, repr=False, compare=False)
    """What is there before a prompt: as it reported or as we have in flight, whichever is more."""
    token_s: float | None = field(init=False, repr=False, compare=False)
    """Of each token of a prefill; None while its rate is unknown."""
    fixed_s: float = field(init=False, repr=False, compare=False)
    """Of each prefill besides."""
    byte_s: float = field(init=False, repr=False, compare=False)
    """Of a byte on the link; 0 while that is unknown."""
    backlog_s: float = field(init=False, repr=False, compare=False)
    """Of what we have in flight on the link."""
    trip_s: float = field(init=False, repr=False, compare=False)
    """What each prefill costs besides: a round trip, and the least that the last ones took longer than
    rates and queues explain."""
    clear_until_s: float = field(init=False, repr=False, compare=False)
    """Until then there is no refusal and no trial, whatever else is true; -inf promises nothing."""

    def __post_init__(self) -> None:
        """Work out once what each decision about the peer needs: there are many for one change."""
        rate = self.tokens_per_s
        link_rate, rtt_s = known_rate(self.link_bytes_per_s), self.rtt_s
        if self.expected_link is not None:
            floor = known_rate(self.link_floor_bytes_per_s) or 0.0
            link_rate = link_rate or max(self.expected_link.bytes_per_s, floor)
            rtt_s = self.expected_link.rtt_s if rtt_s is None else rtt_s
        limit = known_rate(self.egress_limit_bytes_per_s)
        if limit is not None:
            limit = known_rate(limit / self.wire_fraction) if self.wire_fraction > 0 else None
            link_rate = min(link_rate or math.inf, limit or math.inf)
        is_clear = self.state == "ready" and self.num_failures <= 0 and self.heard_s is not None
        keep = object.__setattr__
        pace = self.pace or (None if rate is None else Pace(0.0, 1 / rate))
        keep(self, "token_s", None if pace is None else pace.token_s)
        keep(self, "fixed_s", 0.0 if pace is None else pace.fixed_s)
        keep(self, "queue_s", self.queue_with_s(self.num_inflight, self.num_inflight_tokens))
        byte_s = 0.0 if link_rate is None else 1 / link_rate
        keep(self, "byte_s", byte_s)
        keep(self, "backlog_s", self.backlog_with_s(self.num_inflight_bytes))
        keep(self, "trip_s", (rtt_s or 0.0) + max(0.0, min(self.excesses_s, default=0.0)))
        keep(
            self, "clear_until_s", (self.heard_s or 0.0) + STALE_AFTER_S if is_clear else -math.inf
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Return the rate of its prefill, whatever their lengths; None while it is unknown."""
        return known_rate(self.prefill_tokens_per_s) or known_rate(self.reported_tokens_per_s)

    def queue_with_s(self, num_inflight: int, num_inflight_tokens: int) -> float:
        """Return `queue_s` as it is with so many prompts and tokens of ours in flight."""
        if self.token_s is None:
            return 0.0
        queue_tokens = max(self.num_queue_tokens, num_inflight_tokens, 0)
        return queue_tokens * self.token_s + max(num_inflight, 0) * self.fixed_s

    def backlog_with_s(self, num_inflight_bytes: int) -> float:
        """Return `backlog_s` as it is with so many bytes in flight."""
        return max(num_inflight_bytes, 0) * self.byte_s

    def is_stale(self, now_s: float) -> bool:
        """Return whether it may be gone, for it was not heard for too long."""
        return self.heard_s is None or now_s - self.heard_s > STALE_AFTER_S

    def is_on_trial(self, now_s: float) -> bool:
        """Return whether the next transfer has to show first that the peer works."""
        if self.state in ("unknown", "not_ready", "down") or self.num_failures > 0:
            return True
        return self.is_stale(now_s)

    def refusal(
        self, now_s: float
    ) -> Literal["peer_down", "peer_incompatible", "peer_overloaded"] | None:
        """Return why no prefill may go there now, or None if one may.

        A peer on trial gets one transfer at a time, a down one not before its backoff is over, one that
        is not ready none until it says that it is, or says nothing any more.
        """
        if self.state == "incompatible":
            return "peer_incompatible"
        if self.state == "not_ready" and not self.is_stale(now_s):
            return "peer_down"
        if self.retry_at_s is not None and now_s < self.retry_at_s:
            if self.state == "overloaded":
                return "peer_overloaded"
            if self.state in ("down", "not_ready"):
                return "peer_down"
        if self.is_on_trial(now_s) and self.num_inflight > 0:
            return "peer_down"
        return None

    def ttft_s(
        self, *, num_tokens: int, num_kv_bytes: int, num_tail_bytes: int = 0
    ) -> float | None:
        """Return the predicted seconds to the first token; None while the rates are unknown.

        The queue is what it reported or what we have in flight there, whichever is more; bytes wait
        for those that are under way. KV is sent as it is computed, so the slower of the two counts, but for
        `num_tail_bytes` of it that only the last token makes; the request costs a round trip.
        """
        if self.token_s is None:
            return None
        computed_s = self.fixed_s + num_tokens * self.token_s
        streamed_s = (num_kv_bytes - num_tail_bytes) * self.byte_s
        done_s = max(self.queue_s + max(computed_s, streamed_s), self.backlog_s + streamed_s)
        return done_s + (num_tail_bytes * self.byte_s + self.trip_s)

    def work_s(self, *, num_tokens: int, num_kv_bytes: int) -> float | None:
        """Return the same without any queue: the least that it can take."""
        if self.token_s is None:
            return None
        computed_s = self.fixed_s + num_tokens * self.token_s
        return max(computed_s, num_kv_bytes * self.byte_s) + self.trip_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalView:
    """The engine of this node."""

    num_waiting_tokens: int = 0
    """Prompt tokens that are admitted or queued and not computed."""
    num_waiting: int = 0
    """Prompts that they are of."""
    prefill_tokens_per_s: float | None = None
    """As observed, or as a profile says of a prompt like this."""
    waiting_tokens_per_s: float | None = None
    """The same of the prompts that wait, which may be of other lengths; None: of all."""

    def ttft_s(self, *, num_tokens: int) -> float | None:
        """Return the predicted seconds to a first token behind `num_tokens`; None if unknown."""
        rate = known_rate(self.prefill_tokens_per_s)
        if rate is None:
            return None
        waiting_tokens, waiting_rate = max(self.num_waiting_tokens, 0), rate
        if self.waiting_tokens_per_s is not None:
            waiting_rate = known_rate(self.waiting_tokens_per_s) or rate
        if waiting_rate == rate:
            return (waiting_tokens + num_tokens) / rate
        return waiting_tokens / waiting_rate + num_tokens / rate


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that a routing decision looks at."""

    peers: tuple[PeerView, ...] = ()
    local: LocalView = LocalView()


def known_rate(rate: float | None) -> float | None:
    """Return a rate that can be divided by; None for one that is unset, zero, negative or NaN.

    Nor is one known whose inverse is no number.
    """
    if rate is None or not math.isfinite(rate) or rate <= 0 or 1 / rate == math.inf:
        return None
    return rate
