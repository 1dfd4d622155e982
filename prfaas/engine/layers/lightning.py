"""Lightning attention: linear attention whose state decays by a constant of each head (models.md §2).

S <- exp(-slope) S + k v^T;  o = q^T S, the token itself included.

Shapes: T rows, S sequences, C rows of a chunk, H heads, K head dim (of keys and values), D model
dim, R = 3HK projected rows q, k, v; states [H, K, K] with the key first.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from prfaas.engine import portable
from prfaas.engine.batch import Batch, OnWritten, Rows
from prfaas.engine.layers.gates import sigmoid
from prfaas.engine.layers.mlp import silu
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear
from prfaas.engine.mixer_spec import LightningSpec
from prfaas.engine.native.gates import gate_rows
from prfaas.engine.native.recurrence import Inputs, walk
from prfaas.engine.recurrence import CHUNK_TOKENS, Part, begin, run
from prfaas.engine.rope import RopeTable, rotate
from prfaas.engine.states import State

CPU = torch.device("cpu")


def slopes(spec: LightningSpec) -> Tensor:
    """Return each head's slope, float64 [H]."""
    heads = np.arange(1, spec.num_heads + 1, dtype=np.float64)
    return torch.from_numpy(spec.slope_scale * portable.power(2.0, -8.0 * heads / spec.num_heads))


def recur(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, slope_H: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [T, H, K] and the last state, token by token, in the inputs' dtype.

    The definition that `LightningCore` is tested against; nothing calls it while serving.
    """
    decay_H11 = torch.exp(-slope_H)[:, None, None]
    rows = []
    for q_HK, k_HK, v_HK in zip(q_THK, k_THK, v_THK, strict=True):
        state_HKV = decay_H11 * state_HKV + k_HK[:, :, None] * v_HK[:, None, :]
        rows.append((q_HK[:, :, None] * state_HKV).sum(1))
    return torch.stack(rows), state_HKV


class LightningCore:
    """The recurrence over rows [q | k | v] to which silu, norm and rotation are done."""

    def __init__(self, spec: LightningSpec, device: torch.device = CPU) -> None:
        self._num_heads, self._head_dim, self._scale = spec.num_heads, spec.head_dim, spec.scale
        self.out_dim = spec.num_heads * spec.head_dim
        self.row_dim = 3 * self.out_dim
        slope_H = slopes(spec).to(device)
        steps_C = torch.arange(CHUNK_TOKENS + 1, dtype=torch.float64, device=device)
        decay_HC = torch.exp(-slope_H[:, None] * steps_C).float()
        distance_CC = steps_C[:-1, None] - steps_C[None, :-1]
        mask_HCC = torch.exp(-slope_H[:, None, None] * distance_CC.clamp(min=0)).tril_()
        self._mask_HCC = mask_HCC.mul_(spec.scale).float()
        self._query_decay_HC1 = (decay_HC[:, 1:, None] * spec.scale).contiguous()
        self._decay_HC = decay_HC
        """exp(-slope n) for n = 0, ..., CHUNK_TOKENS."""
        self._key_decay_HC1 = decay_HC.flip(1)[:, 1:, None].contiguous()
        # A decay near 1 rounds in float32 by as much as it decays, at each step the same way.
        self._loss_H11 = torch.expm1(-slope_H).float()[:, None, None]

    def scan(self, rows_TR: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the outputs [T, HK] and the state after the rows, in chunks."""
        (state_HKV,) = state
        rows_TR = rows_TR.contiguous()
        num_rows = len(rows_TR)
        out_TX = rows_TR.new_empty(num_rows, self.out_dim)
        for start in range(0, num_rows, CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, num_rows)
            chunk_CR = rows_TR[start:stop]
            if stop - start < CHUNK_TOKENS:
                padding = rows_TR.new_zeros(start + CHUNK_TOKENS - stop, self.row_dim)
                chunk_CR = torch.cat([chunk_CR, padding])
            q_HCK, k_HCK, v_HCK = self._heads(chunk_CR)
            out_TX[start:stop] = self._outputs(q_HCK, k_HCK, v_HCK, state_HKV)[: stop - start]
            state_HKV = self._end_state(k_HCK, v_HCK, state_HKV, stop - start)
        return out_TX, (state_HKV,)

    def step(self, rows_SR: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        """Return the outputs [S, HK] and the next states of one row of each sequence."""
        q_HSK, k_HSK, v_HSK = self._heads(rows_SR.contiguous())
        outs: list[Tensor] = []
        after: list[State] = []
        for index, (state_HKV,) in enumerate(states):
            next_HKV = torch.addcmul(state_HKV, state_HKV, self._loss_H11)
            next_HKV.addcmul_(k_HSK[:, index, :, None], v_HSK[:, index, None, :])
            outs.append(torch.bmm(q_HSK[:, index, None], next_HKV).flatten())
            after.append((next_HKV,))
        return torch.stack(outs).mul_(self._scale), after

    def _heads(self, rows_TR: Tensor) -> Tensor:
        """Return views q, k, v [3, H, T, K] of the rows."""
        by_head = rows_TR.view(len(rows_TR), 3, self._num_heads, self._head_dim)
        return by_head.permute(1, 2, 0, 3)

    def _outputs(self, q_HCK: Tensor, k_HCK: Tensor, v_HCK: Tensor, state_HKV: Tensor) -> Tensor:
        """Return the chunk's outputs [C, HK]; rows of zeros may follow."""
        scores_HCC = torch.bmm(q_HCK, k_HCK.transpose(1, 2)).mul_(self._mask_HCC)
        out_HCK = torch.bmm(q_HCK, state_HKV).mul_(self._query_decay_HC1)
        out_HCK.baddbmm_(scores_HCC, v_HCK)
        return out_HCK.transpose(0, 1).reshape(CHUNK_TOKENS, self.out_dim)

    def _end_state(self, k_HCK: Tensor, v_HCK: Tensor, state_HKV: Tensor, num_rows: int) -> Tensor:
        """Return the state after the chunk's first `num_rows` rows; those that follow are 0."""
        # Zero rows add nothing, but a constant decay goes on through them: count it to num_rows.
        key_decay_HC1 = self._key_decay_HC1[:, CHUNK_TOKENS - num_rows :]
        k_HCK = k_HCK[:, :num_rows] * key_decay_HC1
        end_HKV = state_HKV * self._decay_HC[:, num_rows, None, None]
        return end_HKV.baddbmm_(k_HCK.transpose(1, 2), v_HCK[:, :num_rows])


class LightningWalk:
    """The recurrence by our own kernel, over the same rows."""

    def __init__(self, spec: LightningSpec) -> None:
        self._scale = spec.scale
        self._shape = (3 * spec.num_heads, spec.head_dim)
        self._loss_H = torch.from_numpy(portable.expm1(-slopes(spec).numpy())).float()

    def __call__(self, rows_TR: Tensor, parts: Sequence[Part], out_TX: Tensor) -> None:
        """Write the output rows of all parts, and hold their states."""
        q_THK, k_THK, v_THK = rows_TR.view(len(rows_TR), *self._shape).chunk(3, dim=1)
        inputs = Inputs(
            q_ThK=q_THK, k_ThK=k_THK, v_THV=v_THK, decay=self._loss_H, scale=self._scale
        )
        pieces = [part.piece(0) for part in parts]
        walk("linear-constant", inputs, pieces, out_TX.view(v_THK.shape))
        for part, piece in zip(parts, pieces, strict=True):
            part.hold([(state_HKV,) for _, state_HKV in piece.ends])


class LightningMixer:
    """One lightning attention layer; each output row is normed by group, then gated.

    The rows of in_proj for q and k, and the columns of qk_norm, stand in rope.pair_order.
    """

    def __init__(
        self,
        spec: LightningSpec,
        *,
        in_proj: Linear,
        qk_norm: RmsNorm | None,
        rope: RopeTable | None,
        norm: RmsNorm,
        out_proj: Linear,
    ) -> None:
        self.spec = spec
        self.core = LightningCore(spec, norm.weight.device)
        self._walk = LightningWalk(spec) if norm.weight.is_cpu else None
        self.in_proj = in_proj
        self.qk_norm = qk_norm
        self.rope = rope
        self.norm = norm
        self.out_proj = out_proj

    def __call__(self, x_TD: Tensor, rows: Rows, layer: int, on_written: OnWritten) -> Tensor:
        """Return the mixer's output rows; calls `on_written` once all states are in place."""
        core = self.core
        projected_TR = self.in_proj(x_TD)
        rows_TR = self._rows(projected_TR[:, : core.row_dim], rows)
        out_TX = x_TD.new_empty(len(x_TD), core.out_dim)
        if (walk := self._walk) is not None:

            def fold(batch: Batch) -> None:
                walk(rows_TR, begin(batch, layer), out_TX)
                on_written(batch)

            rows.each_time(fold)
            gate_rows(
                out_TX,
                projected_TR[:, core.row_dim :],
                activation="sigmoid",
                order="norm_first",
                weight_NM=self.norm.weight,
                eps=self.norm.eps,
            )
            return self.out_proj(out_TX)

        def fold_by_torch(batch: Batch) -> None:
            run(core, rows_TR, batch, layer, out_TX)
            on_written(batch)

        rows.each_time(fold_by_torch)
        normed_TX = self.norm(out_TX.view(len(x_TD), *self.norm.weight.shape)).view_as(out_TX)
        return self.out_proj(normed_TX.mul_(sigmoid(projected_TR[:, core.row_dim :])))

    def _rows(self, qkv_TR: Tensor, rows: Rows) -> Tensor:
        """Return the contiguous rows that the core takes."""
        qkv_TR = silu(qkv_TR) if self.spec.has_silu else qkv_TR.contiguous()
        if self.qk_norm is None and self.rope is None:
            return qkv_TR
        qkv_THK = qkv_TR.view(len(qkv_TR), -1, self.spec.head_dim)
        qk_THK = qkv_THK[:, : 2 * self.spec.num_heads]
        qk_THK = qk_THK.contiguous() if self.qk_norm is None else self.qk_norm(qk_THK)
        if self.rope is not None:
            qk_THK = rotate(qk_THK, rows.rope(self.rope))
        return torch.cat([qk_THK, qkv_THK[:, 2 * self.spec.num_heads :]], dim=1).flatten(1)
