"""The long time scale of one PD cluster: which of its nodes prefill for the others, and which decode.

PrfaaS §3.4.3. `Rebalancer` says from the prompts of late and from what nodes reach whether N_p : N_d is
right; here one node of the cluster is chosen for a change, waited for, and a cluster whose last decoder is gone is
given another. Nodes that do both are no part of N_p : N_d: they divide their own steps.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.scheduler.curves import LinearCurve, PolynomialCurve
from prfaas.scheduler.heartbeat import Mode
from prfaas.scheduler.lengths import Lengths
from prfaas.scheduler.placing import KvBytes
from prfaas.scheduler.planner import Kind
from prfaas.scheduler.profile import WIDE_BYTES_PER_S, DecodeProfile, Link, Profile, Workload
from prfaas.scheduler.rebalancer import RebalanceOptions, Rebalancer
from prfaas.scheduler.standing import Standing
from prfaas.scheduler.throughput import Shape, ThroughputModel

MAX_CONVERSION_S = 120.0
JOINING_S = 15.0
"""A cluster that has never had a decoder may be one whose decoders are still starting."""
"""A node that has not taken its mode after so long is not waited for."""
LONG_TOKENS = 65_536
"""Between the bytes of one token and of so many S_kv is taken to be straight."""


class Conversion(NamedTuple):
    """A mode that a node is to take."""

    node: str
    mode: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the nodes of a cluster and its PrfaaS nodes reach, and the KV that they move."""

    prefill_tokens_per_s: float | None
    """Of a node of the cluster, on average."""
    decode_step_s: float | None
    max_running: int
    num_prfaas: int = 0
    prfaas_tokens_per_s: float | None = None
    link_bytes_per_s: float | None = None
    """From all PrfaaS nodes to the cluster, together; None: no transfer has waited for it."""
    egress_target: float = 1.0
    """The share of the link that planned KVCache may fill."""
    first_token_bytes: float = 0.0
    """KV of a prompt of one token: what of it is fixed, mostly."""
    long_bytes: float = 0.0
    """KV of LONG_TOKENS tokens."""

    @property
    def kind(self) -> Kind:
        """Return how the cluster is deployed."""
        return "prfaas" if self.num_prfaas else "homogeneous"


def observe(
    nodes: Sequence[Standing],
    prfaas: Sequence[Standing],
    *,
    link_bytes_per_s: float | None,
    egress_target: float,
    kv_bytes: KvBytes,
) -> Observed:
    """Return what a cluster's nodes and the PrfaaS nodes say, averaged over those that say it.

    Args:
        nodes: of the cluster.
        prfaas: usable PrfaaS nodes.
        link_bytes_per_s: of the way from one of them, on average.
        egress_target: the share of it that planned KVCache may fill.
        kv_bytes: of the model.
    """
    return Observed(
        prefill_tokens_per_s=_mean_rate(node.token_s for node in nodes),
        decode_step_s=_mean(node.step_s for node in nodes),
        max_running=min((node.max_running for node in nodes), default=1),
        num_prfaas=len(prfaas),
        prfaas_tokens_per_s=_mean_rate(node.token_s for node in prfaas),
        link_bytes_per_s=None if link_bytes_per_s is None else link_bytes_per_s * len(prfaas),
        egress_target=egress_target,
        first_token_bytes=float(kv_bytes(1, 0)),
        long_bytes=float(kv_bytes(LONG_TOKENS, 0)),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _mean_rate(token_s: Iterable[float | None]) -> float | None:
    mean_s = _mean(token_s)
    return None if mean_s is None else 1 / mean_s


class Converter:
    """Sees a cluster's prompts and nodes, and says now and then who changes its mode."""

    def __init__(self, options: RebalanceOptions) -> None:
        self._options = options
        self._rebalancer: Rebalancer | None = None
        self._kind: Kind = "homogeneous"
        self._looked_s: float | None = None
        self._under_way: tuple[Conversion, float] | None = None
        self._without_s: float | None = None
        """Since when no decoder lives."""
        self.threshold_tokens: float | None = None
        """t as last solved for; None until enough was seen."""
        self._prompts: deque[tuple[int, int]] = deque(maxlen=options.num_prompts)
        """(uncached tokens, output tokens) of the last ones."""

    def saw(self, uncached_tokens: int, output_tokens: int) -> None:
        """Take note of a request that is done."""
        if uncached_tokens < 1:
            return
        self._prompts.append((uncached_tokens, output_tokens))
        if self._rebalancer is not None:
            self._rebalancer.saw(uncached_tokens, output_tokens)

    def look(
        self, nodes: Sequence[Standing], observed: Observed, now_s: float
    ) -> Conversion | None:
        """Return the change to make now: decided, or needed because no decoder is left.

        The caller makes it true (`Standing.want`). One at a time; the next one only when the node has
        taken its mode, or has not for too long.
        """
        if self._is_waiting(nodes, now_s):
            return None
        change = self._rescue(nodes, now_s) or self._rebalance(nodes, observed, now_s)
        if change is not None:
            self._under_way = change, now_s
        return change

    def _rescue(self, nodes: Sequence[Standing], now_s: float) -> Conversion | None:
        """Return the change that a cluster without any decoder needs, if it has a node for it.

        One that drains, loads, is suspected or has no room will be back, or is replaced by whoever drains it;
        only dead ones are given up, and those that have not come for JOINING_S.
        """
        decoders = [node for node in nodes if node.can_decode]
        if any(node.state(now_s) != "dead" for node in decoders):
            self._without_s = None
            return None
        if self._without_s is None:
            self._without_s = now_s
        if not decoders and now_s - self._without_s < JOINING_S:
            return None
        able = [node for node in nodes if node.can_prefill and node.refusal(now_s) is None]
        return Conversion(_least(able), "decode") if able else None

    def _is_waiting(self, nodes: Sequence[Standing], now_s: float) -> bool:
        if self._under_way is None:
            return False
        (name, mode), since_s = self._under_way
        node = next((node for node in nodes if node.name == name), None)
        if node is not None and node.wanted_mode == mode and node.refusal(now_s) != "dead":
            if now_s - since_s < MAX_CONVERSION_S:
                return True
            node.want(None)
        self._under_way = None
        return False

    def _rebalance(
        self, nodes: Sequence[Standing], observed: Observed, now_s: float
    ) -> Conversion | None:
        if self._looked_s is not None and now_s - self._looked_s < self._options.period_s:
            return None
        self._looked_s = now_s
        usable = [node for node in nodes if node.refusal(now_s) is None]
        prefilling = [node for node in usable if node.can_prefill]
        decoding = [node for node in usable if node.can_decode and node.only_decodes]
        model = _model(observed)
        if model is None or not decoding or not (prefilling or observed.num_prfaas):
            return None
        rebalancer = self._following(model, observed.kind)
        decided = rebalancer.look(
            Shape(
                num_prfaas=observed.num_prfaas,
                num_prefill=len(prefilling),
                num_decode=len(decoding),
            ),
            now_s,
        )
        if decided.threshold_tokens is not None:
            self.threshold_tokens = decided.threshold_tokens
        match decided.to:
            case None:
                return None
            case "prefill":
                return Conversion(_least(decoding), "prefill")
            case "decode":
                return Conversion(_least(prefilling), "decode")

    def _following(self, model: ThroughputModel, kind: Kind) -> Rebalancer:
        """Return the rebalancer with today's model; a new one, that knows the same prompts, for another kind."""
        if self._rebalancer is None or kind != self._kind:
            self._rebalancer, self._kind = Rebalancer(model, kind, self._options), kind
            for uncached_tokens, output_tokens in self._prompts:
                self._rebalancer.saw(uncached_tokens, output_tokens)
        self._rebalancer.follow(model)
        return self._rebalancer


def _least(nodes: Sequence[Standing]) -> str:
    """Return the node that has the least to finish first; ties by name."""
    return min(
        nodes, key=lambda node: (node.load.num_active, node.load.queue_tokens, node.name)
    ).name


def _model(observed: Observed) -> ThroughputModel | None:
    """Return the throughput model of what is observed; None while too little is."""
    rate, step_s = observed.prefill_tokens_per_s, observed.decode_step_s
    if rate is None or step_s is None:
        return None
    local = _profile("pd", observed, rate, step_s)
    prfaas, link = None, None
    if observed.num_prfaas:
        if observed.prfaas_tokens_per_s is None:
            return None
        prfaas = _profile("prfaas", observed, observed.prfaas_tokens_per_s, step_s)
        link = Link(
            bytes_per_s=observed.link_bytes_per_s or WIDE_BYTES_PER_S,
            max_egress_fraction=observed.egress_target,
        )
    return ThroughputModel(
        # The prompts are the rebalancer's.
        workload=Workload(lengths=Lengths(tokens=(1.0,), shares=(1.0,)), mean_output_tokens=1.0),
        local=local,
        prfaas=prfaas,
        link=link,
        min_decode_tokens_per_s=1 / step_s,
    )


def _profile(name: str, observed: Observed, tokens_per_s: float, step_s: float) -> Profile:
    first, last = max(1.0, observed.first_token_bytes), observed.long_bytes
    return Profile(
        name=name,
        hardware="observed",
        gpus_per_instance=1,
        prefill_s=PolynomialCurve(coefficients=(0.0, 1 / tokens_per_s)),
        prefill_provenance="measured",
        kv_bytes=LinearCurve(tokens=(1.0, LONG_TOKENS), values=(first, max(last, first + 1.0))),
        decode=DecodeProfile(
            step_s=LinearCurve(tokens=(1.0,), values=(step_s,)),
            max_batch=max(1, observed.max_running),
            provenance="measured",
        ),
    )
