"""The distribution of uncached prompt lengths, as a weighted sample in order of length."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp, fsum, log
from statistics import NormalDist

LOGNORMAL_POINTS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths in ascending order, each once, and their shares, which add up to 1."""

    tokens: tuple[float, ...]
    shares: tuple[float, ...]

    def check(self) -> None:
        """Assert that the lengths ascend and that the shares add up to 1."""
        assert self.tokens, "no length"
        assert self.tokens[0] > 0
        assert all(low < high for low, high in pairwise(self.tokens))
        assert all(share > 0 for share in self.shares)
        assert len(self.tokens) == len(self.shares)
        assert abs(fsum(self.shares) - 1) < 1e-9

    @property
    def mean_tokens(self) -> float:
        """Return L_avg."""
        return fsum(t * share for t, share in zip(self.tokens, self.shares, strict=True))

    def quantile_tokens(self, fraction: float) -> float:
        """Return the shortest length that at least this share of prompts does not exceed."""
        sums = list(accumulate(self.shares))
        return self.tokens[min(bisect_left(sums, fraction - 1e-12), len(self.tokens) - 1)]


def of_sample(tokens: Iterable[float]) -> Lengths:
    """Return the distribution of observed lengths. Raises ValueError without any above 0."""
    return _weighted((length, 1.0) for length in tokens if length > 0)


def mixture(parts: Sequence[tuple[float, Lengths]]) -> Lengths:
    """Return the distribution of prompts that come from each part as often as its weight says."""
    total = fsum(weight for weight, _ in parts)
    return _weighted(
        (length, weight / total * share)
        for weight, part in parts
        for length, share in zip(part.tokens, part.shares, strict=True)
    )


def truncated_lognormal(
    *, mu: float, sigma: float, min_tokens: float, max_tokens: float, points: int = LOGNORMAL_POINTS
) -> Lengths:
    """Return a log-normal cut to [min_tokens, max_tokens]: the middles of `points` equal shares.

    Raises:
        ValueError: next to nothing of the distribution lies within the limits.
    """
    normal = NormalDist(mu, sigma)
    low, high = normal.cdf(log(min_tokens)), normal.cdf(log(max_tokens))
    if not high - low > 1e-6:
        raise ValueError(
            f"a share of {max(high - low, 0.0):.1g} of the log-normal (mu {mu:g}, sigma {sigma:g})"
            f" lies between {min_tokens:g} and {max_tokens:g} tokens; at least 1e-06 is needed"
        )
    quantiles = (low + (high - low) * (i + 0.5) / points for i in range(points))
    return _weighted((exp(normal.inv_cdf(quantile)), 1.0) for quantile in quantiles)


def _weighted(pairs: Iterable[tuple[float, float]]) -> Lengths:
    weights: defaultdict[float, float] = defaultdict(float)
    for length, weight in pairs:
        weights[length] += weight
    if not weights:
        raise ValueError("no prompt with an uncached token")
    tokens = sorted(weights)
    total = fsum(weights.values())
    return Lengths(tokens=tuple(tokens), shares=tuple(weights[length] / total for length in tokens))
