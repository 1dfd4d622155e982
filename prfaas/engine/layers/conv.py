"""The causal depthwise convolution over the last few tokens.

Its state is the last width - 1 rows that went in, as they were. A row's bits depend on the rows it
sees alone, however they were cut.

Shapes: T tokens, C channels, W width, S sequences.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class CausalConv:
    """y_t = bias + sum over i of weight_i * u_(t - W + 1 + i), by channel."""

    def __init__(self, weight_WC: Tensor, bias_C: Tensor | None = None) -> None:
        self._weight_WC = weight_WC.float().contiguous()
        self._bias_C = None if bias_C is None else bias_C.float().contiguous()
        self._num_kept = len(weight_WC) - 1

    def scan(
        self, rows_TC: Tensor, state_WC: Tensor, stops: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output [T, C], contiguous, and the state after each of `stops` rows."""
        all_TC = torch.cat([state_WC, rows_TC])
        windows = [all_TC[i : i + len(rows_TC)] for i in range(self._num_kept + 1)]
        return self._weigh(windows), [all_TC[n : n + self._num_kept].clone() for n in stops]

    def step(self, rows_SC: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the output [S, C] of one row of each of S sequences, and their states after it."""
        windows_SWC = torch.cat([torch.stack(list(states)), rows_SC[:, None]], dim=1)
        out_SC = self._weigh(windows_SWC.unbind(1))
        return out_SC, [window_WC[1:].clone() for window_WC in windows_SWC]

    def _weigh(self, shifted: Sequence[Tensor]) -> Tensor:
        out_TC = shifted[0] * self._weight_WC[0]
        for row_TC, weight_C in zip(shifted[1:], self._weight_WC[1:], strict=True):
            out_TC.addcmul_(row_TC, weight_C)
        return out_TC if self._bias_C is None else out_TC.add_(self._bias_C)
