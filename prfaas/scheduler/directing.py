"""Where a prompt is prefilled, once it is known who decodes it.

First who would do it in the decoder's cluster, the decoder itself or a PD-P. Against that the PrfaaS
nodes, by the same `route` that a node without a scheduler asks.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from prfaas.scheduler.links import Links
from prfaas.scheduler.placing import (
    MAX_TOKENS_AT_DECODER,
    MIN_FETCH_GAIN_S,
    TRANSFER_S,
    Elsewhere,
    PlacementReason,
    Source,
    Wanted,
    local_s,
)
from prfaas.scheduler.router import Router, RouteRequest
from prfaas.scheduler.standing import Standing
from prfaas.scheduler.view import LocalView, PeerView
from prfaas.scheduler.work import Assumed

FETCH_LINK_RATIO = 2.0
"""A link that is so many times slower than those in the cluster is worth a prefix fetched before."""
NEAR_GAIN_S = 0.02
"""By so much sooner another node of the cluster has to prefill what its own node could."""
PRICE = 2.0
"""Of a byte between clusters, in times of its transfer, where the egress budget is spent."""

Side = Literal["here", "near", "wide"]


class Directed(NamedTuple):
    """Where a prompt is prefilled, for its decoder."""

    side: Side
    reason: PlacementReason
    request: RouteRequest
    prefill_at: str | None = None
    """None is the decoder."""
    source: Source | None = None
    """The prefix that it fetches first."""
    predicted_ttft_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What there is besides its decoder for one prompt."""

    near: list[PeerView]
    """PD-Ps of the cluster, and PrfaaS nodes, that the fleet would use now; their breakers have a say, too."""
    wide: list[PeerView]
    has_all_wide: bool
    """Whether these are all of the router's, as it knows them."""
    rest: Elsewhere
    foreign: Source | None
    """The longest prefix that a node of another cluster has, if a link to it is known."""


class Director:
    """Directs prompts by two routers: PrfaaS nodes, over links that are short of bytes, and PD-Ps of the cluster."""

    def __init__(self, *, near: Router, wide: Router, links: Links) -> None:
        self._near = near
        self._wide = wide
        self._links = links

    def direct(
        self,
        wanted: Wanted,
        node: Standing,
        offer: Offer,
        guess: Assumed,
        now_s: float,
        request_id: str | None = None,
    ) -> Directed:
        """Return where the prompt is prefilled that a node decodes.

        First who would do it in the cluster, the node itself or a PD-P. Against that, by `route`, the
        PrfaaS nodes. With an id it is booked with the router of its side, if it is not here.
        """
        inside = self._inside(wanted, node, offer, guess, now_s)
        if wanted.force != "local":
            outside = self._outside(wanted, node, inside, offer, now_s, request_id)
            if outside.side == "wide":
                return outside
            inside = self._with_foreign(wanted, node, outside, offer, now_s)
        if inside.side == "near" and request_id is not None:
            self._book_near(request_id, inside, now_s)
        return inside

    def _outside(
        self,
        wanted: Wanted,
        node: Standing,
        inside: Directed,
        offer: Offer,
        now_s: float,
        request_id: str | None,
    ) -> Directed:
        """Return the prefill at a PrfaaS node if `route` says so, else the one inside, with the reason."""
        usable = node.heartbeat.peers_usable.get
        wide = [peer for peer in offer.wide if usable(peer.peer, True)]
        is_all = offer.has_all_wide and len(wide) == len(offer.wide)
        among = None if is_all else wide
        source = self._before_wide(inside.source, wide)
        hit_tokens = wanted.hit_of(node.name) if source is None else source.num_tokens
        request = inside.request
        if hit_tokens != request.hit_tokens:
            request = _request(wanted, hit_tokens, offer)
        local = _as_local(inside, request, node)
        if request_id is None:
            route = self._wide.decide(
                request, local=local, now_s=now_s, force=wanted.force, among=among
            )
        else:
            route = self._wide.route(
                request_id, request, local=local, now_s=now_s, force=wanted.force, among=among
            )
        if route.peer is not None:
            return Directed(
                "wide",
                route.reason,
                request,
                prefill_at=route.peer,
                source=source,
                predicted_ttft_s=route.predicted_ttft_s,
            )
        reason: PlacementReason = route.reason
        if reason == "no_peer" and self._wide.peers:
            reason = "peer_down"
        if inside.side == "here" and inside.reason != "at_decoder":
            return inside._replace(reason=reason)
        return inside

    def _book_near(self, request_id: str, inside: Directed, now_s: float) -> None:
        assert inside.prefill_at is not None
        route = self._near.route(
            request_id,
            inside.request,
            local=LocalView(),
            now_s=now_s,
            force="remote",
            among=(self._near.peer(inside.prefill_at),),
        )
        assert route.peer == inside.prefill_at, f"{route} instead of {inside.prefill_at}"

    def _before_wide(self, source: Source | None, wide: list[PeerView]) -> Source | None:
        """Return the prefix of the cluster to fetch before a PrfaaS node sends the rest, if its link is slow."""
        if source is None or not wide:
            return None
        byte_s = min(peer.byte_s for peer in wide)
        near_byte_s = self._links.near_byte_s(source.node)
        return source if byte_s > FETCH_LINK_RATIO * near_byte_s else None

    def _inside(
        self,
        wanted: Wanted,
        node: Standing,
        offer: Offer,
        guess: Assumed,
        now_s: float,
    ) -> Directed:
        """Return who of the cluster prefills."""
        usable = node.heartbeat.peers_usable.get
        near = [peer for peer in offer.near if usable(peer.peer, True)]
        hit_tokens = wanted.hit_of(node.name)
        here_s, fetch_s = local_s(wanted, hit_tokens, node.price(guess), offer.rest)
        source = offer.rest.source if fetch_s else None
        if source is not None:
            hit_tokens = source.num_tokens
        request = _request(wanted, hit_tokens, offer)
        here = Directed(
            "here",
            "at_decoder" if node.only_decodes else "short",
            request,
            source=source,
            predicted_ttft_s=None if node.token_s is None else here_s,
        )
        if wanted.force == "local":
            return here._replace(reason="forced")
        if node.only_decodes and request.uncached_tokens <= MAX_TOKENS_AT_DECODER:
            return here
        if not near:
            return here._replace(reason="no_peer") if node.only_decodes else here
        there = self._there(wanted, node, offer, near, now_s)
        return _sooner(here, there, is_asked=node.only_decodes or wanted.force == "remote")

    def _there(
        self, wanted: Wanted, node: Standing, offer: Offer, near: list[PeerView], now_s: float
    ) -> Directed:
        """Return the best PD-P, or why there is none."""
        request = _request(wanted, wanted.hit_of(node.name), offer)
        route = self._near.decide(
            request, local=LocalView(), now_s=now_s, force="remote", among=near
        )
        reason: PlacementReason = "pd_prefill" if node.only_decodes else "pd_prefill_earlier"
        if route.peer is None or wanted.force == "remote":
            reason = route.reason
        return Directed(
            "near",
            reason,
            request,
            prefill_at=route.peer,
            predicted_ttft_s=route.predicted_ttft_s,
        )

    def _with_foreign(
        self,
        wanted: Wanted,
        node: Standing,
        here: Directed,
        offer: Offer,
        now_s: float,
    ) -> Directed:
        """Return a prefill at the decoder, with another cluster's prefix if its bytes are worth it.

        Where they are scarce they cost a multiple of their time (PrfaaS §3.4.3, bandwidth plentiful).
        """
        foreign, hit_tokens = offer.foreign, here.request.hit_tokens
        if here.side != "here" or foreign is None or foreign.num_tokens <= hit_tokens:
            return here
        byte_s = self._links.byte_s(foreign.node)
        if byte_s is None or node.token_s is None or here.predicted_ttft_s is None:
            return here
        num_bytes = wanted.kv_bytes(foreign.num_tokens, wanted.hit_of(node.name))
        sent_s = TRANSFER_S + num_bytes * byte_s + (self._links.rtt_s(foreign.node) or 0.0)
        queue_s = node.load.queue_tokens * node.token_s
        rest_s = (wanted.num_tokens - foreign.num_tokens) * node.token_s
        ttft_s = max(queue_s, sent_s) + rest_s
        price_s = PRICE * self._scarcity(foreign.node, now_s) * num_bytes * byte_s
        if ttft_s + price_s + MIN_FETCH_GAIN_S >= here.predicted_ttft_s:
            return here
        request = _request(wanted, foreign.num_tokens, offer)
        return here._replace(source=foreign, request=request, predicted_ttft_s=ttft_s)

    def _scarcity(self, name: str, now_s: float) -> float:
        """Return how much of a node's egress budget is spent, 1 is all; of one without a budget, all."""
        if name not in self._wide.peers:
            return 1.0
        return self._wide.scarcity(name, now_s)


def _sooner(here: Directed, there: Directed, *, is_asked: bool) -> Directed:
    """Return one of two places in the cluster: the other node if it is asked for, or known to be sooner."""
    if there.prefill_at is None:
        return here._replace(reason=there.reason) if is_asked else here
    here_s, there_s = here.predicted_ttft_s, there.predicted_ttft_s
    if is_asked:
        return there
    is_sooner = here_s is not None and there_s is not None and there_s <= here_s - NEAR_GAIN_S
    return there if is_sooner else here


def _request(wanted: Wanted, hit_tokens: int, offer: Offer) -> RouteRequest:
    hits, peer_hits = wanted.known_hits, dict[str, int]()
    if hits:
        names = [peer.peer for peers in (offer.near, offer.wide) for peer in peers]
        peer_hits = {name: hits[name] for name in names if name in hits}
    num_bytes, tail_bytes = wanted.sizes(hit_tokens)
    return RouteRequest(
        num_tokens=wanted.num_tokens,
        hit_tokens=hit_tokens,
        num_kv_bytes=num_bytes,
        num_tail_bytes=tail_bytes,
        peer_hit_tokens=peer_hits,
    )


def _as_local(inside: Directed, request: RouteRequest, node: Standing) -> LocalView:
    """Return the view of an engine that would take as long for the request as the cluster does."""
    load, predicted_s = node.load, inside.predicted_ttft_s
    num_waiting = 0 if inside.side == "near" else load.num_queued
    if predicted_s is None or predicted_s <= 0:
        return LocalView(num_waiting_tokens=load.queue_tokens, num_waiting=num_waiting)
    uncached_tokens = request.uncached_tokens
    token_s = node.token_s or predicted_s / uncached_tokens
    waiting = round(predicted_s / token_s) - uncached_tokens
    if waiting < 0:
        waiting, token_s = 0, predicted_s / uncached_tokens
    return LocalView(
        num_waiting_tokens=waiting, num_waiting=num_waiting, prefill_tokens_per_s=1 / token_s
    )
