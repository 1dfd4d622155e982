"""What a kind of instance takes to prefill, keep and decode, and what lies between two clusters."""

from dataclasses import dataclass
from typing import Literal

from prfaas.scheduler.curves import Curve, LinearCurve
from prfaas.scheduler.lengths import Lengths

Provenance = Literal["published", "fitted", "measured"]
"""fitted: chosen so that figures derived from it come out as published."""

ROUNDING = 1e-9
"""Relative: 1 / 40 s and 0.025 s are the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProfile:
    """T_decode: seconds of one step for a batch of sequences."""

    step_s: LinearCurve
    """Batch size -> seconds."""
    max_batch: int
    provenance: Provenance

    def batch_within(self, step_limit_s: float) -> int:
        """Return BS_max: the largest batch whose step is within the limit; 0 if none is."""
        limit_s = step_limit_s * (1 + ROUNDING)
        low, high = 0, self.max_batch
        while low < high:  # steps never get shorter as the batch grows
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.step_s(middle) <= limit_s else (low, middle - 1)
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a GPU costs, in a unit that all profiles of a plan share."""

    per_gpu: float
    provenance: Provenance


WIDE_BYTES_PER_S = 1e15
"""A link that no transfer has waited for: nothing is known of it but that it was no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from the PrfaaS cluster to the local one."""

    bytes_per_s: float
    rtt_s: float = 0.0
    max_egress_fraction: float = 1.0
    """Of the link, that planned KVCache may fill on average."""

    @property
    def egress_bytes_per_s(self) -> float:
        """Return what planned KVCache may fill."""
        return self.bytes_per_s * self.max_egress_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of instance: one replica of one model on so many GPUs of one kind."""

    name: str
    hardware: str
    gpus_per_instance: int
    prefill_s: Curve
    """T_prefill: uncached tokens -> seconds."""
    prefill_provenance: Provenance
    kv_bytes: LinearCurve
    """S_kv: tokens -> bytes."""
    decode: DecodeProfile | None = None
    cost: Cost | None = None
    link: Link | None = None
    """What was measured between a PrfaaS cluster and this instance."""

    @property
    def instance_cost(self) -> float | None:
        """Return what one instance costs; None if that is not known."""
        return None if self.cost is None else self.cost.per_gpu * self.gpus_per_instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What a node predicts by as long as it has observed nothing itself."""

    prefill_s: Curve
    """Uncached tokens -> seconds of their prefill here."""
    speed: float = 1.0
    """So many times as fast is this node."""
    link: Link | None = None
    """To its peer."""
    decode: DecodeProfile | None = None
    """Of its steps, at speed 1."""

    def prefill_tokens_per_s(self, num_tokens: int) -> float | None:
        """Return the rate at which a prompt of that many tokens is prefilled; None for an empty one."""
        return self.speed * num_tokens / self.prefill_s(num_tokens) if num_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests: uncached lengths of their prompts, and how long their answers are."""

    lengths: Lengths
    mean_output_tokens: float
