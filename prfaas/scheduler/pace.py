"""What prefills of a peer take by their length: a line through the last ones. Pure.

A prefill has a fixed part: what a short one reached says little of a long one, and the other way round.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

NUM_PREFILLS = 8
"""Prefills that a line goes through."""
RECENCY = 0.7
"""The weight of each of them, as a part of the next newer one's."""
ALIKE_FACTOR = 2.0
"""Lengths that differ by less than this say nothing of a slope."""
LONG_TOKENS = 8192
"""The fixed part of a prefill of so many tokens does not count."""


class Prefill(NamedTuple):
    """One that was seen."""

    num_tokens: int
    seconds: float


class Pace(NamedTuple):
    """Seconds of a prefill: fixed_s + tokens * token_s."""

    fixed_s: float
    token_s: float

    def seconds(self, num_tokens: int) -> float:
        """Return what a prefill of so many tokens takes."""
        return self.fixed_s + num_tokens * self.token_s


def with_prefill(prefills: Sequence[Prefill], newest: Prefill) -> tuple[Prefill, ...]:
    """Return the prefills to remember, the newest first.

    One that took less than half of what was expected shows that the others of its magnitude are of another
    time. (One that took more needs no such rule: there will be others soon if that was chance.) Where they are too many the oldest of the commonest magnitude of length goes: many short ones do not
    make us forget the long one among them.
    """
    kept = [newest, *prefills]
    if prefills and newest.seconds < pace_of(prefills).seconds(newest.num_tokens) / 2:
        kept[1:] = [each for each in prefills if _magnitude(each) != _magnitude(newest)]
    if len(kept) > NUM_PREFILLS:
        counts = Counter(_magnitude(prefill) for prefill in kept)
        most = max(counts.values())
        oldest = max(i for i, prefill in enumerate(kept) if counts[_magnitude(prefill)] == most)
        del kept[oldest]
    return tuple(kept)


def pace_of(prefills: Sequence[Prefill]) -> Pace:
    """Return the line through prefills, the newest first: least squares, newer and shorter ones count more.

    The fixed part is not below 0, the slope above it. Lengths too alike to tell the two apart: all is slope
    from `LONG_TOKENS` on, and the shorter they are the more of it is taken to be fixed. Too much of that
    sends longer prompts there, which shows what they take; too little would keep them away for ever.

    Raises ValueError without a prefill.
    """
    tokens, seconds = _means(prefills)
    lengths = [prefill.num_tokens for prefill in prefills]
    if max(lengths) < ALIKE_FACTOR * min(lengths):
        return _of_one_length(tokens, seconds)
    across = along = 0.0
    for weight, prefill in _weighed(prefills):
        apart = prefill.num_tokens - tokens
        across += weight * apart * apart
        along += weight * apart * (prefill.seconds - seconds)
    token_s = along / across
    if not token_s > 0:  # longer ones were not slower
        return _of_one_length(tokens, seconds)
    fixed_s = seconds - token_s * tokens
    return Pace(fixed_s, token_s) if fixed_s > 0 else Pace(0.0, _slope_from_zero(prefills))


def mean_tokens_per_s(prefills: Sequence[Prefill]) -> float:
    """Return the rate of prefills together, newer ones counting more. Raises ValueError without one."""
    weights = [RECENCY**age for age in range(len(prefills))]
    if not weights:
        raise ValueError("no prefill")
    num_tokens = sum(w * prefill.num_tokens for w, prefill in zip(weights, prefills, strict=True))
    return num_tokens / sum(
        w * prefill.seconds for w, prefill in zip(weights, prefills, strict=True)
    )


def _of_one_length(tokens: float, seconds: float) -> Pace:
    if tokens >= LONG_TOKENS:
        return Pace(0.0, seconds / tokens)
    token_s = seconds / LONG_TOKENS
    return Pace(seconds - tokens * token_s, token_s)


def _slope_from_zero(prefills: Sequence[Prefill]) -> float:
    weighed = _weighed(prefills)
    along = sum(weight * prefill.num_tokens * prefill.seconds for weight, prefill in weighed)
    return along / sum(weight * prefill.num_tokens**2 for weight, prefill in weighed)


def _weighed(prefills: Sequence[Prefill]) -> list[tuple[float, Prefill]]:
    """Return weights beside prefills: noise grows with the length, its square as the square of it."""
    return [(RECENCY**age / prefill.num_tokens**2, prefill) for age, prefill in enumerate(prefills)]


def _means(prefills: Sequence[Prefill]) -> tuple[float, float]:
    """Return the mean length and the mean seconds."""
    if not prefills:
        raise ValueError("no prefill")
    weighed = _weighed(prefills)
    total = sum(weight for weight, _ in weighed)
    return (
        sum(weight * prefill.num_tokens for weight, prefill in weighed) / total,
        sum(weight * prefill.seconds for weight, prefill in weighed) / total,
    )


def _magnitude(prefill: Prefill) -> int:
    return prefill.num_tokens.bit_length()
