"""The grouped-query attention mixer: projections, q/k norm, rope, KV, attention, output gate.

Shapes: T rows of the batch, H query heads then KV heads, K key dim, V value dim, D model dim, N all
that is projected.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from prfaas.engine.batch import Batch, KeptRows, OnWritten, Rows
from prfaas.engine.layers.batch_attention import Attention, BatchAttention
from prfaas.engine.layers.gates import multiply_by_gate
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear
from prfaas.engine.mixer_spec import GqaSpec
from prfaas.engine.rope import RopeTable, rotate


class GqaMixer:
    """One attention layer.

    The rows of qkv_proj are q, k, v and the output gate if there is one. Those of q and k, and the
    columns of qk_norm, stand in rope.pair_order.
    """

    def __init__(
        self,
        spec: GqaSpec,
        *,
        qkv_proj: Linear,
        o_proj: Linear,
        qk_norm: RmsNorm | None,
        rope: RopeTable | None,
        sinks_H: Tensor | None = None,
        attention: Attention = BatchAttention,
    ) -> None:
        """Make the layer.

        Args:
            spec: what the layer computes.
            qkv_proj: x_TD -> q, k, v, gate.
            o_proj: of the heads' outputs, [T, H * V].
            qk_norm: weights [query heads + KV heads, K]; over each head, or, if the spec says
                all_heads, over all of q and over all of k.
            rope: turns q and k; None: positions are not encoded.
            sinks_H: a learnt score of each query head.
            attention: by which kernels.
        """
        self.spec = spec
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.qk_norm = qk_norm
        self.rope = rope
        by_group = (spec.num_kv_heads, -1)
        self.attend = attention(
            scale=spec.scale,
            window_tokens=spec.window_tokens,
            sinks_HG=None if sinks_H is None else sinks_H.float().view(by_group),
        )
        self._spans = None
        if qk_norm is not None and spec.qk_norm_span == "all_heads":
            heads = torch.split(qk_norm.weight, [spec.num_heads, spec.num_kv_heads])
            self._spans = tuple(qk_norm.with_weight(part.flatten()) for part in heads)
        num_q, num_kv, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        first_value = (num_q + num_kv) * head_dim
        self._first_gate = first_value + num_kv * spec.value_dim
        self._qk_heads = _view(0, num_q + num_kv, head_dim)
        self._queries = _view(0, num_kv, num_q // num_kv, head_dim)
        self._keys = _view(num_q * head_dim, num_kv, head_dim)
        self._values = _view(first_value, num_kv, spec.value_dim)
        self._outputs = _view(0, num_kv, num_q // num_kv, spec.value_dim)

    def __call__(self, x_TD: Tensor, rows: Rows, layer: int, on_written: OnWritten) -> Tensor:
        """Return the mixer's output rows; calls `on_written` once all K and V are in place."""
        spec = self.spec
        qkv_TN = self.qkv_proj(x_TD)
        qk_THK = self._turned(qkv_TN, None if self.rope is None else rows.rope(self.rope))
        v_THV = self._values(qkv_TN)
        if spec.value_scale != 1.0:
            v_THV = v_THV * spec.value_scale
        out_TD = x_TD.new_empty(x_TD.shape[0], spec.num_heads * spec.value_dim)
        kept = KeptRows(self._keys(qk_THK), v_THV)
        attend = self.attend.of(self._queries(qk_THK), self._outputs(out_TD))

        def step(batch: Batch) -> None:
            batch.write_kv(layer, kept)
            on_written(batch)
            attend(batch, layer)

        rows.each_time(step)
        if spec.has_output_gate:
            multiply_by_gate(out_TD, qkv_TN[:, self._first_gate :])
        return self.o_proj(out_TD)

    def _turned(self, qkv_TN: Tensor, turns_T1C: Tensor | None) -> Tensor:
        """Return the heads of q and k, [T, H, K], normed as the spec says, and turned."""
        spec, qk_norm = self.spec, self.qk_norm
        if self._spans is not None:
            num_q, num_k = (heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads))
            q_norm, k_norm = self._spans
            q_TN, k_TN = qkv_TN[:, :num_q], qkv_TN[:, num_q : num_q + num_k]
            qkv_TN, qk_norm = torch.cat([q_norm(q_TN), k_norm(k_TN)], dim=1), None
        qk_THK = self._qk_heads(qkv_TN)
        if qk_norm is None:
            return qk_THK if turns_T1C is None else rotate(qk_THK, turns_T1C)
        return qk_norm(qk_THK) if turns_T1C is None else qk_norm.turned(qk_THK, turns_T1C)


def _view(first: int, *shape: int) -> Callable[[Tensor], Tensor]:
    """Return what sees the elements of each row from `first` on as [T, *shape].

    A slice of a view of heads takes three calls, of which each costs as much as a small kernel.
    """
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)

    def view(rows_TX: Tensor) -> Tensor:
        return rows_TX.as_strided(
            (rows_TX.shape[0], *shape),
            (rows_TX.stride(0), *strides),
            rows_TX.storage_offset() + first,
        )

    return view
