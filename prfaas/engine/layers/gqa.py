"""The grouped-query attention mixer: projections, q/k norm, rope, KV, attention.

Shapes: T rows of the batch, H query heads then KV heads, K head dim, D model dim, G query heads of
one KV head, R = tokens * G.
"""

from collections.abc import Callable

from torch import Tensor

from prfaas.engine.attention import attend
from prfaas.engine.batch import Batch
from prfaas.engine.config import GqaSpec
from prfaas.engine.kv import LayerKv
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear
from prfaas.engine.rope import RopeTable, rotate


class GqaMixer:
    """One attention layer; `qk_norm` norms each head of q and k by its own weight row."""

    def __init__(
        self,
        spec: GqaSpec,
        *,
        qkv_proj: Linear,
        o_proj: Linear,
        qk_norm: RmsNorm | None,
        rope: RopeTable,
    ) -> None:
        self.spec = spec
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.qk_norm = qk_norm
        self.rope = rope

    def __call__(
        self, x_TD: Tensor, batch: Batch, layer: int, on_written: Callable[[], None]
    ) -> Tensor:
        """Return the mixer's output rows; calls `on_written` once all K and V are in place."""
        spec = self.spec
        num_qk_heads = spec.num_heads + spec.num_kv_heads
        qkv_THK = self.qkv_proj(x_TD).view(len(x_TD), -1, spec.head_dim)
        qk_THK, v_THK = qkv_THK[:, :num_qk_heads], qkv_THK[:, num_qk_heads:]
        if self.qk_norm is not None:
            qk_THK = self.qk_norm(qk_THK)
        qk_THK = rotate(qk_THK, *batch.rope(self.rope))
        for rows, segment in batch.parts:
            segment.kv.layers[layer].write(
                segment.kv.num_tokens, qk_THK[rows, spec.num_heads :], v_THK[rows]
            )
        on_written()
        out_TD = x_TD.new_zeros(len(x_TD), spec.num_heads * spec.head_dim)
        for rows, segment in batch.parts:
            out_TD[rows] = self._attend(
                qk_THK[rows, : spec.num_heads], segment.kv.layers[layer], segment.kv.num_tokens
            )
        return self.o_proj(out_TD)

    def _attend(self, q_THK: Tensor, kv: LayerKv, first_position: int) -> Tensor:
        spec = self.spec
        num_groups = spec.num_heads // spec.num_kv_heads
        q_HRK = (
            q_THK.reshape(len(q_THK), spec.num_kv_heads, num_groups, spec.head_dim)
            .transpose(0, 1)
            .reshape(spec.num_kv_heads, len(q_THK) * num_groups, spec.head_dim)
        )
        out_HRK = attend(
            q_HRK,
            kv.kv_2HCK[0],
            kv.kv_2HCK[1],
            num_groups=num_groups,
            first_position=first_position,
            first_key=kv.base_tokens,
            scale=spec.scale,
            window_tokens=spec.window_tokens,
        )
        out_HTGK = out_HRK.view(spec.num_kv_heads, len(q_THK), num_groups, spec.head_dim)
        return out_HTGK.transpose(0, 1).reshape(len(q_THK), -1)
