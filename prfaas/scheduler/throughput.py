"""The throughput model of PrfaaS §3.4: what each stage of a deployment carries, and all together.

Rates are requests per second. Lengths L are uncached prompt tokens; prompts longer than the
threshold t go to the PrfaaS cluster, p = P(L > t) of them. A stage's rate follows from the expected
service time of the prompts that reach it, E[T_prefill(L) | side of t], where the paper writes
T_prefill(l_long) and T_prefill(l_short): that is what a queue sees, and T_prefill is not linear.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Literal

from prfaas.scheduler.curves import Curve
from prfaas.scheduler.profile import Link, Profile, Workload

Stage = Literal["prfaas", "link", "prefill", "decode"]


def kv_throughput(kv_bytes: float, prefill_s: float) -> float:
    """Return Phi_kv(l) = S_kv(l) / T_prefill(l), bytes per second (PrfaaS eq. 1)."""
    return kv_bytes / prefill_s


def cluster_egress(num_gpus: float, gpus_per_instance: int, phi_bytes_per_s: float) -> float:
    """Return B_out = (N / P) Phi_kv(L_avg), bytes per second of N busy GPUs (PrfaaS eq. 2)."""
    return num_gpus / gpus_per_instance * phi_bytes_per_s


def prfaas_rate(
    num_prfaas: int, mean_prefill_s: float, egress_bytes_per_s: float, mean_kv_bytes: float
) -> float:
    """Return Theta_prfaas = min(N_prfaas / T_prefill, B_out / S_kv) (PrfaaS eq. 3).

    Both of long prompts. B_out is what the link may carry: what N_prfaas instances make at most
    (eq. 2) never binds before their own first term does.
    """
    return min(num_prfaas / mean_prefill_s, egress_bytes_per_s / mean_kv_bytes)


def prefill_rate(num_prefill: int, mean_prefill_s: float) -> float:
    """Return Theta_pd_p = N_p / T_prefill of short prompts (PrfaaS eq. 4)."""
    return num_prefill / mean_prefill_s


def decode_rate(num_decode: int, batch: int, step_s: float, mean_output_tokens: float) -> float:
    """Return Theta_pd_d = N_d BS_max / (T_decode L_out) (PrfaaS eq. 5)."""
    return num_decode * batch / (step_s * mean_output_tokens)


def system_rate(
    theta_prfaas: float | None,
    theta_prefill: float | None,
    theta_decode: float,
    offload_fraction: float,
) -> float:
    """Return Lambda_max = min(Theta_prfaas / p, Theta_pd_p / (1 - p), Theta_pd_d) (PrfaaS eq. 6).

    A stage that no prompt reaches is None and limits nothing.
    """
    long = inf if theta_prfaas is None else theta_prfaas / offload_fraction
    short = inf if theta_prefill is None else theta_prefill / (1 - offload_fraction)
    return min(long, short, theta_decode)


def prefill_balance(theta_prfaas: float, theta_prefill: float, offload_fraction: float) -> float:
    """Return (Theta_prfaas / p) / (Theta_pd_p / (1 - p)): 1 at the best t (PrfaaS eq. 7)."""
    return theta_prfaas / offload_fraction / (theta_prefill / (1 - offload_fraction))


def stage_balance(theta_prfaas: float, theta_prefill: float, theta_decode: float) -> float:
    """Return (Theta_prfaas + Theta_pd_p) / Theta_pd_d: 1 at the best N_p : N_d (PrfaaS eq. 8)."""
    return (theta_prfaas + theta_prefill) / theta_decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many instances each role has."""

    num_prfaas: int = 0
    num_prefill: int = 0
    num_decode: int

    def __post_init__(self) -> None:
        """Raise ValueError for a shape that cannot finish a request."""
        if min(self.num_prfaas, self.num_prefill) < 0 or self.num_decode < 1:
            raise ValueError(f"{self}: no count below 0, and an instance that decodes")
        if self.num_prfaas + self.num_prefill < 1:
            raise ValueError(f"{self}: no instance prefills")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a shape carries at one threshold; a stage that no prompt reaches is None."""

    theta_prfaas_rps: float | None
    theta_prefill_rps: float | None
    theta_decode_rps: float
    offload_fraction: float
    lambda_max_rps: float
    bottleneck: Stage
    egress_bytes_per_s: float
    """Of KVCache from the PrfaaS cluster at Lambda_max, on average."""


class ThroughputModel:
    """A workload on two kinds of instances: the rates of any shape and threshold, each in O(1).

    A cut k sends the prompts from the k-th length on to the PrfaaS cluster: 0 sends all of them,
    `num_cuts - 1` none. Every threshold acts as one of the cuts.
    """

    def __init__(
        self,
        *,
        workload: Workload,
        local: Profile,
        prfaas: Profile | None = None,
        link: Link | None = None,
        min_decode_tokens_per_s: float,
    ) -> None:
        """Add up the work of all cuts.

        Raises:
            ValueError: a PrfaaS cluster without a link, local instances without a decode profile,
                or a speed of decoding that they do not reach with a batch of one.
        """
        if (prfaas is None) != (link is None):
            raise ValueError("a PrfaaS cluster needs a link, and a link one")
        if local.decode is None:
            raise ValueError(f"profile {local.name} has no decode")
        self.workload, self.local, self.prfaas, self.link = workload, local, prfaas, link
        self.batch = local.decode.batch_within(1 / min_decode_tokens_per_s)
        """BS_max: the largest batch that decodes as fast as is asked for."""
        if self.batch == 0:
            raise ValueError(
                f"profile {local.name} decodes {1 / local.decode.step_s(1):.4g} tokens/s alone;"
                f" {min_decode_tokens_per_s:g} are asked for"
            )
        self.step_s = local.decode.step_s(self.batch)
        shares = workload.lengths.shares
        self._below = _sums(shares)
        self._local_s = self._work(local.prefill_s)
        self._prfaas_s = None if prfaas is None else self._work(prfaas.prefill_s)
        self._kv_bytes = None if prfaas is None else self._work(prfaas.kv_bytes)

    @property
    def num_cuts(self) -> int:
        """Return how many ways there are to divide the lengths."""
        return len(self._below)

    def cut_at(self, threshold_tokens: float) -> int:
        """Return the cut that sends exactly the prompts longer than the threshold away."""
        return bisect_right(self.workload.lengths.tokens, threshold_tokens)

    def threshold_at(self, cut: int) -> float:
        """Return the smallest threshold that makes a cut: the longest length that stays."""
        return 0.0 if cut == 0 else self.workload.lengths.tokens[cut - 1]

    def offload_fraction(self, cut: int) -> float:
        """Return p of a cut, exactly 0 and 1 at the ends."""
        if cut == 0:
            return 1.0
        return 0.0 if cut == self.num_cuts - 1 else 1 - self._below[cut]

    def limits(self, shape: Shape, cut: int) -> dict[Stage, float]:
        """Return the rate of all requests at which each stage is full; the least is Lambda_max.

        The terms of PrfaaS eq. 6, with eq. 3 as its two; the first two never fall as the cut moves
        up, the third never rises. Prompts for a role without instances have a rate of 0.
        """
        found: dict[Stage, float] = {}
        if cut < self.num_cuts - 1:
            found["prfaas"] = found["link"] = 0.0
            if self._prfaas_s is not None and self._kv_bytes is not None:
                assert self.link is not None
                long_bytes = self._kv_bytes[-1] - self._kv_bytes[cut]
                found["link"] = self.link.egress_bytes_per_s / long_bytes
                found["prfaas"] = shape.num_prfaas / (self._prfaas_s[-1] - self._prfaas_s[cut])
        if cut > 0:
            found["prefill"] = shape.num_prefill / self._local_s[cut]
        found["decode"] = decode_rate(
            shape.num_decode, self.batch, self.step_s, self.workload.mean_output_tokens
        )
        return found

    def rates(self, shape: Shape, cut: int) -> Rates:
        """Return what a shape carries with the prompts divided at a cut."""
        p = self.offload_fraction(cut)
        theta_prfaas = theta_prefill = None
        mean_kv_bytes = 0.0
        if p > 0:
            theta_prfaas = 0.0
            if self._prfaas_s is not None and self._kv_bytes is not None:
                assert self.link is not None
                mean_kv_bytes = (self._kv_bytes[-1] - self._kv_bytes[cut]) / p
                mean_s = (self._prfaas_s[-1] - self._prfaas_s[cut]) / p
                theta_prfaas = prfaas_rate(
                    shape.num_prfaas, mean_s, self.link.egress_bytes_per_s, mean_kv_bytes
                )
        if p < 1:
            theta_prefill = prefill_rate(shape.num_prefill, self._local_s[cut] / (1 - p))
        theta_decode = decode_rate(
            shape.num_decode, self.batch, self.step_s, self.workload.mean_output_tokens
        )
        lambda_max = system_rate(theta_prfaas, theta_prefill, theta_decode, p)
        limits = self.limits(shape, cut)
        return Rates(
            theta_prfaas_rps=theta_prfaas,
            theta_prefill_rps=theta_prefill,
            theta_decode_rps=theta_decode,
            offload_fraction=p,
            lambda_max_rps=lambda_max,
            bottleneck=min(limits, key=lambda stage: limits[stage]),
            egress_bytes_per_s=lambda_max * p * mean_kv_bytes,
        )

    def service_times(self, cut: int) -> list[tuple[float, float]]:
        """Return (seconds to the first token without any queue, share of prompts), ascending.

        A remote prefill sends KVCache as it computes: the slower of both counts, and a round trip.
        """
        tokens, shares = self.workload.lengths.tokens, self.workload.lengths.shares
        times = [self.local.prefill_s(length) for length in tokens[:cut]]
        for length in tokens[cut:]:
            assert self.prfaas is not None, "prompts for a PrfaaS cluster that is not there"
            assert self.link is not None
            transfer_s = self.prfaas.kv_bytes(length) / self.link.bytes_per_s
            times.append(max(self.prfaas.prefill_s(length), transfer_s) + self.link.rtt_s)
        return sorted(zip(times, shares, strict=True))

    def _work(self, curve: Curve) -> list[float]:
        """Return E[curve(L); L below the cut] for each cut."""
        lengths = self.workload.lengths
        return _sums(
            [curve(t) * share for t, share in zip(lengths.tokens, lengths.shares, strict=True)]
        )


def _sums(values: list[float] | tuple[float, ...]) -> list[float]:
    return list(accumulate(values, initial=0.0))
