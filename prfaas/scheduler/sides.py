"""Here or at the best peer: what a node knows of both, as the policies of clusters see it.

The policies are those that the simulator drives; a node is a local cluster of one instance, its best
peer a PrfaaS cluster of one.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from prfaas.scheduler.forecast import (
    ClustersView,
    LinkView,
    PrefillView,
    Profiles,
    Prompt,
    RemoteView,
)
from prfaas.scheduler.policies import PolicyName, Predictive, Threshold
from prfaas.scheduler.view import LocalView, PeerView, known_rate

SideReason = Literal["short", "long", "earlier", "spares_others", "egress_budget"]

BUDGET_BURST_S = 10.0
"""The egress budget of so long may be spent at once, and overdrawn by as much."""
MARGIN_FRACTION = 0.25
"""What the other side of t has to save to be taken at first."""
RETURN_FRACTION = 0.05
"""The same once it was: noise between the two changes nothing."""


class Side(NamedTuple):
    """A policy's choice between the two."""

    is_remote: bool
    reason: SideReason


class _Works(Profiles):
    """What one prompt takes on both sides, worked out already; of other prompts it knows nothing.

    There are no curves: a policy that asks for one, as to move a cached prefix, gets an AttributeError.
    """

    __slots__ = ("_local_s", "_num_bytes", "_remote_s")
    _local_s: float
    _remote_s: float
    _num_bytes: int

    def __init__(self, local_s: float, remote_s: float, num_bytes: int) -> None:
        keep = object.__setattr__  # as the class above is frozen
        keep(self, "_local_s", local_s)
        keep(self, "_remote_s", remote_s)
        keep(self, "_num_bytes", num_bytes)

    def local_work_s(self, prompt: Prompt) -> float:
        """Return the seconds of the local prefill."""
        return self._local_s

    def remote_work_s(self, prompt: Prompt, index: int) -> float:
        """Return the seconds of the peer's prefill."""
        return self._remote_s

    def remote_works_s(self, prompt: Prompt, num_remotes: int) -> list[float]:
        """Return the same for each peer, which is one."""
        return [self._remote_s] * num_remotes

    def kv_bytes(self, prompt: Prompt) -> float:
        """Return the bytes that the peer would send."""
        return self._num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """One prompt, and the two places that could prefill it, both of known rates."""

    uncached_tokens: int
    """At the node."""
    peer_tokens: int
    """That the peer has to compute."""
    num_kv_bytes: int
    local: LocalView
    peer: PeerView
    egress_target: float

    def by(
        self, policy: PolicyName, threshold_tokens: float, now_s: float, *, has_left: bool
    ) -> Side:
        """Return what a policy chooses, of those that look at queues and link.

        `threshold`: the side of t, t as it is for them. `predictive`: the side of t, or the other one
        if it is predicted earlier by a margin. `has_left`: prompts like this went to that one before.
        """
        view = self._view(now_s)
        if policy == "threshold":
            adapted = Threshold(
                profiles=self._works,
                threshold_tokens=threshold_tokens,
                max_egress_fraction=self.egress_target,
            ).adapted(view, now_s)
            is_remote = self.uncached_tokens > adapted
            return Side(is_remote, "long" if is_remote else "short")
        assert policy == "predictive", f"{policy} does not compare"
        decision = Predictive(
            profiles=self._works,
            threshold_tokens=threshold_tokens,
            margin_fraction=RETURN_FRACTION if has_left else MARGIN_FRACTION,
        ).decide(self._prompt, view, now_s)
        reason = decision.reason
        assert reason in ("short", "long", "earlier", "spares_others", "egress_budget"), reason
        return Side(decision.remote is not None, reason)

    @property
    def _num_tokens(self) -> int:
        return max(self.uncached_tokens, self.peer_tokens)

    @property
    def _prompt(self) -> Prompt:
        num_tokens = self._num_tokens
        return Prompt(
            num_tokens=num_tokens,
            local_hit_tokens=num_tokens - max(self.uncached_tokens, 1),
            remote_hit_tokens=(num_tokens - max(self.peer_tokens, 1),),
        )

    @property
    def _works(self) -> Profiles:
        """What each side takes for this prompt, at the rates that it has now."""
        local_rate = known_rate(self.local.prefill_tokens_per_s)
        assert local_rate is not None, "nothing to compare with"
        assert self.peer.token_s is not None, "nothing to compare"
        return _Works(
            max(self.uncached_tokens, 1) / local_rate,
            self.peer.fixed_s + max(self.peer_tokens, 1) * self.peer.token_s,
            self.num_kv_bytes,
        )

    def _view(self, now_s: float) -> ClustersView:
        local, peer = self.local, self.peer
        waiting_s = local.ttft_s(num_tokens=0) or 0.0
        return ClustersView(
            local=_queue(waiting_s, local.num_waiting, now_s),
            remotes=(
                RemoteView(
                    name=peer.peer,
                    prefill=_queue(peer.queue_s, peer.num_inflight, now_s),
                    link=_link(peer, self.egress_target, now_s),
                ),
            ),
        )


def _queue(waiting_s: float, num_prompts: int, now_s: float) -> PrefillView:
    """Return one instance: the first prompt there is in service, all work is counted as waiting."""
    return PrefillView(
        num_instances=1,
        num_busy=int(waiting_s > 0),
        num_waiting=max(0, num_prompts - 1),
        waiting_work_s=waiting_s,
        taken_s=now_s,
    )


def _link(peer: PeerView, egress_target: float, now_s: float) -> LinkView:
    """Return the link to a peer; one of unknown rate is taken to be no limit."""
    if not peer.byte_s:
        return LinkView(bytes_per_s=inf, rtt_s=peer.trip_s)
    rate = egress_target / peer.byte_s
    limit_bytes = BUDGET_BURST_S * rate
    return LinkView(
        bytes_per_s=1 / peer.byte_s,
        rtt_s=peer.trip_s,
        backlog_bytes=max(0, peer.num_inflight_bytes),
        egress_bytes_per_s=known_rate(peer.goodput_bytes_per_s) or 0.0,
        budget_bytes=limit_bytes - spent_bytes(peer, egress_target, now_s),
        budget_limit_bytes=limit_bytes,
        budget_bytes_per_s=rate,
    )


def spent_with(
    peer: PeerView, num_bytes: int, egress_target: float, now_s: float
) -> tuple[float, float]:
    """Return `spent_bytes` and `spent_at_s` of a peer once so many bytes more are spent now.

    A link of unknown rate has no budget: nothing is spent.
    """
    if not peer.byte_s:
        return peer.spent_bytes, peer.spent_at_s
    spent = spent_bytes(peer, egress_target, now_s) + num_bytes
    return min(spent, _most_bytes(peer, egress_target)), now_s


def spent_fraction(peer: PeerView, egress_target: float, now_s: float) -> float:
    """Return the spent part of what the egress budget allows at once: up to 2, 0 without a budget."""
    spent = spent_bytes(peer, egress_target, now_s)
    return spent * peer.byte_s / (BUDGET_BURST_S * egress_target) if spent else 0.0


def spent_bytes(peer: PeerView, egress_target: float, now_s: float) -> float:
    """Return what of the egress budget is spent now: at most all of it, and as much overdrawn."""
    if not peer.byte_s:
        return 0.0
    rate = egress_target / peer.byte_s
    left = peer.spent_bytes - rate * max(0.0, now_s - peer.spent_at_s)
    return min(max(left, 0.0), _most_bytes(peer, egress_target))


def _most_bytes(peer: PeerView, egress_target: float) -> float:
    return 2 * BUDGET_BURST_S * egress_target / peer.byte_s
