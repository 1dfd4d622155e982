"""What is known of the peers, and what decisions set in motion.

Around the pure decision, `decision.route`: what was decided counts from that moment on, and what became
of it changes what the next decision sees.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from prfaas.scheduler.decision import COMPARING, REASONS, Reason, Route, RouteRequest, decide, route
from prfaas.scheduler.left_sides import LeftSides
from prfaas.scheduler.monitor import TransferRates
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.peer_states import (
    EWMA_WEIGHT,
    FIRST_BACKOFF_S,
    FORGET_AFTER_S,
    MAX_BACKOFF_S,
    SLOW_BACKOFF_S,
    Outcome,
    after,
    forgotten,
    later,
    learnt,
)
from prfaas.scheduler.peer_table import Booking, PeerTable
from prfaas.scheduler.profile import Link
from prfaas.scheduler.sides import spent_fraction, spent_with
from prfaas.scheduler.view import LocalView, PeerState, PeerView, View, known_rate
from prfaas.types import RouteName

__all__ = [
    "EWMA_WEIGHT",
    "FIRST_BACKOFF_S",
    "MAX_BACKOFF_S",
    "REASONS",
    "SLOW_BACKOFF_S",
    "Outcome",
    "Reason",
    "Route",
    "RouteRequest",
    "Router",
    "route",
]

NUM_EXCESSES = 8
"""Prefills of late, whose least excess the next one is expected to have, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    peer: str
    num_tokens: int
    num_bytes: int
    started_s: float
    explained_s: float | None
    """What it was predicted to take, without the excess of others before it."""


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
        self._expected_link = expected_link
        self._threshold_tokens: float = options.first_threshold_tokens
        self._peers = PeerTable(PeerView(peer=peer, expected_link=expected_link) for peer in peers)
        self._inflight: dict[str, _InFlight] = {}
        self._left = LeftSides()

    @property
    def options(self) -> SchedulerOptions:
        """Return what was set."""
        return self._options

    @property
    def threshold_tokens(self) -> float:
        """Return t as it is now."""
        return self._threshold_tokens

    def set_threshold(self, tokens: float) -> None:
        """Route by another t from now on. Raises ValueError for one that is no length."""
        if not (isfinite(tokens) and tokens >= 0):
            raise ValueError(f"a threshold of {tokens} tokens")
        self._threshold_tokens = tokens

    @property
    def peers(self) -> tuple[str, ...]:
        """Return the names of all peers."""
        return tuple(view.peer for view in self._peers.views)

    def add_peer(self, name: str) -> None:
        """Know a peer from now on; one that is known stays as it is."""
        if name in self._peers:
            return
        ours = [inflight for inflight in self._inflight.values() if inflight.peer == name]
        self._peers.put(
            PeerView(
                peer=name,
                expected_link=self._expected_link,
                num_inflight=len(ours),
                num_inflight_tokens=sum(inflight.num_tokens for inflight in ours),
                num_inflight_bytes=sum(inflight.num_bytes for inflight in ours),
            )
        )

    def remove_peer(self, name: str) -> None:
        """Forget a peer; what is in flight there may still end, and words about it are ignored."""
        if name in self._peers:
            self._peers.remove(name)

    def view(self, local: LocalView) -> View:
        """Return what `route` would look at now."""
        return View(peers=self._peers.views, local=local)

    def peer(self, name: str) -> PeerView:
        """Return what is known of one peer. Raises KeyError for one that is not known."""
        return self._peers[name]

    def is_usable(self, peer: str, now_s: float) -> bool:
        """Return whether a long prompt could be sent to the peer now."""
        return peer in self._peers and self._peers[peer].refusal(now_s) is None

    def decide(
        self,
        request: RouteRequest,
        *,
        local: LocalView,
        now_s: float,
        force: RouteName | None = None,
        among: Iterable[PeerView] | None = None,
    ) -> Route:
        """Return the route that the request would have now; nothing comes of it.

        `among` are the peers to choose from, as the caller sees them for this prompt; None: all.
        """
        return decide(
            request,
            self._peers if among is None else PeerTable(among),
            local,
            self._options,
            now_s,
            force,
            self._threshold_tokens,
            request.uncached_tokens in self._left,
        )

    def route(
        self,
        request_id: str,
        request: RouteRequest,
        *,
        local: LocalView,
        now_s: float,
        force: RouteName | None = None,
        among: Iterable[PeerView] | None = None,
    ) -> Route:
        """Return the request's route; a remote one is in flight at once, until `ended`.

        `among`: see `decide`; each of them is known here.
        """
        assert request_id not in self._inflight, f"{request_id} has a route"
        decided = self.decide(request, local=local, now_s=now_s, force=force, among=among)
        if force is None:
            own = None
            if decided.reason == "earlier" and self._left.is_due(request.uncached_tokens, now_s):
                own = self._own_side(request, local, now_s, among)
            if own is None:
                self._remember(request, decided, now_s)
            else:
                decided = own
                self._left.tried(request.uncached_tokens, now_s)
        if decided.peer is not None:
            peer = self._peers[decided.peer]
            num_tokens, explained_s = request.peer_tokens(peer.peer), decided.predicted_ttft_s
            if explained_s is not None:
                explained_s -= max(0.0, min(peer.excesses_s, default=0.0))
            self._inflight[request_id] = _InFlight(
                peer=peer.peer,
                num_tokens=num_tokens,
                num_bytes=request.num_kv_bytes,
                started_s=now_s,
                explained_s=explained_s,
            )
            spent_bytes, spent_at_s = spent_with(
                peer, request.num_kv_bytes, self._options.egress_target, now_s
            )
            booked = Booking(
                peer.num_inflight + 1,
                peer.num_inflight_tokens + num_tokens,
                peer.num_inflight_bytes + request.num_kv_bytes,
                spent_bytes,
                spent_at_s,
            )
            self._peers.book(peer.peer, booked)
        return decided

    def _own_side(
        self,
        request: RouteRequest,
        local: LocalView,
        now_s: float,
        among: Iterable[PeerView] | None,
    ) -> Route | None:
        """Return the route on the prompt's own side of t if nothing waits there, else None."""
        is_long = request.uncached_tokens > self._threshold_tokens
        name: RouteName = "remote" if is_long else "local"
        own = self.decide(request, local=local, now_s=now_s, force=name, among=among)
        if own.name != name:
            return None
        num_waiting = local.num_waiting
        if own.peer is not None:
            peer = self._peers[own.peer]
            num_waiting = peer.num_inflight + peer.num_queue_tokens
        return None if num_waiting > 0 else replace(own, reason="long" if is_long else "short")

    def _remember(self, request: RouteRequest, decided: Route, now_s: float) -> None:
        """Note on which side of t prompts of this magnitude go."""
        num_tokens = request.uncached_tokens
        if decided.reason in ("short", "long"):
            self._left.stayed(num_tokens)
        elif decided.reason in ("earlier", "spares_others", "egress_budget"):
            if (decided.peer is not None) == (num_tokens > self._threshold_tokens):
                self._left.stayed(num_tokens)
            else:
                self._left.left(num_tokens, now_s)

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
        if ended.peer not in self._peers:
            return
        peer = self._peers[ended.peer]
        queue_tokens = peer.num_queue_tokens
        if peer.queue_heard_s is not None and peer.queue_heard_s >= ended.started_s:
            queue_tokens = max(0, queue_tokens - ended.num_tokens)
        peer = replace(
            peer,
            num_inflight=peer.num_inflight - 1,
            num_inflight_tokens=peer.num_inflight_tokens - ended.num_tokens,
            num_inflight_bytes=peer.num_inflight_bytes - ended.num_bytes,
            num_queue_tokens=queue_tokens,
        )
        if rates is not None:
            peer = learnt(peer, rates, ended.num_tokens, now_s)
        if outcome == "completed" and ended.explained_s is not None:
            excess_s = now_s - ended.started_s - ended.explained_s
            peer = replace(peer, excesses_s=(excess_s, *peer.excesses_s[: NUM_EXCESSES - 1]))
        self._peers.put(after(peer, outcome, ended.started_s, now_s, retry_after_s))

    def heard(
        self,
        peer: str,
        *,
        now_s: float,
        is_ready: bool,
        num_queue_tokens: int = 0,
        prefill_tokens_per_s: float | None = None,
        egress_limit_bytes_per_s: float | None = None,
    ) -> None:
        """Take note of a compatible peer's word about itself; None is unknown, or no limit.

        It does not end a backoff that transfers have earned (more than one failure in a row), nor
        the wait an overloaded peer asked for.
        """
        if peer not in self._peers:
            return
        old = self._peers[peer]
        is_waiting = old.retry_at_s is not None and now_s < old.retry_at_s
        state: PeerState = "ready" if is_ready else "not_ready"
        if is_ready and is_waiting and old.state == "overloaded":
            state = "overloaded"
        elif is_ready and is_waiting and old.num_failures > 1:
            state = "down"
        if old.used_s is not None and now_s - old.used_s > FORGET_AFTER_S:
            old = forgotten(old)
        self._peers.put(
            replace(
                old,
                state=state,
                heard_s=now_s,
                num_queue_tokens=max(0, num_queue_tokens),
                queue_heard_s=now_s,
                num_silences=0,
                reported_tokens_per_s=known_rate(prefill_tokens_per_s),
                egress_limit_bytes_per_s=known_rate(egress_limit_bytes_per_s),
            )
        )

    def measured(
        self,
        peer: str,
        *,
        rtt_s: float | None,
        bytes_per_s: float | None = None,
        goodput_bytes_per_s: float | None = None,
    ) -> None:
        """Take note of the link to a peer; None is unknown.

        Args:
            peer: its name.
            rtt_s: the round trip.
            bytes_per_s: what the link carries, as somebody else has found.
            goodput_bytes_per_s: what came over it lately, idle times included.
        """
        if peer not in self._peers:
            return
        old = self._peers[peer]
        seen = replace(
            old, rtt_s=known_rate(rtt_s), goodput_bytes_per_s=known_rate(goodput_bytes_per_s)
        )
        if known_rate(bytes_per_s) is not None:
            seen = replace(seen, link_bytes_per_s=bytes_per_s)
        if seen != old:
            self._peers.put(seen)

    def scarcity(self, peer: str, now_s: float) -> float:
        """Return the spent part of what a peer's egress budget allows at once; above 1 it is overdrawn.

        0 for a peer or link of which nothing is known, and with a policy that has no budget.
        """
        if peer not in self._peers or self._options.policy_in_force not in COMPARING:
            return 0.0
        return spent_fraction(self._peers[peer], self._options.egress_target, now_s)

    def unreachable(self, peer: str, *, now_s: float) -> None:
        """Take note that the peer did not answer."""
        if peer in self._peers:
            old = self._peers[peer]
            silent = replace(old, state="down", num_silences=old.num_silences + 1)
            self._peers.put(replace(silent, retry_at_s=later(silent, now_s)))

    def incompatible(self, peer: str, *, now_s: float) -> None:
        """Take note that the peer's KV is of no use here, until it is heard again."""
        if peer in self._peers:
            self._peers.put(replace(self._peers[peer], state="incompatible", heard_s=now_s))

    def check(self) -> None:
        """Re-derive the counts in flight from the routes in flight."""
        self._peers.check()
        for peer in self._peers.views:
            ours = [inflight for inflight in self._inflight.values() if inflight.peer == peer.peer]
            assert peer.num_inflight == len(ours), f"{peer.peer}: {peer.num_inflight} in flight"
            assert peer.num_inflight_tokens == sum(inflight.num_tokens for inflight in ours)
            assert peer.num_inflight_bytes == sum(inflight.num_bytes for inflight in ours)
