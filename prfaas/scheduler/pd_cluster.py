"""One local PD cluster: where a prompt that one of its nodes decodes is prefilled.

Two routers, each with the states of its peers and what is in flight there: `wide` knows the PrfaaS nodes,
over a link that is short of bytes, and decides by policy and threshold; `near` knows the cluster's own
PD-Ps, which take what stays in the cluster.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from operator import itemgetter

from prfaas.scheduler.conversion import Converter
from prfaas.scheduler.directing import Director, Offer, Side
from prfaas.scheduler.links import NEAR_BYTES_PER_S, Links
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.placing import Elsewhere, Source, Wanted, prefill_refusal
from prfaas.scheduler.rebalancer import RebalanceOptions
from prfaas.scheduler.router import Outcome, Router
from prfaas.scheduler.standing import Standing
from prfaas.scheduler.view import PeerView
from prfaas.scheduler.work import Assumed

FIRST_BYTE_S = 1 / NEAR_BYTES_PER_S
"""Of a byte on a link that no transfer has shown."""


class PdCluster:
    """The routers of one cluster, its links and its long time scale."""

    def __init__(self, name: str, options: SchedulerOptions, rebalance: RebalanceOptions) -> None:
        self.name = name
        self.options = options
        self.links = Links()
        self.wide = Router(peers=(), options=options)
        self.near = Router(peers=(), options=options)
        self.director = Director(near=self.near, wide=self.wide, links=self.links)
        self.converter = Converter(rebalance)
        self._num_wide = 0
        self._shares_prfaas = False
        self._seen: dict[str, tuple[PeerView, int, PeerView]] = {}
        """Prefill node -> (the router's view, tokens queued at it, the view with them)."""

    def heard(self, node: Standing, now_s: float) -> None:
        """Take what one of the cluster's nodes says of itself and of its links."""
        heartbeat = node.heartbeat
        for name in self.links.heard(heartbeat):
            self._measure(name)
        if heartbeat.mode == "prefill":
            self._heard_peer(self.near, node, now_s)

    def heard_prfaas(self, node: Standing, now_s: float) -> None:
        """Take what a PrfaaS node says of itself."""
        self._heard_peer(self.wide, node, now_s)
        self._num_wide = len(self.wide.peers)

    def forget(self, name: str) -> None:
        """Drop a node that has left the fleet."""
        for router in (self.near, self.wide):
            if name in router.peers:
                router.remove_peer(name)
        self._num_wide = len(self.wide.peers)
        self.links.forget(name)
        self._seen.pop(name, None)

    def offer(
        self,
        wanted: Wanted,
        prefillers: Iterable[Standing],
        holders: Iterable[Standing],
        guess: Assumed,
        now_s: float,
    ) -> Offer:
        """Return what the fleet offers to a prompt that one of the cluster's nodes decodes.

        Args:
            wanted: the prompt.
            prefillers: all nodes that prefill for others.
            holders: all nodes that have some of the prompt.
            guess: stands in for what they have not shown.
            now_s: on the clock of the heartbeats.
        """
        near, wide = [], []
        is_picky = wanted.numerics is not None or bool(wanted.excluded)
        for node in prefillers:
            may_refuse = is_picky or now_s > node.clear_until_s
            if may_refuse and prefill_refusal(wanted, node, now_s) is not None:
                continue
            if node.heartbeat.role == "prefill":
                wide.append(node)
            elif node.cluster == self.name:
                near.append(node)
        source, foreign = self._sources(wanted, holders, now_s)
        near_views = [self.near.peer(node.name) for node in _best_heard(near, now_s)]
        wide_views = [self._view(node) for node in _best_heard(wide, now_s)]
        rest = self._elsewhere(wanted, near_views, wide_views, source, guess, now_s)
        return Offer(
            near=near_views,
            wide=wide_views,
            has_all_wide=len(wide_views) == self._num_wide and not self._shares_prfaas,
            rest=rest,
            foreign=foreign,
        )

    def share_prfaas(self, is_shared: bool) -> None:
        """Say whether other clusters send to the PrfaaS nodes, too: then they know what this one does not."""
        self._shares_prfaas = is_shared

    def prefilled(self, request_id: str, side: Side, outcome: Outcome, now_s: float) -> None:
        """Take a prefill out of flight, and learn from how it went."""
        self._router(side).ended(request_id, outcome, now_s=now_s)

    def follow_threshold(self) -> None:
        """Route by t as last solved for, if it was left to the fleet."""
        threshold = self.converter.threshold_tokens
        if threshold is not None and self.options.threshold_tokens is None:
            self.wide.set_threshold(threshold)

    def check(self) -> None:
        """Check both routers."""
        self.near.check()
        self.wide.check()

    def _router(self, side: Side) -> Router:
        assert side != "here", "nothing is in flight"
        return self.near if side == "near" else self.wide

    def _heard_peer(self, router: Router, node: Standing, now_s: float) -> None:
        heartbeat = node.heartbeat
        if node.name not in router.peers:
            router.add_peer(node.name)
            self._measure(node.name)
        router.heard(
            node.name,
            now_s=now_s,
            is_ready=heartbeat.is_ready and not heartbeat.is_draining,
            num_queue_tokens=heartbeat.num_waiting_tokens,
            prefill_tokens_per_s=heartbeat.prefill_tokens_per_s,
        )

    def _measure(self, name: str) -> None:
        """Tell the routers what is known of the way from a node."""
        byte_s = self.links.byte_s(name)
        for router in (self.near, self.wide):
            if name in router.peers:
                router.measured(
                    name,
                    rtt_s=self.links.rtt_s(name),
                    bytes_per_s=None if byte_s is None else 1 / byte_s,
                )

    def _view(self, node: Standing) -> PeerView:
        """Return the router's view of a PrfaaS node, with what other clusters have in flight there."""
        view = self.wide.peer(node.name)
        if not self._shares_prfaas:
            return view
        queue_tokens = node.load.queue_tokens
        seen = self._seen.get(node.name)
        if seen is None or seen[0] is not view or seen[1] != queue_tokens:
            full = view
            if queue_tokens > view.num_queue_tokens:
                full = replace(view, num_queue_tokens=queue_tokens)
            seen = self._seen[node.name] = view, queue_tokens, full
        return seen[2]

    def _sources(
        self, wanted: Wanted, holders: Iterable[Standing], now_s: float
    ) -> tuple[Source | None, Source | None]:
        """Return the longest prefixes inside and outside the cluster; ties by name."""
        inside: Source | None = None
        outside: Source | None = None
        hits, name = wanted.known_hits, self.name
        for node in holders:
            is_inside = node.cluster == name and node.heartbeat.role == "pd"
            best, hit_tokens = inside if is_inside else outside, hits[node.name]
            if best is not None and (
                hit_tokens < best.num_tokens
                or (hit_tokens == best.num_tokens and node.name > best.node)
            ):
                continue
            if prefill_refusal(wanted, node, now_s) is not None:
                continue
            if is_inside:
                inside = Source(node.name, hit_tokens)
            elif self.links.byte_s(node.name) is not None:
                outside = Source(node.name, hit_tokens)
        return inside, outside

    def _elsewhere(
        self,
        wanted: Wanted,
        near: list[PeerView],
        wide: list[PeerView],
        source: Source | None,
        guess: Assumed,
        now_s: float,
    ) -> Elsewhere:
        near = _usable(near, now_s)
        wide = _usable(wide, now_s)
        if wanted.force == "local":
            near, wide = [], []
        threshold = None if wanted.force == "remote" else self._fixed_threshold()
        guess_s, hits, num_tokens = guess.token_s, wanted.known_hits, wanted.num_tokens
        best_of: dict[bool, PeerView | None] = {}

        def ttft_s(peer: PeerView, num_bytes: int) -> float:
            """As PeerView's, with a guess for what is not known."""
            token_s, queue_s = peer.token_s, peer.queue_s
            if token_s is None:
                token_s = guess_s
                queue_s = max(peer.num_queue_tokens, peer.num_inflight_tokens) * guess_s
            computed_s = queue_s + (num_tokens - hits.get(peer.peer, 0)) * token_s + peer.fixed_s
            arrived_s = peer.backlog_s + num_bytes * (peer.byte_s or FIRST_BYTE_S)
            return (computed_s if computed_s > arrived_s else arrived_s) + peer.trip_s  # noqa: FURB136

        def prefill_s(hit_tokens: int) -> float:
            if not near and not wide:
                return inf
            has_wide = threshold is None or wanted.num_tokens - hit_tokens > threshold
            num_bytes, _ = wanted.sizes(hit_tokens)
            if has_wide not in best_of:  # by bytes for this hit; those for others change little
                peers = [*near, *wide] if has_wide else near
                times = [(ttft_s(peer, num_bytes), peer) for peer in peers]
                best_of[has_wide] = min(times, key=itemgetter(0))[1] if times else None
            best = best_of[has_wide]
            return inf if best is None else ttft_s(best, num_bytes)

        return Elsewhere(
            wanted,
            source=source,
            near_byte_s=self.links.near_byte_s(None if source is None else source.node),
            prefill_s=prefill_s,
        )

    def _fixed_threshold(self) -> float | None:
        """Return the uncached tokens up to which nothing goes to a PrfaaS node, where the policy has them."""
        match self.options.policy_in_force:
            case "local":
                return inf
            case "always-remote":
                return 0.0
            case "static":
                return self.wide.threshold_tokens
            case "threshold" | "predictive":
                return None


def _usable(peers: list[PeerView], now_s: float) -> list[PeerView]:
    return [peer for peer in peers if now_s <= peer.clear_until_s or peer.refusal(now_s) is None]


def _best_heard(nodes: list[Standing], now_s: float) -> list[Standing]:
    """Return those that are as good as any, or all if none is."""
    return [
        node for node in nodes if now_s <= node.clear_until_s or not node.is_second_choice(now_s)
    ] or nodes
