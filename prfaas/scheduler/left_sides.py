"""Which prompts do not go to their own side of t, and when that side is to be tried again.

What keeps them away may be a wrong estimate, which nothing else would correct.
"""

from dataclasses import dataclass

RETRY_AFTER_S = 60.0
"""A side that was left is tried again after this long."""
MAX_RETRY_AFTER_S = 960.0
"""As it is twice as far off with every try that changed nothing."""


@dataclass(frozen=True, slots=True)
class _Left:
    tried_s: float
    """When the side was tried, or left."""
    retry_after_s: float


class LeftSides:
    """Lengths, by magnitude, whose last prompt went to the other side of t."""

    def __init__(self) -> None:
        self._left: dict[int, _Left] = {}

    def __contains__(self, num_tokens: int) -> bool:
        """Return whether the last prompt like this one went to the other side."""
        return num_tokens.bit_length() in self._left

    def stayed(self, num_tokens: int) -> None:
        """Take note that such a prompt goes to its own side."""
        self._left.pop(num_tokens.bit_length(), None)

    def left(self, num_tokens: int, now_s: float) -> None:
        """Take note that such a prompt goes to the other side."""
        self._left.setdefault(num_tokens.bit_length(), _Left(now_s, RETRY_AFTER_S))

    def is_due(self, num_tokens: int, now_s: float) -> bool:
        """Return whether such a prompt may try its own side, though the other one is predicted earlier."""
        left = self._left.get(num_tokens.bit_length())
        return left is not None and now_s >= left.tried_s + left.retry_after_s

    def tried(self, num_tokens: int, now_s: float) -> None:
        """Take note that such a prompt, which was due, tries its own side.

        It has left it all the same, until one is predicted to be no worse off there.
        """
        magnitude = num_tokens.bit_length()
        wait_s = min(2 * self._left[magnitude].retry_after_s, MAX_RETRY_AFTER_S)
        self._left[magnitude] = _Left(now_s, wait_s)
