"""Decides where each prompt is prefilled, and keeps count of what that set in motion.

`route` is the decision, a pure function. `Router` is the state around it: what was decided counts
from that moment on, and what became of it changes what the next decision sees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, assert_never, get_args

from prfaas.scheduler.monitor import TransferRates
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.profile import Link
from prfaas.scheduler.view import LocalView, PeerState, PeerView, View, known_rate
from prfaas.types import RouteName

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
SLOW_BACKOFF_S = 10.0
"""A peer that turned out slower than we are gets nothing for this long."""
EWMA_WEIGHT = 0.3
"""Of the newest observation."""

Reason = Literal[
    "short",
    "long",
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
REASONS: frozenset[Reason] = frozenset(get_args(Reason))
"""Every reason a route can have; a metric label, so the set is closed."""

Outcome = Literal[
    "completed",
    "cancelled",
    "pool_full",
    "prompt_refused",
    "peer_down",
    "peer_incompatible",
    "peer_overloaded",
    "peer_stuck",
    "transfer_failed",
    "slower_than_local",
    "peer_lacks_prefix",
]
"""How a remote route ended; all but the first two make the prefill local, for that reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What a decision needs to know of a prompt."""

    num_tokens: int
    hit_tokens: int
    """Leading tokens whose KV is here."""
    num_kv_bytes: int
    """KV that a remote prefill would bring."""
    peer_hit_tokens: Mapping[str, int] = field(default_factory=dict)
    """Leading tokens that peers are known to have, by their names; 0 of those that are left out."""

    def __post_init__(self) -> None:
        """Raise ValueError for counts that no prompt has."""
        if not 0 <= self.hit_tokens <= self.num_tokens:
            raise ValueError(f"a hit of {self.hit_tokens} of {self.num_tokens} tokens")
        hits = self.peer_hit_tokens.values()
        if hits and not 0 <= min(hits) <= max(hits) <= self.num_tokens:
            raise ValueError(f"peers' hits of {[*hits]} of {self.num_tokens} tokens")
        if self.num_kv_bytes < 0:
            raise ValueError(f"{self.num_kv_bytes} bytes of KV")

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
) -> Route:
    """Return the route of one prompt.

    Up to `threshold_tokens` uncached tokens stay local (PrfaaS §3.4.3, bandwidth scarce: each
    cache is judged alone). Longer ones go to the usable peer with the earliest predicted first
    token. `force` overrides the threshold, never a peer's state.
    """
    if force == "local":
        return _local(request, view, "forced")
    if force is None and request.uncached_tokens <= options.threshold_tokens:
        return _local(request, view, "short")
    if not view.peers:
        return _local(request, view, "no_peer")
    best = _best(request, view, now_s)
    if best is None:
        refusals = {peer.refusal(now_s) for peer in view.peers}
        # The peer nearest to being of use gives the reason.
        for reason in ("peer_overloaded", "peer_down", "peer_incompatible"):
            if reason in refusals:
                return _local(request, view, reason)
        raise AssertionError(f"no refusal in {refusals}")
    return Route(
        name="remote",
        reason="long" if force is None else "forced",
        peer=best.peer,
        predicted_ttft_s=_peer_ttft_s(best, request),
    )


def _local(request: RouteRequest, view: View, reason: Reason) -> Route:
    predicted_s = view.local.ttft_s(num_tokens=request.uncached_tokens)
    return Route(name="local", reason=reason, predicted_ttft_s=predicted_s)


def _peer_ttft_s(peer: PeerView, request: RouteRequest) -> float | None:
    num_tokens = request.peer_tokens(peer.peer)
    return peer.ttft_s(num_tokens=num_tokens, num_kv_bytes=request.num_kv_bytes)


def _best(request: RouteRequest, view: View, now_s: float) -> PeerView | None:
    """Return the usable peer with the earliest first token; None if none is usable.

    One that was heard lately comes before all that were not: if none was, all are tried. Those of unknown
    rate come first, by load; ties by name.
    """
    num_tokens, num_bytes = request.num_tokens, request.num_kv_bytes
    hit_of = request.peer_hit_tokens.get
    best, best_key, best_s = None, (True, inf, 0, ""), inf
    for peer in view.peers:
        is_stale = False
        if now_s > peer.clear_until_s:
            if peer.refusal(now_s) is not None:
                continue
            is_stale = peer.is_stale(now_s)
        ttft_s, token_s = 0.0, peer.token_s
        if token_s is not None:  # as PeerView.ttft_s, without its calls: there may be many peers
            compute_s = (num_tokens - hit_of(peer.peer, 0)) * token_s
            transfer_s = num_bytes * peer.byte_s
            ttft_s = peer.queue_s + peer.trip_s
            ttft_s += compute_s if compute_s > transfer_s else transfer_s  # noqa: FURB136 - 3x max()
        if best is None or ttft_s <= best_s or best_key[0]:
            key = (is_stale, ttft_s, peer.num_inflight_tokens, peer.peer)
            if best is None or key < best_key:
                best, best_key, best_s = peer, key, ttft_s
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    peer: str
    num_tokens: int
    started_s: float


class Router:
    """The peers' states, and each remote prefill between its decision and its end."""

    def __init__(
        self,
        *,
        peers: Sequence[str],
        options: SchedulerOptions,
        expected_link: Link | None = None,
    ) -> None:
        self._options = options
        self._peers = {peer: PeerView(peer=peer, expected_link=expected_link) for peer in peers}
        self._inflight: dict[str, _InFlight] = {}

    def view(self, local: LocalView) -> View:
        """Return what `route` would look at now."""
        return View(peers=tuple(self._peers.values()), local=local)

    def peer(self, name: str) -> PeerView:
        """Return what is known of one peer. Raises KeyError for a name not given at the start."""
        return self._peers[name]

    def is_usable(self, peer: str, now_s: float) -> bool:
        """Return whether a long prompt could be sent to the peer now."""
        return self._peers[peer].refusal(now_s) is None

    def route(
        self,
        request_id: str,
        request: RouteRequest,
        *,
        local: LocalView,
        now_s: float,
        force: RouteName | None = None,
    ) -> Route:
        """Return the request's route; a remote one is in flight at once, until `ended`."""
        assert request_id not in self._inflight, f"{request_id} has a route"
        decided = route(request, self.view(local), self._options, now_s, force)
        if decided.peer is not None:
            peer = self._peers[decided.peer]
            num_tokens = request.peer_tokens(peer.peer)
            self._inflight[request_id] = _InFlight(
                peer=peer.peer, num_tokens=num_tokens, started_s=now_s
            )
            self._peers[peer.peer] = replace(
                peer,
                num_inflight=peer.num_inflight + 1,
                num_inflight_tokens=peer.num_inflight_tokens + num_tokens,
            )
        return decided

    def ended(
        self,
        request_id: str,
        outcome: Outcome,
        *,
        now_s: float,
        rates: TransferRates | None = None,
        retry_after_s: float = FIRST_BACKOFF_S,
    ) -> None:
        """Take a remote prefill out of flight and learn from how it went.

        Exactly once for each remote route. `retry_after_s` is an overloaded peer's wish.
        """
        ended = self._inflight.pop(request_id)
        peer = self._peers[ended.peer]
        peer = replace(
            peer,
            num_inflight=peer.num_inflight - 1,
            num_inflight_tokens=peer.num_inflight_tokens - ended.num_tokens,
        )
        if peer.queue_heard_s is not None and peer.queue_heard_s >= ended.started_s:
            queue_tokens = max(0, peer.num_queue_tokens - ended.num_tokens)
            peer = replace(peer, num_queue_tokens=queue_tokens)
        if rates is not None:
            peer = replace(
                peer,
                prefill_tokens_per_s=_ewma(peer.prefill_tokens_per_s, rates.prefill_tokens_per_s),
                link_bytes_per_s=_ewma(peer.link_bytes_per_s, rates.link_bytes_per_s),
            )
        self._peers[peer.peer] = _after(peer, outcome, ended.started_s, now_s, retry_after_s)

    def heard(
        self,
        peer: str,
        *,
        now_s: float,
        is_ready: bool,
        num_queue_tokens: int = 0,
        prefill_tokens_per_s: float | None = None,
    ) -> None:
        """Take note of a compatible peer's word about itself.

        It does not end a backoff that transfers have earned (more than one failure in a row), nor
        the wait an overloaded peer asked for.
        """
        old = self._peers[peer]
        is_waiting = old.retry_at_s is not None and now_s < old.retry_at_s
        state: PeerState = "ready" if is_ready else "not_ready"
        if is_ready and is_waiting and old.state == "overloaded":
            state = "overloaded"
        elif is_ready and is_waiting and old.num_failures > 1:
            state = "down"
        self._peers[peer] = replace(
            old,
            state=state,
            heard_s=now_s,
            num_queue_tokens=max(0, num_queue_tokens),
            queue_heard_s=now_s,
            num_silences=0,
            reported_tokens_per_s=known_rate(prefill_tokens_per_s),
        )

    def measured(self, peer: str, *, rtt_s: float | None) -> None:
        """Take note of the round trip to a peer; None is unknown."""
        self._peers[peer] = replace(self._peers[peer], rtt_s=known_rate(rtt_s))

    def unreachable(self, peer: str, *, now_s: float) -> None:
        """Take note that the peer did not answer."""
        old = self._peers[peer]
        silent = replace(old, state="down", num_silences=old.num_silences + 1)
        self._peers[peer] = replace(silent, retry_at_s=_later(silent, now_s))

    def incompatible(self, peer: str, *, now_s: float) -> None:
        """Take note that the peer's KV is of no use here, until it is heard again."""
        self._peers[peer] = replace(self._peers[peer], state="incompatible", heard_s=now_s)

    def check(self) -> None:
        """Re-derive the counts in flight from the routes in flight."""
        for name, peer in self._peers.items():
            ours = [inflight for inflight in self._inflight.values() if inflight.peer == name]
            assert peer.num_inflight == len(ours), f"{name}: {peer.num_inflight} in flight"
            assert peer.num_inflight_tokens == sum(inflight.num_tokens for inflight in ours)


def _after(
    peer: PeerView, outcome: Outcome, started_s: float, now_s: float, retry_after_s: float
) -> PeerView:
    """Return the peer's view after one transfer's end."""
    match outcome:
        case "cancelled" | "pool_full" | "prompt_refused" | "peer_lacks_prefix":
            return peer
        case "completed":
            is_out = peer.state in ("incompatible", "not_ready")
            state: PeerState = peer.state if is_out else "ready"
            return replace(peer, state=state, heard_s=now_s, num_failures=0)
        case "peer_incompatible":
            return replace(peer, state="incompatible", heard_s=now_s)
        case "peer_overloaded":
            return _overloaded(peer, now_s, retry_after_s)
        case "slower_than_local":
            return _overloaded(peer, now_s, SLOW_BACKOFF_S)
        case "peer_down" | "peer_stuck" | "transfer_failed":
            return _failed(peer, started_s, now_s)
        case _:
            assert_never(outcome)


def _overloaded(peer: PeerView, now_s: float, wait_s: float) -> PeerView:
    if peer.state in ("down", "not_ready", "incompatible"):
        return peer
    wait_s = min(max(wait_s, 0.0), MAX_BACKOFF_S)
    return replace(peer, state="overloaded", heard_s=now_s, retry_at_s=now_s + wait_s)


def _failed(peer: PeerView, started_s: float, now_s: float) -> PeerView:
    """Return the view after a failure; one of a transfer older than the last failure adds nothing."""
    if peer.state == "incompatible":
        return peer
    if peer.failed_s is None or started_s >= peer.failed_s:
        peer = replace(peer, num_failures=peer.num_failures + 1, failed_s=now_s)
    state: PeerState = "not_ready" if peer.state == "not_ready" else "down"
    return replace(peer, state=state, retry_at_s=_later(peer, now_s))


def _later(peer: PeerView, now_s: float) -> float:
    """Return when a down peer may be tried again: twice as far off with every failure."""
    doublings = min(max(peer.num_failures, peer.num_silences, 1) - 1, 10)
    return now_s + min(FIRST_BACKOFF_S * 2.0**doublings, MAX_BACKOFF_S)


def _ewma(old: float | None, new: float | None) -> float | None:
    """Return the average moved towards `new`; what is unknown changes nothing."""
    new = known_rate(new)
    if new is None:
        return old
    return new if old is None else old + EWMA_WEIGHT * (new - old)
