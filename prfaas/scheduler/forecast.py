"""What is known of clusters and of the links between them at one moment, and what it predicts.

Values only. A cluster's view was taken some time ago; what was sent there since counts at once.
"""

from dataclasses import dataclass
from math import inf

from prfaas.scheduler.profile import Profile

STALE_AFTER_S = 10.0
"""A cluster that was not heard for this long is used only where no other was heard."""
BUSY_JOBS, BUSY_POWER = 0.5, 4
"""Without it short prompts fill the fast instances of a large cluster before anybody waits there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a decision knows of a request."""

    num_tokens: int
    local_hit_tokens: int = 0
    """Leading tokens whose KV the local cluster has."""
    remote_hit_tokens: tuple[int, ...] = ()
    """The same of each PrfaaS cluster, in the order of the view; none where it is empty."""
    arrived_s: float | None = None
    """When it came, on the clock of the views: a policy may hold it back. None has to go now."""

    def __post_init__(self) -> None:
        """Raise ValueError for counts that no prompt has."""
        for hit in (self.local_hit_tokens, *self.remote_hit_tokens):
            if not 0 <= hit < self.num_tokens:
                raise ValueError(f"a hit of {hit} of {self.num_tokens} tokens")

    @property
    def uncached_tokens(self) -> int:
        """Return the length that a threshold judges: what the local cluster would compute."""
        return self.num_tokens - self.local_hit_tokens

    def remote_tokens(self, index: int) -> int:
        """Return what a PrfaaS cluster would compute, from its own cache."""
        hits = self.remote_hit_tokens
        return self.num_tokens - (hits[index] if hits else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillView:
    """The prefill instances of a cluster, and the queue before them."""

    num_instances: int
    num_busy: int = 0
    num_waiting: int = 0
    waiting_work_s: float = 0.0
    """Seconds of service that the queue asks for."""
    residual_work_s: float = 0.0
    """Seconds of service that are left of the jobs in service, together."""
    taken_s: float = 0.0
    num_sent: int = 0
    """Jobs sent there since it was taken."""
    sent_work_s: float = 0.0
    """Their seconds of service."""

    def wait_s(self, now_s: float) -> float:
        """Return the predicted wait of one more job; infinite where no instance is.

        First come, first served: what is ahead, divided by the instances, and the time until the
        first of the busy ones is free (of evenly spread rests the least is 2 / (n + 1) of their
        mean). The queue has gone on since the view was taken.
        """
        if self.num_instances <= 0:
            return inf
        if self.num_busy + self.num_sent < self.num_instances:
            return 0.0
        ahead_s = (self.waiting_work_s + self.sent_work_s) / self.num_instances
        mean_rest_s = self.residual_work_s / max(self.num_busy, 1)
        first_free_s = 2 * mean_rest_s / (self.num_instances + 1)
        return max(0.0, ahead_s + first_free_s - max(0.0, now_s - self.taken_s))

    def delayed_jobs(self) -> float:
        """Return how many others one more job delays by its service: the queue for each instance.

        About as many come while it waits as wait before it. As the last idle instances go, it also
        delays those that come next: BUSY_JOBS of them at the last one.
        """
        num_instances = max(self.num_instances, 1)
        busy = min(1.0, (self.num_busy + self.num_sent) / num_instances)
        queue = (self.num_waiting + self.num_sent) / num_instances
        return queue + BUSY_JOBS * busy**BUSY_POWER


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """The way from a PrfaaS cluster to the local one."""

    bytes_per_s: float
    """What it carries for us now; 0 is an outage."""
    rtt_s: float = 0.0
    backlog_bytes: float = 0.0
    """Of KVCache that was asked for and has not arrived."""
    outgoing_backlog_bytes: float = 0.0
    """Of prefixes on their way there."""
    egress_bytes_per_s: float = 0.0
    """What came lately."""
    budget_bytes: float = inf
    """What may be asked for at once within the egress budget."""
    budget_limit_bytes: float = inf
    """What may be asked for at once after a rest."""
    budget_bytes_per_s: float = inf
    """How fast the budget comes back."""

    @property
    def utilisation_fraction(self) -> float:
        """Return the share of the link that KVCache fills; 1 in an outage."""
        return self.egress_bytes_per_s / self.bytes_per_s if self.bytes_per_s > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteView:
    """One PrfaaS cluster and its link."""

    name: str
    prefill: PrefillView
    link: LinkView

    @property
    def is_usable(self) -> bool:
        """Return whether a prefill there could ever arrive."""
        return self.prefill.num_instances > 0 and self.link.bytes_per_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClustersView:
    """All that a policy looks at."""

    local: PrefillView
    remotes: tuple[RemoteView, ...] = ()
    moves_cache: bool = False
    """Whether a cached prefix can be sent to another cluster before a prefill there begins."""

    def candidates(self, now_s: float) -> tuple[int, ...]:
        """Return the PrfaaS clusters to choose from: usable ones, fresh ones if there are any."""
        usable, fresh = [], []
        for index, remote in enumerate(self.remotes):
            if remote.is_usable:
                usable.append(index)
                if now_s - remote.prefill.taken_s <= STALE_AFTER_S:
                    fresh.append(index)
        return tuple(fresh or usable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """What the instances of both sides take."""

    local: Profile
    remote: Profile | None = None

    def local_work_s(self, prompt: Prompt) -> float:
        """Return the seconds of a local prefill."""
        return self.local.prefill_s(prompt.uncached_tokens)

    def remote_work_s(self, prompt: Prompt, index: int) -> float:
        """Return the seconds of a prefill at a PrfaaS cluster."""
        assert self.remote is not None, "a PrfaaS cluster without a profile"
        return self.remote.prefill_s(prompt.remote_tokens(index))

    def kv_bytes(self, prompt: Prompt) -> float:
        """Return the bytes to move: KV of the tokens that lack locally, states whole."""
        return self.prefix_bytes(prompt.num_tokens, prompt.local_hit_tokens)

    def prefix_bytes(self, num_tokens: int, held_tokens: int) -> float:
        """Return the bytes of a prefix of `num_tokens` for who has `held_tokens` of it."""
        assert self.remote is not None, "a PrfaaS cluster without a profile"
        curve = self.remote.kv_bytes
        return max(0.0, curve(num_tokens) - (curve(held_tokens) - curve(0)))

    def local_ttft_s(self, prompt: Prompt, view: ClustersView, now_s: float) -> float:
        """Return the predicted seconds to the first token of a local prefill."""
        return view.local.wait_s(now_s) + self.local_work_s(prompt)

    def remote_works_s(self, prompt: Prompt, num_remotes: int) -> list[float]:
        """Return the seconds of a prefill at each PrfaaS cluster."""
        if not prompt.remote_hit_tokens:
            return [self.remote_work_s(prompt, 0)] * num_remotes
        return [self.remote_work_s(prompt, index) for index in range(num_remotes)]


def remote_ttft_s(remote: RemoteView, now_s: float, *, work_s: float, num_bytes: float) -> float:
    """Return the predicted seconds to the first token of a prefill of `work_s` at a PrfaaS cluster.

    The slower of prefill and link, and a round trip: KVCache, `num_bytes` of it, is sent as it is
    computed, behind what is under way.
    """
    if not remote.is_usable:
        return inf
    computed_s = remote.prefill.wait_s(now_s) + work_s
    arrived_s = (remote.link.backlog_bytes + num_bytes) / remote.link.bytes_per_s
    return max(computed_s, arrived_s) + remote.link.rtt_s
