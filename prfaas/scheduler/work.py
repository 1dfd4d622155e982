"""What requests bring to a node, and how much of that is there or on its way."""

from dataclasses import dataclass
from math import inf, isclose
from typing import NamedTuple

TRANSIT_S = 0.2
"""What was sent longer ago than this when a heartbeat comes is in its counts."""
FIRST_TOKEN_S = 1e-3
FIRST_STEP_S = 0.03
"""What a token's prefill and a decode step are taken to be as long as no node has shown any."""
LIKE_FRACTION = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What stands in for what a node has not shown yet: the mean of those that have."""

    token_s: float = FIRST_TOKEN_S
    step_s: float = FIRST_STEP_S
    output_tokens: float = 1.0
    """Of an answer."""

    def is_like(self, other: "Assumed") -> bool:
        """Return whether the difference is less than what anything here is known to."""
        return (
            isclose(self.token_s, other.token_s, rel_tol=LIKE_FRACTION)
            and isclose(self.step_s, other.step_s, rel_tol=LIKE_FRACTION)
            and isclose(self.output_tokens, other.output_tokens, rel_tol=LIKE_FRACTION)
        )


class Price(NamedTuple):
    """What a node takes, as far as it does not depend on the request."""

    guess: Assumed
    token_s: float
    """Of a token's prefill."""
    queue_s: float
    """Until a prefill begins."""
    crowd_s: float
    """What each token of an answer costs more than at an empty node: steps of a fuller batch take longer."""
    place_s: float
    """Until one more sequence has a place."""
    share: float
    """Of its batch, in use."""
    free_bytes: float
    """Of KV that it has room for; inf is unknown."""


class Job(NamedTuple):
    """What one request brings to the node that decodes it."""

    num_tokens: int = 0
    """To prefill there."""
    num_sequences: int = 1
    output_tokens: float = 0.0
    """That all of them are expected to draw."""
    num_bytes: int = 0
    """Of KV, in the end."""


class Load:
    """The work at a node: what it reported, what was sent since, and what of both has ended.

    A report has what was sent TRANSIT_S before it and earlier; what came later is on the way and is
    added. So work counts from the decision on, once.
    """

    def __init__(self) -> None:
        self._reported_active = 0
        self._reported_tokens = 0
        self._reported_free_bytes = inf
        self._on_the_way: dict[str, tuple[float, Job]] = {}
        """Request -> (when it was sent, what it brings)."""
        self._there: dict[str, Job] = {}
        self._num_there = self._num_late = 0
        """Sequences of ours."""
        self._late_tokens = self._late_bytes = 0
        """What those on the way bring."""
        self.num_queued = 0
        """Prompts of ours that wait for their prefill there or on the way, or are in it."""
        self._output_tokens = 0.0
        """That are expected of ours, there and on the way."""
        self.num_active = 0
        """Sequences, ours and others'; of what waits there and is not ours, requests."""
        self.queue_tokens = 0
        """Prompt tokens to prefill."""
        self.free_bytes = inf
        """Of KV that there is room for; inf is unknown."""
        self.price: Price | None = None
        """What all this costs, kept by whoever worked it out until the load changes."""

    @property
    def inflight(self) -> set[str]:
        """Return our requests that are there, or on the way."""
        return {*self._on_the_way, *self._there}

    @property
    def num_inflight(self) -> int:
        """Return how many of our requests are there, or on the way."""
        return len(self._on_the_way) + len(self._there)

    def mean_output_tokens(self, guess: Assumed) -> float:
        """Return how long an answer of ours there is expected to be; without any, the mean of all."""
        num_sequences = self._num_there + self._num_late
        has_any = num_sequences and self._output_tokens > 0
        return self._output_tokens / num_sequences if has_any else guess.output_tokens

    def reported(self, num_active: int, queue_tokens: int, free_bytes: float, now_s: float) -> None:
        """Take the node's own counts for all that has arrived."""
        arrived = [
            request_id
            for request_id, (sent_s, _) in self._on_the_way.items()
            if sent_s <= now_s - TRANSIT_S
        ]
        for request_id in arrived:
            job = self._there[request_id] = self._on_the_way.pop(request_id)[1]
            self._count_late(job, -1)
            self._num_there += job.num_sequences
        self._reported_active, self._reported_tokens = num_active, queue_tokens
        self._reported_free_bytes = free_bytes
        self._add_up()

    def sent(self, request_id: str, job: Job, now_s: float) -> None:
        """Count a request that is to be worked on there."""
        assert request_id not in self._on_the_way, f"{request_id} is on the way"
        assert request_id not in self._there, f"{request_id} is there"
        self._on_the_way[request_id] = now_s, job
        self._count_late(job, 1)
        self.num_queued += job.num_tokens > 0
        self._output_tokens += job.output_tokens
        self._add_up()

    def computed(self, request_id: str) -> None:
        """Take note that the request's prefill is done."""
        if request_id in self._on_the_way:
            sent_s, job = self._on_the_way[request_id]
            self._late_tokens -= job.num_tokens
            self._on_the_way[request_id] = sent_s, job._replace(num_tokens=0)
        else:
            job = self._there[request_id]
            self._reported_tokens = max(0, self._reported_tokens - job.num_tokens)
            self._there[request_id] = job._replace(num_tokens=0)
        self.num_queued -= job.num_tokens > 0
        self._add_up()

    def ended(self, request_id: str) -> None:
        """Take a request out of the counts."""
        if request_id in self._on_the_way:
            _, job = self._on_the_way.pop(request_id)
            self._count_late(job, -1)
        else:
            job = self._there.pop(request_id)
            self._num_there -= job.num_sequences
            self._reported_tokens = max(0, self._reported_tokens - job.num_tokens)
            self._reported_active = max(0, self._reported_active - job.num_sequences)
        self.num_queued -= job.num_tokens > 0
        self._output_tokens -= job.output_tokens
        self._add_up()

    def check(self) -> None:
        """Re-derive the sums."""
        assert not self._on_the_way.keys() & self._there.keys()
        assert min(self._reported_active, self._reported_tokens) >= 0
        late = [job for _, job in self._on_the_way.values()]
        assert self._num_late == sum(job.num_sequences for job in late)
        assert self._late_tokens == sum(job.num_tokens for job in late)
        assert self._late_bytes == sum(job.num_bytes for job in late)
        assert self.num_queued == sum(job.num_tokens > 0 for job in (*late, *self._there.values()))
        assert self._num_there == sum(job.num_sequences for job in self._there.values())
        outputs = [job.output_tokens for job in (*late, *self._there.values())]
        assert isclose(self._output_tokens, sum(outputs), rel_tol=1e-6, abs_tol=1e-3)
        sums = self.num_active, self.queue_tokens, self.free_bytes
        self._add_up()
        assert sums == (self.num_active, self.queue_tokens, self.free_bytes)
        assert self.num_active >= self.num_inflight

    def _add_up(self) -> None:
        # A report may lack a request of ours that just ended there; it is ours until we know.
        self.num_active = max(self._reported_active, self._num_there) + self._num_late
        self.queue_tokens = self._reported_tokens + self._late_tokens
        self.free_bytes = self._reported_free_bytes - self._late_bytes
        self.price = None

    def _count_late(self, job: Job, sign: int) -> None:
        self._num_late += sign * job.num_sequences
        self._late_tokens += sign * job.num_tokens
        self._late_bytes += sign * job.num_bytes
