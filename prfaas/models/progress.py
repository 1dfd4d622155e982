"""How long steps tell their caller how far they are."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""(stage, done, total); a total of 0 is a stage of unknown length. May raise to stop the work."""


def silent(_stage: str, _done: int, _total: int) -> None:
    """Show nothing."""
