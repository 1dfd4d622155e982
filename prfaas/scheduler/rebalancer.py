"""The long time scale: which local instances prefill and which decode, and t, from what was seen.

PrfaaS §3.4.3: the plan is solved anew from the prompts of late. An instance changes its role, one at a
time, only if the plan is better by a margin in several looks running, and not soon after the last
change: noise makes nothing flap.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from prfaas.scheduler.lengths import of_sample
from prfaas.scheduler.planner import Kind, Plan, best_cut, plan
from prfaas.scheduler.profile import Workload
from prfaas.scheduler.throughput import Shape, ThroughputModel

LocalRole = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceOptions:
    """How much it takes to change a role."""

    period_s: float = 60.0
    """Between two looks."""
    dwell_s: float = 300.0
    """Between two changes, at least."""
    min_gain_fraction: float = 0.05
    """Of Lambda_max, that the new plan has to promise."""
    confirmations: int = 3
    """Looks in a row that have to want the same change."""
    num_prompts: int = 2_000
    """The last ones are what the plan is solved for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """What one look decided."""

    threshold_tokens: float | None
    """t of the roles as they are; None where nothing is routed by length, or too little was seen."""
    to: LocalRole | None
    """The role that one instance of the other one takes; None leaves all as they are."""
    gain_fraction: float = 0.0
    """Of Lambda_max, that the best roles would bring."""


class Rebalancer:
    """Sees every request, looks now and then, and says who changes."""

    def __init__(self, model: ThroughputModel, kind: Kind, options: RebalanceOptions) -> None:
        self._model = model
        self._kind = kind
        self._options = options
        self._prompts: deque[tuple[int, int]] = deque(maxlen=options.num_prompts)
        self._wanted: LocalRole | None = None
        self._num_wanted = 0
        self._changed_s: float | None = None

    def follow(self, model: ThroughputModel) -> None:
        """Solve for other profiles or another link from now on; what was seen stays."""
        self._model = model

    def saw(self, uncached_tokens: int, output_tokens: int) -> None:
        """Take note of a request."""
        self._prompts.append((uncached_tokens, max(1, output_tokens)))

    def look(self, shape: Shape, now_s: float) -> Rebalance:
        """Return what is to be done with the roles as they are; a change is taken as done.

        No role is left without an instance. A look that sees too few prompts changes nothing.
        """
        if self._kind == "naive" or len(self._prompts) < self._options.num_prompts // 4:
            return Rebalance(threshold_tokens=None, to=None)
        seen = self._seen()
        best = plan(
            seen,
            self._kind,
            num_prfaas=shape.num_prfaas,
            num_local=shape.num_prefill + shape.num_decode,
        )
        is_cut = self._kind == "prfaas"
        cut = best_cut(seen, shape) if is_cut else seen.num_cuts - 1
        gain = best.rates.lambda_max_rps / seen.rates(shape, cut).lambda_max_rps - 1
        return Rebalance(
            threshold_tokens=seen.threshold_at(cut) if is_cut else None,
            to=self._confirmed(self._direction(best, shape, gain), now_s),
            gain_fraction=gain,
        )

    def _seen(self) -> ThroughputModel:
        model, prompts = self._model, self._prompts
        return ThroughputModel(
            workload=Workload(
                lengths=of_sample(tokens for tokens, _ in prompts),
                mean_output_tokens=sum(tokens for _, tokens in prompts) / len(prompts),
            ),
            local=model.local,
            prfaas=model.prfaas,
            link=model.link,
            min_decode_tokens_per_s=1 / model.step_s,
        )

    def _direction(self, best: Plan, shape: Shape, gain: float) -> LocalRole | None:
        if gain < self._options.min_gain_fraction:
            return None
        if best.shape.num_prefill > shape.num_prefill and shape.num_decode > 1:
            return "prefill"
        if best.shape.num_decode > shape.num_decode and shape.num_prefill > 1:
            return "decode"
        return None

    def _confirmed(self, wanted: LocalRole | None, now_s: float) -> LocalRole | None:
        """Return the change if enough looks agree and the last change is long ago."""
        self._num_wanted = self._num_wanted + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if wanted is None or self._num_wanted < self._options.confirmations:
            return None
        if self._changed_s is not None and now_s - self._changed_s < self._options.dwell_s:
            return None
        self._changed_s, self._num_wanted = now_s, 0
        return wanted
