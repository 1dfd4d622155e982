"""The decision where a prompt is prefilled, a pure function of what is known."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.peer_table import PeerTable
from prfaas.scheduler.policies import PolicyName
from prfaas.scheduler.sides import Sides
from prfaas.scheduler.view import LocalView, PeerView, View
from prfaas.types import RouteName

COMPARING: frozenset[PolicyName] = frozenset(("threshold", "predictive"))
"""Policies that look at queues and links."""

Reason = Literal[
    "short",
    "long",
    "policy",
    "earlier",
    "spares_others",
    "egress_budget",
    "forced",
    "no_peer",
    "peer_down",
    "peer_incompatible",
    "peer_overloaded",
    "pool_full",
    "prompt_refused",
    "peer_stuck",
    "transfer_failed",
    "slower_than_local",
    "peer_lacks_prefix",
]
"""short, long: the side of t. policy: it knows no other way. earlier, spares_others, egress_budget: why the
other side of t was taken; see `policies.PolicyReason`."""
REASONS: frozenset[Reason] = frozenset(get_args(Reason))
"""Every reason a route can have; a metric label, so the set is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What a decision needs to know of a prompt."""

    num_tokens: int
    hit_tokens: int
    """Leading tokens whose KV is here."""
    num_kv_bytes: int
    """KV that a remote prefill would bring."""
    num_tail_bytes: int = 0
    """Of these, what is made with the last token: windows and states at the end."""
    peer_hit_tokens: Mapping[str, int] = field(default_factory=dict)
    """Leading tokens that peers are known to have, by their names; 0 of those that are left out."""

    def __post_init__(self) -> None:
        """Raise ValueError for counts that no prompt has."""
        if not 0 <= self.hit_tokens <= self.num_tokens:
            raise ValueError(f"a hit of {self.hit_tokens} of {self.num_tokens} tokens")
        hits = self.peer_hit_tokens.values()
        if hits and not 0 <= min(hits) <= max(hits) <= self.num_tokens:
            raise ValueError(f"peers' hits of {[*hits]} of {self.num_tokens} tokens")
        if not 0 <= self.num_tail_bytes <= self.num_kv_bytes:
            raise ValueError(f"{self.num_kv_bytes} bytes of KV, {self.num_tail_bytes} at the end")

    @property
    def uncached_tokens(self) -> int:
        """The length that the threshold judges."""
        return self.num_tokens - self.hit_tokens

    def peer_tokens(self, peer: str) -> int:
        """Return the tokens that a peer has to compute."""
        return self.num_tokens - self.peer_hit_tokens.get(peer, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One decision: where, why, and when the first token is expected."""

    name: RouteName
    reason: Reason
    peer: str | None = None
    """Set exactly if the route is remote."""
    predicted_ttft_s: float | None = None


def route(
    request: RouteRequest,
    view: View,
    options: SchedulerOptions,
    now_s: float,
    force: RouteName | None = None,
    *,
    threshold_tokens: float | None = None,
    has_left: bool = False,
) -> Route:
    """Return the route of one prompt.

    What goes to a peer goes to the usable one with the earliest predicted first token; the policy of the
    options says what does. `static`: more than t uncached tokens (PrfaaS §3.4.3, bandwidth scarce: each
    cache is judged alone). `threshold` and `predictive` compare the two sides where the rates of both are
    known; where one is not, it is the side of t. `force` overrides the policy, never a peer's state.

    Args:
        request: the prompt.
        view: what is known.
        options: the policy and its knobs.
        now_s: on the clock of the view.
        force: where it has to be prefilled.
        threshold_tokens: t as it is now; None: of the options.
        has_left: prompts like this went to the other side of t last.
    """
    peers = PeerTable(view.peers)
    tokens = options.first_threshold_tokens if threshold_tokens is None else threshold_tokens
    return decide(request, peers, view.local, options, now_s, force, tokens, has_left)


def decide(
    request: RouteRequest,
    peers: PeerTable,
    local: LocalView,
    options: SchedulerOptions,
    now_s: float,
    force: RouteName | None,
    threshold_tokens: float,
    has_left: bool,
) -> Route:
    """Return the same as `route` of peers that stand side by side already."""
    policy = options.policy_in_force
    is_remote, reason = _wish(request, policy, force, threshold_tokens)
    compares = force is None and policy in COMPARING
    if not is_remote and not (compares and request.uncached_tokens and len(peers)):
        return _local(request, local, reason)
    best = peers.best(
        num_tokens=request.num_tokens,
        hits=request.peer_hit_tokens,
        num_kv_bytes=request.num_kv_bytes,
        num_tail_bytes=request.num_tail_bytes,
        now_s=now_s,
    )
    if best is None:
        return _local(request, local, _refusal(peers, now_s) if is_remote else reason)
    if compares and best.token_s is not None and local.ttft_s(num_tokens=0) is not None:
        sides = Sides(
            uncached_tokens=request.uncached_tokens,
            peer_tokens=request.peer_tokens(best.peer),
            num_kv_bytes=request.num_kv_bytes,
            local=local,
            peer=best,
            egress_target=options.egress_target,
        )
        is_remote, reason = sides.by(policy, threshold_tokens, now_s, has_left=has_left)
    if not is_remote:
        return _local(request, local, reason)
    return Route(
        name="remote", reason=reason, peer=best.peer, predicted_ttft_s=_peer_ttft_s(best, request)
    )


def _wish(
    request: RouteRequest, policy: PolicyName, force: RouteName | None, threshold_tokens: float
) -> tuple[bool, Reason]:
    """Return whether the prompt is to go to a peer, before anything is known of one, and why."""
    if force is not None:
        return force == "remote", "forced"
    if policy in ("local", "always-remote"):
        return policy == "always-remote", "policy"
    is_long = request.uncached_tokens > threshold_tokens
    return is_long, "long" if is_long else "short"


def _local(request: RouteRequest, local: LocalView, reason: Reason) -> Route:
    predicted_s = local.ttft_s(num_tokens=request.uncached_tokens)
    return Route(name="local", reason=reason, predicted_ttft_s=predicted_s)


def _refusal(peers: PeerTable, now_s: float) -> Reason:
    """Return why none of the peers is usable: the peer nearest to being of use gives the reason."""
    if not len(peers):
        return "no_peer"
    refusals = {peer.refusal(now_s) for peer in peers.views}
    reasons: tuple[Reason, ...] = ("peer_overloaded", "peer_down", "peer_incompatible")
    for reason in reasons:
        if reason in refusals:
            return reason
    raise AssertionError(f"no refusal in {refusals}")


def _peer_ttft_s(peer: PeerView, request: RouteRequest) -> float | None:
    return peer.ttft_s(
        num_tokens=request.peer_tokens(peer.peer),
        num_kv_bytes=request.num_kv_bytes,
        num_tail_bytes=request.num_tail_bytes,
    )
