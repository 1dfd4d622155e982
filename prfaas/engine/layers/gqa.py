"""The grouped-query attention mixer: projections, q/k norm, rope, KV, attention, output gate.

Shapes: T rows of the batch, H query heads then KV heads, K key dim, V value dim, D model dim, N all
that is projected.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from prfaas.engine.batch import Batch
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
        num_gates = spec.num_heads * spec.value_dim if spec.has_output_gate else 0
        self._widths = [
            (spec.num_heads + spec.num_kv_heads) * spec.head_dim,
            spec.num_kv_heads * spec.value_dim,
            num_gates,
        ]

    def __call__(
        self, x_TD: Tensor, batch: Batch, layer: int, on_written: Callable[[], None]
    ) -> Tensor:
        """Return the mixer's output rows; calls `on_written` once all K and V are in place."""
        spec = self.spec
        qk_TN, v_TN, gate_TN = torch.split(self.qkv_proj(x_TD), self._widths, dim=1)
        qk_THK = self._turned(qk_TN, None if self.rope is None else batch.rope(self.rope))
        by_group = (len(x_TD), spec.num_kv_heads, -1)
        v_THV = v_TN.view(by_group)
        if spec.value_scale != 1.0:
            v_THV = v_THV * spec.value_scale
        batch.write_kv(layer, qk_THK[:, spec.num_heads :], v_THV)
        on_written()
        out_TD = x_TD.new_zeros(len(x_TD), spec.num_heads * spec.value_dim)
        self.attend(
            qk_THK[:, : spec.num_heads].view(*by_group, spec.head_dim),
            batch,
            layer,
            out_TD.view(*by_group, spec.value_dim),
        )
        if spec.has_output_gate:
            multiply_by_gate(out_TD, gate_TN)
        return self.o_proj(out_TD)

    def _turned(self, qk_TN: Tensor, turns_T1C: Tensor | None) -> Tensor:
        """Return the heads of q and k, [T, H, K], normed as the spec says, and turned."""
        qk_norm = self.qk_norm
        if self._spans is not None:
            num_q = self.spec.num_heads * self.spec.head_dim
            q_norm, k_norm = self._spans
            qk_TN = torch.cat([q_norm(qk_TN[:, :num_q]), k_norm(qk_TN[:, num_q:])], dim=1)
            qk_norm = None
        qk_THK = qk_TN.view(len(qk_TN), -1, self.spec.head_dim)
        if qk_norm is None:
            return qk_THK if turns_T1C is None else rotate(qk_THK, turns_T1C)
        return qk_norm(qk_THK) if turns_T1C is None else qk_norm.turned(qk_THK, turns_T1C)
