"""How fast the engine prefills and decodes, as others should expect it. Pure."""

import math

MEMORY_TOKENS = 4096
"""The average of prefills reaches back about this many tokens."""
FIRST_TOKENS = 128
"""A step of few takes what any step takes: before so many in all nothing is known of a prompt's pace."""
MEMORY_STEPS = 32
"""That of decode steps about this many of them."""


class PrefillRate:
    """A moving average over tokens, so that tiny prompts do not speak for long ones."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0 before FIRST_TOKENS."""
        self._num_tokens = 0
        self._duration_s = 0.0
        """Of those before."""

    def add(self, num_tokens: int, duration_s: float) -> None:
        """Take note of a step that prefilled `num_tokens`, whatever else it did."""
        if not num_tokens or duration_s <= 0:
            return
        if self.tokens_per_s:
            weight = 1 - math.exp(-num_tokens / MEMORY_TOKENS)
            self.tokens_per_s += weight * (num_tokens / duration_s - self.tokens_per_s)
            return
        self._num_tokens += num_tokens
        self._duration_s += duration_s
        if self._num_tokens >= FIRST_TOKENS:
            self.tokens_per_s = self._num_tokens / self._duration_s


class StepTimes:
    """What steps take.

    Args:
        mixed_chunk_tokens: the most prefill of a step in which sequences decode.
    """

    def __init__(self, mixed_chunk_tokens: int) -> None:
        self.decode_step_s: float | None = None
        """Of a step that only decodes; None before the first."""
        self._mixed_chunk_tokens = mixed_chunk_tokens
        self._offered = PrefillRate()
        """With the steps between, in which prefill had to wait for its share."""
        self._in_step = PrefillRate()
        self._held_back_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """What a prompt gets; 0 is unknown."""
        return self._offered.tokens_per_s

    @property
    def prefill_chunk_s(self) -> float | None:
        """Of a step with a whole chunk of prefill beside decodes; None is unknown."""
        rate = self._in_step.tokens_per_s
        return self._mixed_chunk_tokens / rate if rate else None

    def add(
        self, duration_s: float, *, num_prefill_tokens: int, is_prefill_held_back: bool
    ) -> None:
        """Take note of a step that computed something."""
        if is_prefill_held_back:
            self._held_back_s += duration_s
        else:
            self._offered.add(num_prefill_tokens, self._held_back_s + duration_s)
            self._held_back_s = 0.0
        if num_prefill_tokens:
            self._in_step.add(num_prefill_tokens, duration_s)
        elif self.decode_step_s is None:
            self.decode_step_s = duration_s
        else:
            self.decode_step_s += (duration_s - self.decode_step_s) / MEMORY_STEPS
