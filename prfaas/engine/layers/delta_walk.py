"""The delta rule by our own kernels: convolution, gates, and the walk through all tokens.

Shapes: T tokens, C channels of the convolution, H heads, h key heads, K key dim, V value dim,
G decays of a token (H, or H K), X = H V.
"""

from collections.abc import Sequence

from torch import Tensor

from prfaas.engine.layers.conv import CausalConv
from prfaas.engine.layers.delta import NORM_EPS
from prfaas.engine.native.gates import delta_gates
from prfaas.engine.native.recurrence import Inputs, Rule, walk
from prfaas.engine.recurrence import Part


class DeltaWalk:
    """A short convolution of q, k and v, silu, unit q and k, gates, and the delta rule."""

    def __init__(
        self,
        conv: CausalConv,
        *,
        num_key_heads: int,
        key_dim: int,
        value_dim: int,
        A_G: Tensor,
        bias_G: Tensor,
        is_by_channel: bool,
        decay_bound: float | None = None,
        beta_scale: float = 1.0,
    ) -> None:
        self._conv = conv
        self._num_key_heads = num_key_heads
        self._key_dim = key_dim
        self._value_dim = value_dim
        self._A_G = A_G.contiguous()
        self._bias_G = bias_G.contiguous()
        self._is_by_channel = is_by_channel
        self._decay_bound = decay_bound
        self._beta_scale = beta_scale

    def __call__(
        self,
        u_TC: Tensor,
        b_TH: Tensor,
        f_TG: Tensor,
        parts: Sequence[Part],
        out_TX: Tensor,
    ) -> None:
        """Write the output rows of all parts, and hold their states.

        Args:
            u_TC: rows [q | k | v] by heads, before the convolution.
            b_TH: betas before their sigmoid.
            f_TG: what decays are made of (`delta_gates`).
            parts: of the batch.
            out_TX: by heads.
        """
        num_rows, key_heads, key_dim = len(u_TC), self._num_key_heads, self._key_dim
        qkv_TC, kept = self._conv.walk(u_TC, parts)
        num_qk = 2 * key_heads * key_dim
        qk_ThK = qkv_TC[:, :num_qk].view(num_rows, 2 * key_heads, key_dim)
        gates = delta_gates(
            f_TG,
            b_TH,
            qk_ThK,
            A_G=self._A_G,
            bias_G=self._bias_G,
            decay_bound=self._decay_bound,
            beta_scale=self._beta_scale,
            norm_eps=NORM_EPS,
        )
        decay = gates.decay_TG
        inputs = Inputs(
            q_ThK=qk_ThK[:, :key_heads],
            k_ThK=qk_ThK[:, key_heads:],
            v_THV=qkv_TC[:, num_qk:].view(num_rows, -1, self._value_dim),
            decay=decay.view(num_rows, -1, key_dim) if self._is_by_channel else decay,
            beta_TH=gates.beta_TH,
            q_scale_Th=gates.scale_Th[:, :key_heads],
            k_scale_Th=gates.scale_Th[:, key_heads:],
        )
        pieces = [part.piece(1) for part in parts]
        rule: Rule = "delta-by-channel" if self._is_by_channel else "delta"
        walk(rule, inputs, pieces, out_TX.view(num_rows, -1, self._value_dim))
        for part, rows, piece in zip(parts, kept, pieces, strict=True):
            states = [state_HKV for _, state_HKV in piece.ends]
            part.hold(list(zip(rows, states, strict=True)))
