"""The long time scale inside one node: its t, and how much of its engine is a prefill instance.

PrfaaS §3.4.3 in small: the node is cut into slices that prefill or decode, each with its share of what
the node and its peers do, and the plan of a cluster is solved for those. Noise makes nothing flap: t moves
only by a good part of itself and if two looks agree, the slices if several do, and then they rest.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf

from prfaas.scheduler.curves import Curve, LinearCurve, PolynomialCurve, scaled
from prfaas.scheduler.lengths import Lengths, of_sample
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.planner import best_cut
from prfaas.scheduler.profile import (
    WIDE_BYTES_PER_S,
    DecodeProfile,
    Link,
    Prior,
    Profile,
    Workload,
)
from prfaas.scheduler.throughput import Shape, ThroughputModel
from prfaas.scheduler.view import known_rate

SLICES = 10
MIN_SHARE = 0.1
"""Of the steps, that may carry prefill whatever decodes: no prompt starves."""
MIN_THRESHOLD_TOKENS, MAX_THRESHOLD_TOKENS = 64.0, 1e9
MIN_MOVE_FRACTION = 0.1
"""Of t, that another t has to be away to be taken."""
EWMA_WEIGHT = 0.3
"""Of what the newest look sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a node sees of itself and its peers at one look; None is unknown."""

    prefill_tokens_per_s: float | None = None
    """Of steps with prefill, whatever share of all steps these are, for a prompt of the mean length."""
    prefill_chunk_s: float | None = None
    """Of such a step with a whole chunk beside decodes."""
    decode_step_s: float | None = None
    """Of the others."""
    num_decoding: int = 0
    num_peers: int = 0
    """Peers that could be sent prompts."""
    peer_tokens_per_s: float | None = None
    """Of one of them, for such a prompt."""
    link_bytes_per_s: float | None = None
    """From all of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """What the node is to do until the next look."""

    threshold_tokens: float | None
    """None: t stays, for nothing can be said of it or somebody has set it."""
    prefill_share: float
    """Of the steps in which sequences decode, those that may carry prefill; MIN_SHARE to 1."""


@dataclass(slots=True)
class _Average:
    value: float | None = None

    def add(self, seen: float | None) -> None:
        """Move towards what was seen; what is no rate changes nothing."""
        seen = known_rate(seen)
        if seen is not None:
            self.value = (
                seen if self.value is None else self.value + EWMA_WEIGHT * (seen - self.value)
            )


@dataclass(slots=True)
class _Averages:
    """Of all looks."""

    local_rate: _Average = field(default_factory=_Average)
    peer_rate: _Average = field(default_factory=_Average)
    link_rate: _Average = field(default_factory=_Average)
    chunk_s: _Average = field(default_factory=_Average)
    step_s: _Average = field(default_factory=_Average)
    step_factor: _Average = field(default_factory=_Average)
    """Observed by what the profile says of such a batch."""


class Adaptation:
    """Sees every request, looks now and then, and says what t and share are to be.

    Args:
        options: the policy, whether t is set, and how slowly things change.
        kv_bytes: S_kv of the model.
        max_batch: sequences that the engine decodes at once, at most.
        prior: the node's profile; what is observed corrects it. Without one, times grow straight.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        *,
        kv_bytes: LinearCurve,
        max_batch: int,
        prior: Prior | None = None,
    ) -> None:
        self._options = options
        self._rebalance = options.rebalance
        self._kv_bytes = kv_bytes
        self._max_batch = max_batch
        self._prior = prior
        self._prompts: deque[tuple[int, int]] = deque(maxlen=options.rebalance_prompts)
        self._seen = _Averages()
        self._threshold_tokens: float = options.first_threshold_tokens
        self._pull = 0
        """Which way the last look wanted to move t."""
        self._slices: int | None = None
        """That prefill; None: nothing says how many, and no step is without prefill."""
        self._wanted: list[int] = []
        """What the last looks in a row wanted instead, all on the same side of it."""
        self._changed_s = -inf

    def saw(self, uncached_tokens: int, output_tokens: int) -> None:
        """Take note of a request; one whose prompt was not computed here or at a peer has 0 uncached tokens."""
        self._prompts.append((max(0, uncached_tokens), max(1, output_tokens)))

    @property
    def mean_tokens(self) -> int | None:
        """Return the mean length of the prompts whose prefills are planned; None before the first."""
        lengths = [tokens for tokens, _ in self._prompts if tokens]
        return round(sum(lengths) / len(lengths)) if lengths else None

    def look(self, now_s: float, observed: Observed) -> Adapted:
        """Return what is to be done; few prompts, or nothing known of the engine, change nothing."""
        self._observe(observed)
        model = self._model(observed)
        if model is None:
            return Adapted(threshold_tokens=None, prefill_share=self._share())
        num_peers = observed.num_peers if model.prfaas is not None else 0
        plans = [self._rate(model, num_peers, slices) for slices in range(1, SLICES)]
        self._settle_slices(plans, now_s)
        slices = SLICES - 1 if self._slices is None else self._slices
        adapted = None
        if num_peers and self._adapts_threshold:
            adapted = self._settled_threshold(
                model.threshold_at(self._cut(model, num_peers, slices))
            )
        return Adapted(threshold_tokens=adapted, prefill_share=self._share())

    @property
    def _adapts_threshold(self) -> bool:
        is_by_length = self._options.policy_in_force in ("static", "threshold", "predictive")
        return is_by_length and self._options.threshold_tokens is None

    def _observe(self, observed: Observed) -> None:
        seen = self._seen
        seen.local_rate.add(observed.prefill_tokens_per_s)
        seen.peer_rate.add(observed.peer_tokens_per_s)
        seen.link_rate.add(observed.link_bytes_per_s)
        seen.chunk_s.add(observed.prefill_chunk_s)
        seen.step_s.add(observed.decode_step_s)
        step_s = known_rate(observed.decode_step_s)
        if step_s is not None and self._prior is not None and self._prior.decode is not None:
            profile_s = self._prior.decode.step_s(max(1, observed.num_decoding))
            seen.step_factor.add(step_s / profile_s)

    def _settle_slices(self, plans: list[float], now_s: float) -> None:
        """Take the slices that promise the most, if looks agree and the last change is long ago."""
        now = SLICES - 1 if self._slices is None else self._slices
        best = max(range(1, SLICES), key=lambda slices: (plans[slices - 1], -abs(slices - now)))
        if plans[best - 1] < (1 + self._rebalance.min_gain_fraction) * plans[now - 1]:
            self._wanted.clear()
            return
        if self._wanted and (self._wanted[-1] > now) != (best > now):
            self._wanted.clear()
        self._wanted.append(best)
        has_rested = now_s - self._changed_s >= self._rebalance.dwell_s
        if len(self._wanted) >= self._rebalance.confirmations and has_rested:
            self._slices, self._changed_s = best, now_s
            self._wanted.clear()

    def _settled_threshold(self, tokens: float) -> float:
        """Return t: another one once two looks in a row are far enough from it, on the same side."""
        tokens = min(max(tokens, MIN_THRESHOLD_TOKENS), MAX_THRESHOLD_TOKENS)
        old, pull = self._threshold_tokens, 0
        if abs(tokens - old) >= MIN_MOVE_FRACTION * old:
            pull = 1 if tokens > old else -1
        if pull and pull == self._pull:
            self._threshold_tokens, pull = tokens, 0
        self._pull = pull
        return self._threshold_tokens

    def _share(self) -> float:
        """Return the share of the steps that takes the slices' part of the time."""
        chunk_s, step_s = self._seen.chunk_s.value, self._seen.step_s.value
        if self._slices is None or chunk_s is None or step_s is None:
            return 1.0
        part = self._slices / SLICES
        steps = part * step_s / (part * step_s + (1 - part) * chunk_s)
        return min(max(steps, MIN_SHARE), 1.0)

    def _rate(self, model: ThroughputModel, num_peers: int, slices: int) -> float:
        """Return Lambda_max with so many slices that prefill."""
        cut = self._cut(model, num_peers, slices)
        return model.rates(_shape(num_peers, slices), cut).lambda_max_rps

    def _cut(self, model: ThroughputModel, num_peers: int, slices: int) -> int:
        policy = self._options.policy_in_force
        if not num_peers or policy == "local":
            return model.num_cuts - 1
        if policy == "always-remote":
            return 0
        if self._options.threshold_tokens is not None:
            return model.cut_at(self._options.threshold_tokens)
        return best_cut(model, _shape(num_peers, slices))

    def _model(self, observed: Observed) -> ThroughputModel | None:
        """Return the model of the slices; None until enough was seen."""
        prompts = [prompt for prompt in self._prompts if prompt[0]]
        decode = self._decode()
        if len(prompts) < self._rebalance.num_prompts // 4 or decode is None:
            return None
        lengths = of_sample(tokens for tokens, _ in prompts)
        num_outputs = sum(tokens for _, tokens in self._prompts)
        local_s = self._prefill_s(lengths, self._seen.local_rate.value)
        peer_s = self._prefill_s(lengths, self._seen.peer_rate.value)
        if local_s is None:
            return None
        local = Profile(
            name="this node",
            hardware="as observed",
            gpus_per_instance=1,
            prefill_s=local_s,
            prefill_provenance="measured",
            kv_bytes=self._kv_bytes,
            decode=decode,
        )
        has_peers = observed.num_peers > 0 and peer_s is not None
        return ThroughputModel(
            workload=Workload(lengths=lengths, mean_output_tokens=num_outputs / len(prompts)),
            local=local,
            prfaas=replace(local, name="its peers", prefill_s=peer_s)
            if peer_s and has_peers
            else None,
            link=self._link() if has_peers else None,
            min_decode_tokens_per_s=1 / decode.step_s(decode.max_batch),
        )

    def _link(self) -> Link:
        """Return the link of all slices."""
        rate = self._seen.link_rate.value or WIDE_BYTES_PER_S
        return Link(bytes_per_s=SLICES * rate, max_egress_fraction=self._options.egress_target)

    def _prefill_s(self, lengths: Lengths, rate: float | None) -> Curve | None:
        """Return the profile's curve, so that a prompt of the mean length has the observed rate."""
        prior = self._prior
        if prior is None:
            return None if rate is None else PolynomialCurve(coefficients=(0.0, 1 / rate))
        mean_tokens = lengths.mean_tokens
        expected = prior.speed * mean_tokens / prior.prefill_s(mean_tokens)
        return scaled(prior.prefill_s, expected / (rate or expected) / prior.speed)

    def _decode(self) -> DecodeProfile | None:
        """Return the profile's steps by what is observed, or the observed step for every batch."""
        step_s = self._seen.step_s.value
        if self._prior is not None and self._prior.decode is not None:
            decode = self._prior.decode
            factor = self._seen.step_factor.value or 1 / self._prior.speed
            values = tuple(value * factor for value in decode.step_s.values)
            return replace(
                decode,
                step_s=LinearCurve(tokens=decode.step_s.tokens, values=values),
                max_batch=min(decode.max_batch, self._max_batch),
            )
        if step_s is None:
            return None
        return DecodeProfile(
            step_s=LinearCurve(tokens=(1.0,), values=(step_s,)),
            max_batch=self._max_batch,
            provenance="measured",
        )


def _shape(num_peers: int, slices: int) -> Shape:
    return Shape(num_prfaas=SLICES * num_peers, num_prefill=slices, num_decode=SLICES - slices)
