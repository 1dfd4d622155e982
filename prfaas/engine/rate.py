"""How fast the engine prefills, as others should expect it. Pure."""

import math

MEMORY_TOKENS = 4096
"""The average reaches back about this many prefill tokens."""


class PrefillRate:
    """A moving average over tokens, so that tiny prompts do not speak for long ones."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0 before the first prefill."""

    def add(self, num_tokens: int, duration_s: float) -> None:
        """Take note of a step that prefilled `num_tokens`, whatever else it did."""
        if num_tokens and duration_s > 0:
            rate = num_tokens / duration_s
            old_rate = self.tokens_per_s or rate
            weight = 1 - math.exp(-num_tokens / MEMORY_TOKENS)
            self.tokens_per_s = old_rate + weight * (rate - old_rate)
