"""How long a replayed engine takes for what it does. Pure; torch-free."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTiming:
    """A profile's T_prefill and T_decode, as seconds of a faster or slower machine."""

    prefill_s: Callable[[float], float]
    """Uncached tokens -> seconds of their prefill; never falls."""
    decode_s: Callable[[float], float] | None
    """Sequences in a batch -> seconds of one step; None: this engine does not decode."""
    speed: float = 1.0
    """So many times as fast as the profile."""

    def chunk_s(self, start: int, end: int, num_tokens: int) -> float:
        """Return the seconds of the part from `start` to `end` of a prefill of `num_tokens`.

        The parts of a prefill add up to its whole. What it takes whatever its length is spread
        over its tokens, so that the first part does not stop everybody for it.
        """
        return (self._until(end, num_tokens) - self._until(start, num_tokens)) / self.speed

    def step_s(self, num_sequences: int) -> float:
        """Return the seconds that a step adds for the sequences that decode in it."""
        if not num_sequences:
            return 0.0
        assert self.decode_s is not None, "an engine without T_decode decodes"
        return self.decode_s(num_sequences) / self.speed

    def _until(self, position: int, num_tokens: int) -> float:
        fixed_s = self.prefill_s(0)
        return self.prefill_s(position) - fixed_s + fixed_s * position / num_tokens
