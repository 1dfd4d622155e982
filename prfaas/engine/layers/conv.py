"""The causal depthwise convolution over the last few tokens.

Its state is the last width - 1 rows that went in, as they were. A row's bits depend on the rows it
sees alone, however they were cut.

Shapes: T tokens, C channels, W width, S sequences.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from prfaas.engine.native.conv import ConvPiece, convolve
from prfaas.engine.recurrence import Part

BLOCK_VALUES = 1 << 17
"""Values computed at once: they stay in cache."""


class CausalConv:
    """y_t = bias + sum over i of weight_i * u_(t - W + 1 + i), by channel; then silu, if it has."""

    def __init__(
        self, weight_WC: Tensor, bias_C: Tensor | None = None, *, has_silu: bool = False
    ) -> None:
        self._weight_WC = weight_WC.float().contiguous()
        self._bias_C = None if bias_C is None else bias_C.float().contiguous()
        self._num_kept = len(weight_WC) - 1
        self._block_rows = max(self._num_kept, BLOCK_VALUES // weight_WC.shape[1])
        self._has_silu = has_silu

    @property
    def device(self) -> torch.device:
        """Where the weights lie, and what is computed."""
        return self._weight_WC.device

    def walk(self, rows_TC: Tensor, parts: Sequence[Part]) -> tuple[Tensor, list[list[Tensor]]]:
        """Return the output of all parts' rows by our own kernel, and the states at their stops."""
        pieces = [
            ConvPiece(start=part.rows.start, stop=part.rows.stop, before_WC=part.state[0])
            for part in parts
        ]
        out_TC = convolve(rows_TC, pieces, self._weight_WC, self._bias_C, has_silu=self._has_silu)
        return out_TC, [[self._kept(rows_TC, part, stop) for stop in part.stops] for part in parts]

    def _kept(self, rows_TC: Tensor, part: Part, stop: int) -> Tensor:
        """Return the last rows before `stop`, some of which may lie before the part."""
        start = stop - self._num_kept
        if start >= part.rows.start:
            return rows_TC[start:stop].clone(memory_format=torch.contiguous_format)
        earlier_WC = part.state[0][stop - part.rows.start :]
        return torch.cat([earlier_WC, rows_TC[part.rows.start : stop]])

    def scan(self, rows_TC: Tensor, state_WC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [T, C], contiguous, and the state after the rows."""
        out_TC = rows_TC.new_empty(rows_TC.shape)
        size = self._block_rows
        first_TC = torch.cat([state_WC, rows_TC[:size]])
        for start in range(0, len(rows_TC), size):
            block_TC = out_TC[start : start + size]
            seen_TC = rows_TC[start - self._num_kept : start + size] if start else first_TC
            windows = [seen_TC[i : i + len(block_TC)] for i in range(self._num_kept + 1)]
            self._weigh(windows, block_TC)
        if len(rows_TC) < self._num_kept:
            return out_TC, first_TC[len(rows_TC) :].clone()
        last_WC = rows_TC[len(rows_TC) - self._num_kept :]
        return out_TC, last_WC.clone(memory_format=torch.contiguous_format)

    def step(self, rows_SC: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the output [S, C] of one row of each of S sequences, and their states after it."""
        windows_SWC = torch.cat([torch.stack(list(states)), rows_SC[:, None]], dim=1)
        out_SC = rows_SC.new_empty(rows_SC.shape)
        self._weigh(windows_SWC.unbind(1), out_SC)
        return out_SC, [window_WC[1:].clone() for window_WC in windows_SWC]

    def _weigh(self, windows: Sequence[Tensor], out_TC: Tensor) -> None:
        torch.mul(windows[0], self._weight_WC[0], out=out_TC)
        for row_TC, weight_C in zip(windows[1:], self._weight_WC[1:], strict=True):
            out_TC.addcmul_(row_TC, weight_C)
        if self._bias_C is not None:
            out_TC.add_(self._bias_C)
        if self._has_silu:
            # torch's own silu rounds the last elements of a tensor otherwise than the others.
            out_TC.div_(torch.neg(out_TC).exp_().add_(1.0))
