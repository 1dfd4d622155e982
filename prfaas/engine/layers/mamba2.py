"""Mamba-2: a state space layer with one decay a head and token, behind a short convolution.

a = exp(-exp(A_log) dt);  S <- a S + B (dt x)^T;  y = S^T C + D x, the token itself included.

Shapes: T rows, S sequences, C rows of a chunk, H heads, P head dim, N state dim, G groups of heads
that share B and C, Q = HP / G, I = HP inner dim, D model dim, R = I + 2GN + H rows x, B, C, dt.
The states are the convolution's last rows [W - 1, I + 2GN] and S [H, N, P].
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from prfaas.engine.batch import Batch, OnWritten, Rows
from prfaas.engine.layers.conv import CausalConv
from prfaas.engine.layers.gates import softplus
from prfaas.engine.layers.mlp import silu
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear
from prfaas.engine.mixer_spec import Mamba2Spec
from prfaas.engine.native.exp import exp_of
from prfaas.engine.native.gates import gate_rows, step_sizes
from prfaas.engine.native.recurrence import Inputs, walk
from prfaas.engine.recurrence import CHUNK_TOKENS, Part, begin, run
from prfaas.engine.states import State


def recur(
    x_THP: Tensor, B_THN: Tensor, C_THN: Tensor, dt_TH: Tensor, A_H: Tensor, state_HNP: Tensor
) -> tuple[Tensor, Tensor]:
    """Return S^T C for each token [T, H, P] and the last state, in the inputs' dtype.

    The definition that `Mamba2Core` is tested against; nothing calls it while serving.
    """
    rows = []
    for x_HP, B_HN, C_HN, dt_H in zip(x_THP, B_THN, C_THN, dt_TH, strict=True):
        decay_H11 = torch.exp(dt_H * A_H)[:, None, None]
        dtx_H1P = (dt_H[:, None] * x_HP)[:, None, :]
        state_HNP = decay_H11 * state_HNP + B_HN[:, :, None] * dtx_H1P
        rows.append((state_HNP * C_HN[:, :, None]).sum(1))
    return torch.stack(rows), state_HNP


class Mamba2Core:
    """Convolution and recurrence over rows [x | B | C | dt], of which dt is ready to use."""

    def __init__(
        self,
        spec: Mamba2Spec,
        *,
        conv_weight_WC: Tensor,
        conv_bias_C: Tensor | None,
        A_log_H: Tensor,
        D_H: Tensor,
    ) -> None:
        self._spec = spec
        self._conv = CausalConv(conv_weight_WC, conv_bias_C)
        self._A_H = -exp_of(A_log_H)
        self._D_H1 = D_H.float()[:, None].contiguous()
        self.row_dim = spec.conv_channels + spec.num_heads
        self.out_dim = spec.inner_dim

    def scan(self, rows_TR: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the outputs [T, I] and the state after the rows, in chunks."""
        conv_rows_WC, state_HNP = state
        state_HPN = state_HNP.transpose(1, 2).contiguous()
        widths, num_rows = [self._spec.conv_channels, self._spec.num_heads], len(rows_TR)
        out_TX = rows_TR.new_empty(num_rows, self.out_dim)
        for start in range(0, num_rows, CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, num_rows)
            u_CC, dt_CH = torch.split(rows_TR[start:stop], widths, dim=1)
            xbc_CC, conv_rows_WC = self._conv.scan(u_CC, conv_rows_WC)
            chunk = _Chunk(self._spec, _padded(silu(xbc_CC)), _padded(dt_CH), self._A_H)
            chunk.write_outputs(state_HPN, self._D_H1, out_TX[start:stop])
            state_HPN = chunk.end_state(state_HPN)
        return out_TX, (conv_rows_WC, state_HPN.transpose(1, 2).contiguous())

    def step(self, rows_SR: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        """Return the outputs [S, I] and the next states of one row of each sequence."""
        spec, num_rows = self._spec, len(rows_SR)
        channels_SC = rows_SR[:, : spec.conv_channels]
        xbc_SC, conv_states = self._conv.step(channels_SC, [conv for conv, _ in states])
        x_SX, B_SX, C_SX = _split(spec, silu(xbc_SC))
        dt_SH = rows_SR[:, spec.conv_channels :].contiguous()
        decay_SH11 = torch.exp(dt_SH * self._A_H)[:, :, None, None]
        x_SHP = x_SX.reshape(num_rows, spec.num_heads, spec.head_dim)
        dtx_SH1P = (x_SHP * dt_SH[:, :, None])[:, :, None]
        B_SHN, C_SHN = (
            y_SX.reshape(num_rows, spec.num_groups, spec.state_dim).repeat_interleave(
                spec.num_heads // spec.num_groups, dim=1
            )
            for y_SX in (B_SX, C_SX)
        )
        outs: list[Tensor] = []
        after: list[State] = []
        for index, (_, state_HNP) in enumerate(states):
            next_HNP = state_HNP * decay_SH11[index]
            next_HNP.addcmul_(B_SHN[index, :, :, None], dtx_SH1P[index])
            outs.append(torch.bmm(C_SHN[index, :, None], next_HNP)[:, 0])
            after.append((conv_states[index], next_HNP))
        return (torch.stack(outs) + x_SHP * self._D_H1).view(num_rows, -1), after


class Mamba2Walk:
    """Convolution and recurrence by our own kernels, over rows [x | B | C] and dt as projected."""

    def __init__(
        self,
        spec: Mamba2Spec,
        *,
        conv_weight_WC: Tensor,
        conv_bias_C: Tensor | None,
        A_log_H: Tensor,
        D_H: Tensor,
        dt_bias_H: Tensor,
        dt_limit: tuple[float, float],
    ) -> None:
        self._spec = spec
        self._conv = CausalConv(conv_weight_WC, conv_bias_C, has_silu=True)
        self._A_H = exp_of(A_log_H)
        self._D_H = D_H.float().contiguous()
        self._dt_bias_H = dt_bias_H.float().contiguous()
        self._dt_limit = dt_limit

    def __call__(self, u_TC: Tensor, dt_TH: Tensor, parts: Sequence[Part], out_TX: Tensor) -> None:
        """Write the output rows of all parts, and hold their states."""
        spec, num_rows = self._spec, len(u_TC)
        xbc_TC, kept = self._conv.walk(u_TC, parts)
        x_TI, B_TX, C_TX = _split(spec, xbc_TC)
        by_group = (num_rows, spec.num_groups, spec.state_dim)
        decay_TH, size_TH = step_sizes(
            dt_TH, A_H=self._A_H, bias_H=self._dt_bias_H, limit=self._dt_limit
        )
        inputs = Inputs(
            q_ThK=C_TX.view(by_group),
            k_ThK=B_TX.view(by_group),
            v_THV=x_TI.view(num_rows, spec.num_heads, spec.head_dim),
            decay=decay_TH,
            beta_TH=size_TH,
            skip_H=self._D_H,
        )
        pieces = [part.piece(1) for part in parts]
        walk("linear", inputs, pieces, out_TX.view(inputs.v_THV.shape))
        for part, rows, piece in zip(parts, kept, pieces, strict=True):
            states = [state_HNP for _, state_HNP in piece.ends]
            part.hold(list(zip(rows, states, strict=True)))


class _Chunk:
    """CHUNK_TOKENS rows after the convolution.

    Rows of zeros, dt too, leave the state as it is.
    """

    def __init__(self, spec: Mamba2Spec, xbc_CC: Tensor, dt_CH: Tensor, A_H: Tensor) -> None:
        self._spec = spec
        x_CI, B_CX, C_CX = _split(spec, xbc_CC)
        by_group = (CHUNK_TOKENS, spec.num_groups, spec.state_dim)
        self._x_CHP = x_CI.view(CHUNK_TOKENS, spec.num_heads, spec.head_dim)
        self._B_GCN = B_CX.view(by_group).transpose(0, 1)
        self._C_GCN = C_CX.view(by_group).transpose(0, 1)
        # In float64: after one strong decay, float32 sums would lose the weak ones behind it.
        self._sums_HC = (dt_CH * A_H).double().T.contiguous().cumsum_(1)
        # dt weighs a row as its decays do: as a logarithm it costs no pass over x.
        self._from_HC = self._sums_HC - dt_CH.double().T.contiguous().log_()

    def write_outputs(self, state_HPN: Tensor, D_H1: Tensor, out_TX: Tensor) -> None:
        """Write y of the first rows, as many as `out_TX` has; the state is that before them."""
        spec, num_rows = self._spec, len(out_TX)
        scores_GCC = torch.bmm(self._C_GCN, self._B_GCN.transpose(1, 2))
        # Above the diagonal exp may be infinite: made 0 before it is multiplied.
        weights_HCC = (self._sums_HC[:, :, None] - self._from_HC[:, None, :]).float()
        weights_HCC.exp_().tril_()
        weights_HCC.view(spec.num_groups, -1, CHUNK_TOKENS, CHUNK_TOKENS).mul_(scores_GCC[:, None])
        weights_HCC.diagonal(dim1=1, dim2=2).add_(D_H1)
        inside_HCP = torch.bmm(weights_HCC, self._x_CHP.transpose(0, 1))
        state_GQN = state_HPN.view(spec.num_groups, -1, spec.state_dim)
        before_GCQ = torch.bmm(self._C_GCN, state_GQN.transpose(1, 2))
        before_CHP = before_GCQ.transpose(0, 1).reshape(self._x_CHP.shape)
        decay_CH = self._sums_HC.float().T.contiguous().exp_()
        torch.addcmul(
            inside_HCP.transpose(0, 1)[:num_rows],
            before_CHP[:num_rows],
            decay_CH[:num_rows, :, None],
            out=out_TX.view(num_rows, spec.num_heads, spec.head_dim),
        )

    def end_state(self, state_HPN: Tensor) -> Tensor:
        """Return the state after the chunk."""
        spec, sums_HC = self._spec, self._sums_HC
        weights_CH = (sums_HC[:, -1:] - self._from_HC).float().T.contiguous().exp_()
        x_CHP = self._x_CHP * weights_CH[:, :, None]
        x_CGQ = x_CHP.view(CHUNK_TOKENS, spec.num_groups, -1)
        end_HPN = state_HPN * sums_HC[:, -1].float().exp_()[:, None, None]
        end_GQN = end_HPN.view(spec.num_groups, -1, spec.state_dim)
        end_GQN.baddbmm_(x_CGQ.permute(1, 2, 0), self._B_GCN)
        return end_HPN


class Mamba2Mixer:
    """One Mamba-2 layer. in_proj's rows are [z | x | B | C | dt], scales folded in."""

    def __init__(
        self,
        spec: Mamba2Spec,
        *,
        in_proj: Linear,
        conv_weight_WC: Tensor,
        conv_bias_C: Tensor | None,
        A_log_H: Tensor,
        D_H: Tensor,
        dt_bias_H: Tensor,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        norm: RmsNorm | None,
        out_proj: Linear,
    ) -> None:
        assert (norm is None) == (spec.gated_norm is None)
        self.spec = spec
        self.core = Mamba2Core(
            spec,
            conv_weight_WC=conv_weight_WC,
            conv_bias_C=conv_bias_C,
            A_log_H=A_log_H,
            D_H=D_H,
        )
        self._walk = None
        if conv_weight_WC.is_cpu:
            self._walk = Mamba2Walk(
                spec,
                conv_weight_WC=conv_weight_WC,
                conv_bias_C=conv_bias_C,
                A_log_H=A_log_H,
                D_H=D_H,
                dt_bias_H=dt_bias_H,
                dt_limit=dt_limit,
            )
        self.in_proj = in_proj
        self.norm = norm
        self.out_proj = out_proj
        self._dt_bias_H = dt_bias_H.float()
        self._dt_limit = dt_limit

    def __call__(self, x_TD: Tensor, rows: Rows, layer: int, on_written: OnWritten) -> Tensor:
        """Return the mixer's output rows; calls `on_written` once all states are in place."""
        inner_dim, num_heads = self.spec.inner_dim, self.spec.num_heads
        projected_TR = self.in_proj(x_TD)
        z_TI, rows_TR = projected_TR[:, :inner_dim], projected_TR[:, inner_dim:]
        y_TI = x_TD.new_empty(len(x_TD), inner_dim)
        if (walk := self._walk) is not None:
            u_TC, dt_TH = rows_TR[:, :-num_heads], rows_TR[:, -num_heads:]

            def fold(batch: Batch) -> None:
                walk(u_TC, dt_TH, begin(batch, layer), y_TI)
                on_written(batch)

            rows.each_time(fold)
            return self.out_proj(self._gated_rows(y_TI, z_TI))
        dt_TH = softplus(rows_TR[:, -num_heads:] + self._dt_bias_H)
        rows_TR[:, -num_heads:] = dt_TH.clamp_(*self._dt_limit)

        def fold_by_torch(batch: Batch) -> None:
            run(self.core, rows_TR, batch, layer, y_TI)
            on_written(batch)

        rows.each_time(fold_by_torch)
        return self.out_proj(self._gated(y_TI, silu(z_TI)))

    def _gated_rows(self, y_TI: Tensor, z_TI: Tensor) -> Tensor:
        """Return the outputs after gate and norm, by our own kernels."""
        if self.norm is None or self.spec.gated_norm is None:
            return y_TI.mul_(silu(z_TI))
        weight_NM = self.norm.weight.view(-1, self.norm.weight.shape[-1])
        order, eps = self.spec.gated_norm, self.norm.eps
        gate_rows(y_TI, z_TI, activation="silu", order=order, weight_NM=weight_NM, eps=eps)
        return y_TI

    def _gated(self, y_TI: Tensor, gate_TI: Tensor) -> Tensor:
        match self.spec.gated_norm:
            case None:
                return y_TI.mul_(gate_TI)
            case "gate_first":
                return self._normed(y_TI.mul_(gate_TI))
            case "norm_first":
                return self._normed(y_TI).mul_(gate_TI)

    def _normed(self, y_TI: Tensor) -> Tensor:
        assert self.norm is not None
        return self.norm(y_TI.view(len(y_TI), *self.norm.weight.shape)).view_as(y_TI)


def _split(spec: Mamba2Spec, xbc_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views x [T, I], B and C [T, GN]."""
    shared = spec.num_groups * spec.state_dim
    x_TI, B_TX, C_TX = torch.split(xbc_TC, [spec.inner_dim, shared, shared], dim=1)
    return x_TI, B_TX, C_TX


def _padded(rows_TX: Tensor) -> Tensor:
    """Return CHUNK_TOKENS contiguous rows, zeros at the end."""
    if len(rows_TX) == CHUNK_TOKENS:
        return rows_TX.contiguous()
    padding = rows_TX.new_zeros(CHUNK_TOKENS - len(rows_TX), rows_TX.shape[1])
    return torch.cat([rows_TX, padding])
