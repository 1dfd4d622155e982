"""The gated short convolution (LFM2): out_proj(C * conv(B * x)).

A row is a function of the conv_width - 1 before it, whatever the cut, in prefill and in decode.

Shapes: T rows, S sequences, C channels, W conv width, D model dim; the state is [W - 1, C].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from prfaas.engine.batch import Batch, OnWritten, Rows
from prfaas.engine.layers.conv import CausalConv
from prfaas.engine.linear import Linear
from prfaas.engine.mixer_spec import ShortConvSpec
from prfaas.engine.recurrence import begin, run
from prfaas.engine.states import State


class ShortConvCore:
    """A causal convolution as a recurrence over rows B * x."""

    def __init__(
        self, spec: ShortConvSpec, *, conv_weight_WC: Tensor, conv_bias_C: Tensor | None
    ) -> None:
        self.conv = CausalConv(conv_weight_WC, conv_bias_C)
        self.row_dim = self.out_dim = spec.channels

    def scan(self, rows_TR: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the outputs [T, C] and the state after the rows."""
        out_TC, rows_WC = self.conv.scan(rows_TR, state[0])
        return out_TC, (rows_WC,)

    def step(self, rows_SR: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        """Return the outputs [S, C] and the next states of one row of each sequence."""
        out_SC, after = self.conv.step(rows_SR, [rows for (rows,) in states])
        return out_SC, [(rows,) for rows in after]


class ShortConvMixer:
    """One gated short convolution layer. in_proj's rows are [B | C | x]."""

    def __init__(
        self,
        spec: ShortConvSpec,
        *,
        in_proj: Linear,
        conv_weight_WC: Tensor,
        conv_bias_C: Tensor | None,
        out_proj: Linear,
    ) -> None:
        self.spec = spec
        self.core = ShortConvCore(spec, conv_weight_WC=conv_weight_WC, conv_bias_C=conv_bias_C)
        self.in_proj = in_proj
        self.out_proj = out_proj

    def __call__(self, x_TD: Tensor, rows: Rows, layer: int, on_written: OnWritten) -> Tensor:
        """Return the mixer's output rows; calls `on_written` once all states are in place."""
        B_TC, C_TC, x_TC = self.in_proj(x_TD).chunk(3, dim=1)
        rows_TC = B_TC * x_TC
        gated_TC = x_TD.new_empty(len(x_TD), self.spec.channels)

        def fold(batch: Batch) -> None:
            if rows_TC.is_cpu:
                parts = begin(batch, layer)
                out_TC, states = self.core.conv.walk(rows_TC, parts)
                for part, kept in zip(parts, states, strict=True):
                    part.hold([(rows_WC,) for rows_WC in kept])
            else:
                out_TC = rows_TC.new_empty(rows_TC.shape)
                run(self.core, rows_TC, batch, layer, out_TC)
            on_written(batch)
            torch.mul(out_TC, C_TC, out=gated_TC)

        rows.each_time(fold)
        return self.out_proj(gated_TC)
