"""Which steps may prefill while sequences decode. Pure."""

MIN_PREFILL_SHARE = 0.1
"""Less would let prompts wait without end for answers that never end."""
_STEP = 1000
"""Credit that a prefill costs: whole numbers, so that a tenth ten times is one."""


def check_prefill_share(share: float) -> float:
    """Return `share`, or raise ValueError if it is no part of the steps that prefill can live on."""
    if not MIN_PREFILL_SHARE <= share <= 1:
        raise ValueError(f"a prefill share of {share} is not from {MIN_PREFILL_SHARE} to 1")
    return share


class PrefillShare:
    """Counts what prefill may claim of the steps in which sequences decode.

    Of any run of such steps at most its share, and one more, carry prefill; all of its share but
    one do, if there is always some that can run. So a prompt that comes after a pause begins at once.
    """

    def __init__(self) -> None:
        self._per_step = _STEP
        self._credit = _STEP

    def set(self, share: float) -> None:
        """Let this share of the steps from now on carry prefill; raises ValueError."""
        self._per_step = round(check_prefill_share(share) * _STEP)

    def begin(self) -> bool:
        """Begin a step in which sequences decode; return whether it may prefill, too."""
        self._credit += self._per_step
        return self._credit >= _STEP

    def end(self, *, has_prefill: bool) -> None:
        """Say whether the step that was begun carries prefill; what it did not use is one at most."""
        self._credit = self._credit - _STEP if has_prefill else min(self._credit, _STEP)
