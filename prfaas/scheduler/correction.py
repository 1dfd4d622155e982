"""A profile's prefill rate for a prompt, corrected by the rate that an engine shows."""

from math import exp

from prfaas.scheduler.profile import Prior
from prfaas.scheduler.view import known_rate


class RateCorrection:
    """What a profile said of the prompts of late, beside what they took.

    A profile knows that long prompts take more for each token; the engine's moving average knows
    how fast this machine is now.

    Args:
        prior: the profile; None: every prompt has the observed rate.
        memory_tokens: how far the engine's average reaches back.
    """

    def __init__(self, prior: Prior | None, *, memory_tokens: int) -> None:
        self._prior = prior
        self._memory_tokens = memory_tokens
        self._expected: float | None = None
        """The profile's rate of the prompts that the engine's average is of."""

    def computed(self, num_tokens: int) -> None:
        """Take note that so many tokens of one prompt are prefilled here."""
        said = None if self._prior is None else self._prior.prefill_tokens_per_s(num_tokens)
        if said is None:
            return
        old = said if self._expected is None else self._expected
        self._expected = old + (1 - exp(-num_tokens / self._memory_tokens)) * (said - old)

    def tokens_per_s(self, num_tokens: int, observed: float | None) -> float | None:
        """Return the rate that a prompt of so many tokens is to expect; None while nothing is known.

        `observed` is the engine's moving average; 0 and None are unknown.
        """
        rate = known_rate(observed)
        if self._prior is None:
            return rate
        said = self._prior.prefill_tokens_per_s(max(1, num_tokens))
        if rate is None or said is None or self._expected is None:
            return rate or said
        return said * rate / self._expected
