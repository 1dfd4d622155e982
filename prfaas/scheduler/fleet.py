"""The scheduler's heart: who is in the fleet, where each request goes, and who changes its mode.

A sans-I/O state machine: heartbeats and ends of requests in, placements and modes out. What was decided
counts at once, at the nodes and in the routers, until it has ended.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, assert_never

from prfaas.scheduler.conversion import Conversion, Observed, observe
from prfaas.scheduler.directing import Directed, Offer, Side
from prfaas.scheduler.explaining import Explanation, candidates
from prfaas.scheduler.heartbeat import PERIOD_S, Heartbeat, Mode
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.pd_cluster import PdCluster
from prfaas.scheduler.placing import (
    Choice,
    KvBytes,
    NoNode,
    Placement,
    Wanted,
    choose,
    no_bytes,
)
from prfaas.scheduler.rebalancer import RebalanceOptions
from prfaas.scheduler.router import Outcome
from prfaas.scheduler.standing import FleetLimits, NodeState, Standing, assumed
from prfaas.scheduler.work import Job

FIRST_OUTPUT_TOKENS = 128.0
"""The length that an answer is taken to have before any has ended."""
OUTPUT_WEIGHT = 0.05
"""Of the newest answer in the mean length."""

Ended = Literal["completed", "cancelled", "refused", "failed"]
"""How a placement ended. cancelled: nobody wants it any more, or it was a bad request. refused: the node has no
room now. failed: by the node's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node of the fleet at one moment."""

    heartbeat: Heartbeat
    """Its last word."""
    numerics: str
    state: NodeState
    wanted_mode: Mode | None
    """Set while it is to take another mode."""
    age_s: float
    """Since it was heard."""
    num_inflight: int
    """Requests that were placed there: to decode, or to prefill."""
    num_active: int
    """Requests there, others' too, as far as is known."""
    queue_tokens: int

    @property
    def node(self) -> str:
        """Return its name."""
        return self.heartbeat.node


@dataclass(slots=True, kw_only=True)
class _Placed:
    decode: Standing
    prefill: Standing | None
    """None is the decoder itself."""
    side: Side
    cluster: PdCluster
    placed_s: float
    uncached_tokens: int
    num_sequences: int
    is_prefilled: bool = False


class Fleet:
    """All nodes of a fleet, by name, and each request between its placement and its end."""

    def __init__(
        self,
        options: SchedulerOptions,
        *,
        limits: FleetLimits | None = None,
        rebalance: RebalanceOptions | None = None,
    ) -> None:
        self._options = options
        self._limits = limits or FleetLimits()
        self._rebalance = rebalance or options.rebalance
        self._nodes: dict[str, Standing] = {}
        self._clusters: dict[str, PdCluster] = {}
        """By name, those of pd nodes."""
        self._placed: dict[str, _Placed] = {}
        self._num_placed = 0
        self._output_tokens = FIRST_OUTPUT_TOKENS
        self._kv_bytes: KvBytes = no_bytes
        self._assumed = assumed((), FIRST_OUTPUT_TOKENS)

    def heard(self, heartbeat: Heartbeat, now_s: float, *, numerics: str = "") -> bool:
        """Take a heartbeat: the node is in the fleet, as it says it is.

        Returns False for one that is not taken: of a life of the node that is over, or of one node too many.
        """
        name = heartbeat.node
        node = self._nodes.get(name)
        if node is not None and heartbeat.epoch > node.heartbeat.epoch and node.moved(heartbeat):
            self._forget(name)
            node = None
        if node is None:
            if len(self._nodes) >= self._limits.max_nodes:
                return False
            node = self._nodes[name] = Standing(heartbeat, numerics, self._limits, now_s)
        elif node.moved(heartbeat) or not node.heard(heartbeat, numerics, now_s):
            return False
        if heartbeat.role == "pd":
            self._cluster(heartbeat.cluster).heard(node, now_s)
        else:
            for cluster in self._clusters.values():
                cluster.heard_prfaas(node, now_s)
        guess = assumed(self._nodes.values(), self._output_tokens)
        if not guess.is_like(self._assumed):  # else what was worked out with it still holds
            self._assumed = guess
        return True

    def left(self, name: str, now_s: float) -> None:
        """Take note that a node has left; what is in flight there may still end."""
        if name in self._nodes:
            self._forget(name)

    def failed(self, name: str, now_s: float) -> None:
        """Take note that a call to a node failed, other than that of a placement."""
        if name in self._nodes:
            self._nodes[name].failed(now_s)

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Forget the nodes that are dead for long and have nothing in flight; return their names."""
        gone = sorted(
            name
            for name, node in self._nodes.items()
            if node.age_s(now_s) >= self._limits.forget_after_s and not node.load.num_inflight
        )
        for name in gone:
            self._forget(name)
        return tuple(gone)

    def can_decode(self, name: str, now_s: float) -> bool:
        """Return whether a node would be given requests now, if there were no better one."""
        node = self._nodes.get(name)
        return node is not None and node.can_decode and node.refusal(now_s) is None

    def members(self, now_s: float) -> tuple[Member, ...]:
        """Return all nodes, by name."""
        return tuple(
            Member(
                heartbeat=node.heartbeat,
                numerics=node.numerics,
                state=node.state(now_s),
                wanted_mode=node.wanted_mode,
                age_s=node.age_s(now_s),
                num_inflight=node.load.num_inflight,
                num_active=node.load.num_active,
                queue_tokens=node.load.queue_tokens,
            )
            for _, node in sorted(self._nodes.items())
        )

    def peers_of(self, name: str, now_s: float) -> tuple[str, ...]:
        """Return whom a node should be ready to pull from: PrfaaS nodes, and the others of its cluster."""
        me = self._nodes.get(name)
        if me is None or me.heartbeat.role != "pd":
            return ()
        return tuple(
            sorted(
                node.name
                for node in self._nodes.values()
                if node is not me
                and node.state(now_s) != "dead"
                and (
                    node.heartbeat.role == "prefill"
                    or node.heartbeat.cluster == me.heartbeat.cluster
                )
            )
        )

    def wanted_mode(self, name: str) -> Mode | None:
        """Return the mode that a node is to take; None leaves it as it is."""
        node = self._nodes.get(name)
        return None if node is None else node.wanted_mode

    def threshold_tokens(self, cluster: str) -> float:
        """Return t of a cluster as it is now. Raises KeyError for one without pd nodes."""
        return self._clusters[cluster].wide.threshold_tokens

    def place(self, request_id: str, wanted: Wanted, now_s: float) -> Placement | NoNode:
        """Return where a request goes; from now on it is in flight there, until `ended`."""
        assert request_id not in self._placed, f"{request_id} is placed"
        if wanted.kv_bytes is not no_bytes:
            self._kv_bytes = wanted.kv_bytes
        decided = self._decide(wanted, now_s, request_id)
        if isinstance(decided, NoNode):
            return decided
        choice, directed = decided
        placement = self._placement(wanted, choice, directed)
        self._book(request_id, wanted.job(self._assumed), choice.node, directed, now_s)
        return placement

    def explain(self, wanted: Wanted, now_s: float) -> Explanation:
        """Return where a request would go, and what speaks for and against each node; changes nothing."""
        decided = self._decide(wanted, now_s)
        answer = decided if isinstance(decided, NoNode) else self._placement(wanted, *decided)
        offers, nodes = self._offers(wanted, now_s), self._nodes.values()
        return Explanation(
            answer=answer,
            candidates=candidates(wanted, nodes, offers, answer, self._assumed, now_s),
        )

    def first_token(self, request_id: str, now_s: float, *, outcome: Outcome = "completed") -> None:
        """Take note that a request's prefill is done; `outcome` is how it went if it was elsewhere."""
        placed = self._placed[request_id]
        placed.decode.answered()
        self._prefilled(request_id, placed, outcome, now_s)

    def ended(
        self,
        request_id: str,
        outcome: Ended,
        now_s: float,
        *,
        route_outcome: Outcome | None = None,
        output_tokens: int = 0,
        retry_after_s: float = PERIOD_S,
    ) -> None:
        """Take a request out of flight and learn from how it went; exactly once for each placement."""
        placed = self._placed.pop(request_id)
        if route_outcome is None:
            route_outcome = "completed" if outcome == "completed" else "cancelled"
        self._prefilled(request_id, placed, route_outcome, now_s)
        node = placed.decode
        node.load.ended(request_id)
        match outcome:
            case "completed":
                node.answered()
                self._saw(placed, output_tokens)
            case "cancelled":
                return
            case "refused":
                node.refused(now_s, retry_after_s)
            case "failed":
                node.failed(now_s, placed.placed_s)
            case _:
                assert_never(outcome)

    def conversions(self, now_s: float) -> tuple[Conversion, ...]:
        """Return the nodes that are to take another mode from now on, each once.

        To be called every second or so; each cluster looks at its roles and at t as often as it should.
        """
        changes = []
        for name, cluster in sorted(self._clusters.items()):
            nodes = [node for node in self._pd_nodes() if node.heartbeat.cluster == name]
            nodes.sort(key=lambda node: node.name)
            change = cluster.converter.look(nodes, self._observed(cluster, nodes, now_s), now_s)
            cluster.follow_threshold()
            if change is not None:
                self._nodes[change.node].want(change.mode)
                changes.append(change)
        return tuple(changes)

    def check(self) -> None:
        """Re-derive what is in flight from the placements."""
        for node in self._nodes.values():
            node.check()
            ours = {
                request_id
                for request_id, placed in self._placed.items()
                if placed.decode is node or (placed.prefill is node and not placed.is_prefilled)
            }
            assert node.load.inflight == ours, f"{node.name}: {node.load.inflight} in flight"
        for cluster in self._clusters.values():
            cluster.check()

    def _cluster(self, name: str) -> PdCluster:
        cluster = self._clusters.get(name)
        if cluster is None:
            cluster = PdCluster(name, self._options, self._rebalance)
            self._clusters[name] = cluster
            for node in self._nodes.values():
                if node.heartbeat.role == "prefill":
                    cluster.heard_prfaas(node, node.heard_s)
            self._share_prfaas()
        return cluster

    def _share_prfaas(self) -> None:
        for cluster in self._clusters.values():
            cluster.share_prfaas(len(self._clusters) > 1)

    def _forget(self, name: str) -> None:
        del self._nodes[name]
        named = {node.heartbeat.cluster for node in self._pd_nodes()}
        self._clusters = {name: each for name, each in self._clusters.items() if name in named}
        for cluster in self._clusters.values():
            cluster.forget(name)
        self._share_prfaas()

    def _pd_nodes(self) -> Iterable[Standing]:
        return (node for node in self._nodes.values() if node.heartbeat.role == "pd")

    def _offers(self, wanted: Wanted, now_s: float) -> dict[str, Offer]:
        prefillers = [node for node in self._nodes.values() if node.can_prefill]
        holders = [self._nodes[name] for name in wanted.known_hits if name in self._nodes]
        return {
            name: cluster.offer(wanted, prefillers, holders, self._assumed, now_s)
            for name, cluster in self._clusters.items()
        }

    def _decide(
        self, wanted: Wanted, now_s: float, request_id: str | None = None
    ) -> tuple[Choice, Directed] | NoNode:
        """Return the decoder and where it prefills, booked with a router under an id."""
        nodes, guess = self._nodes.values(), self._assumed
        offers = self._offers(wanted, now_s)
        rests = {name: offer.rest for name, offer in offers.items()}
        choice = choose(wanted, nodes, rests, guess, now_s)
        if isinstance(choice, NoNode):
            return choice
        name = choice.node.heartbeat.cluster
        director = self._clusters[name].director
        directed = director.direct(wanted, choice.node, offers[name], guess, now_s, request_id)
        return choice, directed

    def _placement(self, wanted: Wanted, choice: Choice, directed: Directed) -> Placement:
        predicted_s = directed.predicted_ttft_s
        wait_s = choice.node.slot_wait_s(self._assumed, wanted.num_sequences)
        if predicted_s is not None and wait_s:
            predicted_s = None if choice.node.step_s is None else predicted_s + wait_s
        source = directed.source
        return Placement(
            decode_at=choice.node.name,
            decode_reason=choice.reason,
            reason=directed.reason,
            prefill_at=directed.prefill_at,
            prefix_from=None if source is None else source.node,
            prefix_tokens=0 if source is None else source.num_tokens,
            predicted_ttft_s=predicted_s,
        )

    def _book(
        self, request_id: str, job: Job, node: Standing, directed: Directed, now_s: float
    ) -> None:
        request, prefill = directed.request, None
        if directed.prefill_at is not None:
            prefill = self._nodes[directed.prefill_at]
        self._placed[request_id] = _Placed(
            decode=node,
            prefill=prefill,
            side=directed.side,
            cluster=self._clusters[node.heartbeat.cluster],
            placed_s=now_s,
            uncached_tokens=request.uncached_tokens,
            num_sequences=job.num_sequences,
        )
        self._num_placed += 1
        node.last_chosen = self._num_placed
        if prefill is None:
            job = job._replace(num_tokens=request.uncached_tokens)
        else:
            prefill.load.sent(request_id, Job(request.peer_tokens(prefill.name)), now_s)
        node.load.sent(request_id, job, now_s)

    def _prefilled(self, request_id: str, placed: _Placed, outcome: Outcome, now_s: float) -> None:
        """Take a prefill out of flight, once."""
        if placed.is_prefilled:
            return
        placed.is_prefilled = True
        placed.decode.load.computed(request_id)
        if placed.prefill is not None:
            placed.prefill.load.ended(request_id)
            placed.cluster.prefilled(request_id, placed.side, outcome, now_s)

    def _saw(self, placed: _Placed, output_tokens: int) -> None:
        placed.cluster.converter.saw(placed.uncached_tokens, output_tokens)
        tokens = max(1.0, output_tokens / placed.num_sequences)
        self._output_tokens += OUTPUT_WEIGHT * (tokens - self._output_tokens)

    def _observed(self, cluster: PdCluster, nodes: list[Standing], now_s: float) -> Observed:
        prfaas = [
            node
            for node in self._nodes.values()
            if node.heartbeat.role == "prefill" and node.refusal(now_s) is None
        ]
        return observe(
            nodes,
            prfaas,
            link_bytes_per_s=cluster.links.mean_bytes_per_s(node.name for node in prfaas),
            egress_target=self._options.egress_target,
            kv_bytes=self._kv_bytes,
        )
