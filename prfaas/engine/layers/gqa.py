"""The grouped-query attention mixer: projections, q/k norm, rope, KV, attention.

Shapes: T rows of the batch, H query heads then KV heads, K head dim, D model dim.
"""

from collections.abc import Callable

from torch import Tensor

from prfaas.engine.attention import attend, attend_steps
from prfaas.engine.batch import Batch
from prfaas.engine.mixer_spec import GqaSpec
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear
from prfaas.engine.rope import RopeTable, rotate


class GqaMixer:
    """One attention layer; `qk_norm` norms each head of q and k by its own weight row.

    The rows of qkv_proj for q and k, and the columns of qk_norm, stand in rope.pair_order.
    """

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
        self.has_exact_steps = True
        """attend_steps gives the bits of attend on this machine; the self-test may clear it."""

    def __call__(
        self, x_TD: Tensor, batch: Batch, layer: int, on_written: Callable[[], None]
    ) -> Tensor:
        """Return the mixer's output rows; calls `on_written` once all K and V are in place."""
        spec = self.spec
        num_qk_heads = spec.num_heads + spec.num_kv_heads
        qkv_THK = self.qkv_proj(x_TD).view(len(x_TD), -1, spec.head_dim)
        qk_THK, v_THK = qkv_THK[:, :num_qk_heads], qkv_THK[:, num_qk_heads:]
        qk_THK = qk_THK.contiguous() if self.qk_norm is None else self.qk_norm(qk_THK)
        qk_THK = rotate(qk_THK, batch.rope(self.rope))
        k_THK, v_array = qk_THK[:, spec.num_heads :].numpy(), v_THK.numpy()
        for rows, segment in batch.parts:
            kv = segment.kv.kv_of(layer)
            kv.write(segment.kv.num_tokens, k_THK[rows], v_array[rows])
        on_written()
        out_TD = x_TD.new_zeros(len(x_TD), spec.num_heads * spec.head_dim)
        by_group = (len(x_TD), spec.num_kv_heads, -1, spec.head_dim)
        self._attend(
            qk_THK[:, : spec.num_heads].view(by_group), batch, layer, out_TD.view(by_group)
        )
        return self.o_proj(out_TD)

    def _attend(self, q_THGK: Tensor, batch: Batch, layer: int, out_THGK: Tensor) -> None:
        spec = self.spec
        steps = batch.steps if self.has_exact_steps else ()
        if steps:
            out_THGK[batch.step_rows] = attend_steps(
                q_THGK[batch.step_rows],
                [segment.kv.kv_of(layer).span for segment in steps],
                [segment.kv.num_tokens for segment in steps],
                scale=spec.scale,
                window_tokens=spec.window_tokens,
            )
        for rows, segment in batch.chunks if steps else batch.parts:
            attend(
                q_THGK[rows],
                segment.kv.kv_of(layer).span,
                first_position=segment.kv.num_tokens,
                scale=spec.scale,
                window_tokens=spec.window_tokens,
                out_THGK=out_THGK[rows],
            )
