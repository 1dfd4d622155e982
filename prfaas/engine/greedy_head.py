"""The id of a row's largest logit, found by an int8 copy of the head and proved by the head itself.

The copy takes half the bytes of a float16 head, and reading the head is what a step of few rows waits
for. It never gives a result: it bounds every panel's logits, rigorously, and leaves out the panels
that cannot hold the largest. The few that are left are computed by the head's own kernel from the
head's own panels, so the answer is the one that all logits give, ties included.

Shapes: M rows, V vocabulary, D model dim, Q panels of P = PANEL_OUTPUTS ids, C panels that are left.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from prfaas.engine.linear import PanelLinear
from prfaas.engine.native.int8 import bounds, round_panels
from prfaas.engine.native.product import PANEL_OUTPUTS, product

MAX_ROWS = 16
"""With more, arithmetic takes longer than reading, and there is as much of it for the copy. Beside all
logits and their argmax (262,144 ids of 640 float16 weights, medians of ratios, 1 and 2 threads): 0.6 to
0.8 of the time for 1 to 8 rows, 0.7 to 0.9 for 12 and 16, 0.85 to 0.95 for 24 and 32."""
MAX_PANELS = 512
"""Left over; with more all logits are as fast."""

Float32s = NDArray[np.float32]


class GreedyHead:
    """The head of one model for those who want the largest logit only.

    Args:
        head: kept; without a bias.
        logits_scale: what the model multiplies logits by, more than 0; it can make two of them equal.
    """

    def __init__(self, head: PanelLinear, *, logits_scale: float = 1.0) -> None:
        assert head.bias_N is None
        self._panels_QDP = head.panels_QKP
        self._vocab_size = head.num_outputs
        self._logits_scale = np.float32(logits_scale)
        self._rounded = round_panels(head.panels_QKP, head.num_outputs)

    def largest(self, x_MD: Tensor) -> list[int] | None:
        """Return the id of each row's largest logit, the smallest id of equals.

        None: all logits are as fast, or only they can tell: a row is nearly zero, huge or not finite,
        or too many ids could be its largest.
        """
        num_rows = len(x_MD)
        if num_rows > MAX_ROWS or (found := bounds(x_MD, self._rounded)) is None:
            return None
        floors_M = found.floor_M
        if self._logits_scale != 1.0:
            floors_M = lowest_equal(floors_M, self._logits_scale)
        left_C = np.flatnonzero((found.upper_MQ >= floors_M[:, None]).any(axis=0))
        if not 0 < len(left_C) <= MAX_PANELS:
            return None
        num_left = len(left_C) * PANEL_OUTPUTS
        panels_CDP = from_numpy(self._panels_QDP.numpy()[left_C])  # torch would wake other threads
        logits_MN = product(x_MD, panels_CDP, num_left).numpy()
        logits_MN *= self._logits_scale
        num_panels = len(self._panels_QDP)
        if left_C[-1] == num_panels - 1:  # behind the last id the panel is filled up
            logits_MN = logits_MN[:, : num_left - num_panels * PANEL_OUTPUTS + self._vocab_size]
        best_M = logits_MN.argmax(axis=1)
        if not np.isfinite(logits_MN[np.arange(num_rows), best_M]).all():
            return None
        ids_M = left_C[best_M // PANEL_OUTPUTS] * PANEL_OUTPUTS + best_M % PANEL_OUTPUTS
        return ids_M.tolist()

    def agrees_with(self, x_MD: Tensor, products_MV: Tensor) -> bool:
        """Return whether bounds and ids are right for rows of which the head gave these products."""
        num_rows, num_panels = len(x_MD), len(self._panels_QDP)
        filled_MV = np.full((num_rows, num_panels * PANEL_OUTPUTS), -np.inf, np.float32)
        filled_MV[:, : self._vocab_size] = products_MV.numpy()
        peaks_MQ = filled_MV.reshape(num_rows, num_panels, PANEL_OUTPUTS).max(axis=2)
        found = bounds(x_MD, self._rounded)
        if found is not None:
            is_above = (peaks_MQ.max(axis=1) >= found.floor_M).all()
            is_below = (peaks_MQ <= found.upper_MQ).all()
            if not (is_above and is_below):
                return False
        filled_MV *= self._logits_scale
        return self.largest(x_MD) in (None, filled_MV.argmax(axis=1).tolist())


def lowest_equal(floors_M: Float32s, scale: np.float32) -> Float32s:
    """Return what is not above any float32 that `scale` takes to where it takes a floor, or higher."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled_M = floors_M * scale
        next_M = np.nextafter(scaled_M, np.float32(-np.inf))
        # What is rounded to `scaled` is not below the middle between it and the next float below.
        middle_M = (scaled_M.astype(np.float64) + next_M) / 2
        lowest_M = (middle_M / scale).astype(np.float32)
    return np.nextafter(lowest_M, np.float32(-np.inf))
