"""The latent attention mixer, in its absorbed form for prompts and decode alike.

All heads share one key of the latent and a rotated part, and one value, the latent. A head's own
key and value projections are moved to its query and its output, so a token is kept, and seen, as
one vector of latent_dim + rope_dim whatever the number of heads. One form for prompt and decode
makes their bits equal.

Shapes: T rows of the batch, H heads, N and P dims of a query that do not turn and that do, R latent
dim (its rank), K = R + P, V value dim, D model dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from prfaas.engine.batch import Batch, KeptRows, OnWritten, Rows
from prfaas.engine.layers.batch_attention import Attention, BatchAttention
from prfaas.engine.layers.gates import sigmoid
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear
from prfaas.engine.mixer_spec import MlaSpec
from prfaas.engine.native.product import pack_panels, product_by_head
from prfaas.engine.rope import RopeTable, rotate


class MlaMixer:
    """One latent attention layer.

    Of q_proj's and kv_a_proj's rows those of the rotated part stand in rope.pair_order.
    """

    def __init__(
        self,
        spec: MlaSpec,
        *,
        q_proj: Callable[[Tensor], Tensor],
        kv_a_proj: Linear,
        kv_norm: RmsNorm,
        k_up_HNR: Tensor,
        v_up_HRV: Tensor,
        o_proj: Linear,
        gate_proj: Linear | None,
        rope: RopeTable | None,
        attention: Attention = BatchAttention,
    ) -> None:
        """Make the layer.

        Args:
            spec: what the layer computes.
            q_proj: x_TD -> each head's query, [T, H * (N + P)].
            kv_a_proj: x_TD -> the latent before its norm and the rotated key, [T, R + P].
            kv_norm: of the latent.
            k_up_HNR: the key part of kv_b_proj by head.
            v_up_HRV: the value part, transposed.
            o_proj: of the heads' outputs, [T, H * V].
            gate_proj: x_TD -> [T, H], whose sigmoid multiplies each head's output.
            rope: turns P dimensions; None: they take part as they are.
            attention: by which kernels.
        """
        self.spec = spec
        self.q_proj = q_proj
        self.kv_a_proj = kv_a_proj
        self.kv_norm = kv_norm
        self.o_proj = o_proj
        self.gate_proj = gate_proj
        self.rope = rope
        self.attend = attention(scale=spec.scale, window_tokens=None)
        self._k_up = _HeadsLinear(k_up_HNR)
        self._v_up = _HeadsLinear(v_up_HRV)

    def __call__(self, x_TD: Tensor, rows: Rows, layer: int, on_written: OnWritten) -> Tensor:
        """Return the mixer's output rows; calls `on_written` once all latents are in place."""
        spec, num_rows = self.spec, x_TD.shape[0]
        q_TH = self.q_proj(x_TD).view(num_rows, spec.num_heads, -1)
        kv_TK = self.kv_a_proj(x_TD)
        q_THP, k_T1P = q_TH[..., spec.nope_dim :], kv_TK[:, None, spec.latent_dim :]
        if self.rope is not None:
            turns = rows.rope(self.rope)
            q_THP, k_T1P = rotate(q_THP, turns), rotate(k_T1P, turns)
        latent_TR = self.kv_norm(kv_TK[:, : spec.latent_dim])
        kept = KeptRows(torch.cat([latent_TR, k_T1P[:, 0]], dim=1)[:, None])
        q_THR = self._k_up(q_TH[..., : spec.nope_dim])
        q_THK = torch.cat([q_THR, q_THP], dim=-1)
        out_THR = x_TD.new_empty(num_rows, spec.num_heads, spec.latent_dim)
        attend = self.attend.of(q_THK.unsqueeze(1), out_THR.unsqueeze(1))

        def step(batch: Batch) -> None:
            batch.write_kv(layer, kept)
            on_written(batch)
            attend(batch, layer)

        rows.each_time(step)
        out_THV = self._v_up(out_THR)
        if self.gate_proj is not None:
            out_THV.mul_(sigmoid(self.gate_proj(x_TD)).unsqueeze(-1))
        return self.o_proj(out_THV.flatten(1))


class _HeadsLinear:
    """Each head's product with its own matrix; on a CPU a row's bits are its own."""

    def __init__(self, weight_HNM: Tensor) -> None:
        weight_HNM = weight_HNM.float()
        self._num_outputs = weight_HNM.shape[2]
        self._is_packed = weight_HNM.is_cpu
        if self._is_packed:
            panels = [pack_panels(weight_NM.T, torch.float32) for weight_NM in weight_HNM]
            self._weights = torch.stack(panels)
        else:
            self._weights = weight_HNM.contiguous()

    def __call__(self, x_THN: Tensor) -> Tensor:
        """Return contiguous [T, H, M]."""
        if self._is_packed:
            return product_by_head(x_THN, self._weights, self._num_outputs)
        return torch.bmm(x_THN.transpose(0, 1), self._weights).transpose(0, 1).contiguous()
