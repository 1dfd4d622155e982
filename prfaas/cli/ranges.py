"""Numbers that a flag takes."""

import math

import click


class FiniteRange(click.FloatRange):
    """Refuses what is not finite, too: no comparison keeps a NaN out of a range."""

    def convert(
        self, value: float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; click.BadParameter for one out of range, not finite or none."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number
