"""The Kimi Delta Attention mixer (Kimi Linear, Ling 3).

Shapes: T rows of the batch, D model dim, H heads, K head dim, W convolution width,
C = 3 H K convolution channels, X = H K, F width of a gate's projection: its rank, or X.
"""

import torch
from torch import Tensor

from prfaas.engine.batch import Batch, OnWritten, Rows
from prfaas.engine.layers.conv import CausalConv
from prfaas.engine.layers.delta import DeltaRecurrence
from prfaas.engine.layers.delta_walk import DeltaWalk
from prfaas.engine.layers.gates import sigmoid, softplus
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear
from prfaas.engine.mixer_spec import KdaSpec
from prfaas.engine.native.exp import exp_of
from prfaas.engine.native.gates import gate_rows
from prfaas.engine.recurrence import begin, run


class KdaMixer:
    """One layer. in_proj's rows are [q | k | v | b | f | g], each by heads; `norm` is of a head.

    Where gates have a rank, in_proj's f and g are of that width, and f_b and g_b widen them.
    """

    def __init__(
        self,
        spec: KdaSpec,
        *,
        in_proj: Linear,
        f_b: Linear | None,
        g_b: Linear | None,
        conv_weight_WC: Tensor,
        A_log_H: Tensor,
        dt_bias_HD: Tensor,
        norm: RmsNorm,
        out_proj: Linear,
    ) -> None:
        assert (f_b is None) == (g_b is None) == (spec.gate_rank is None)
        self.spec = spec
        self.in_proj = in_proj
        self.f_b = f_b
        self.g_b = g_b
        self.norm = norm
        self.out_proj = out_proj
        conv = CausalConv(conv_weight_WC, has_silu=True)
        self.core = DeltaRecurrence(
            conv,
            num_key_heads=spec.num_heads,
            num_value_heads=spec.num_heads,
            key_dim=spec.head_dim,
            value_dim=spec.head_dim,
            decays_per_head=spec.head_dim,
        )
        self._A_X = exp_of(A_log_H).reshape(-1, 1).repeat(1, spec.head_dim).flatten()
        self._dt_bias_X = dt_bias_HD.float().flatten()
        self._norm_weight_HK = norm.weight.repeat(spec.num_heads, 1)
        self._walk = None
        if conv.device.type == "cpu":
            self._walk = DeltaWalk(
                conv,
                num_key_heads=spec.num_heads,
                key_dim=spec.head_dim,
                value_dim=spec.head_dim,
                A_G=self._A_X,
                bias_G=self._dt_bias_X,
                is_by_channel=True,
                decay_bound=spec.decay_bound if spec.decay == "bounded" else None,
            )

    def __call__(self, x_TD: Tensor, rows: Rows, layer: int, on_written: OnWritten) -> Tensor:
        """Return the mixer's output rows; calls `on_written` once all states are in place."""
        spec, inner_dim = self.spec, self.core.out_dim
        gate_dim = inner_dim if spec.gate_rank is None else spec.gate_rank
        widths = [3 * inner_dim, spec.num_heads, gate_dim, gate_dim]
        u_TC, b_TH, f_TF, gate_TF = torch.split(self.in_proj(x_TD), widths, dim=1)
        f_TX = f_TF if self.f_b is None else self.f_b(f_TF.contiguous())
        gate_TX = gate_TF if self.g_b is None else self.g_b(gate_TF.contiguous())
        out_TX = x_TD.new_empty(len(x_TD), inner_dim)
        if (walk := self._walk) is not None:

            def fold(batch: Batch) -> None:
                walk(u_TC, b_TH, f_TX, begin(batch, layer), out_TX)
                on_written(batch)

            rows.each_time(fold)
            gate_rows(
                out_TX,
                gate_TX,
                activation="sigmoid",
                order="norm_first",
                weight_NM=self._norm_weight_HK,
                eps=self.norm.eps,
            )
            return self.out_proj(out_TX)
        rows_TR = torch.cat([u_TC, sigmoid(b_TH), self._decay(f_TX)], dim=1)

        def fold_by_torch(batch: Batch) -> None:
            run(self.core, rows_TR, batch, layer, out_TX)
            on_written(batch)

        rows.each_time(fold_by_torch)
        normed_THK = self.norm(out_TX.view(len(x_TD), spec.num_heads, spec.head_dim))
        return self.out_proj(normed_THK.view_as(out_TX).mul_(sigmoid(gate_TX)))

    def _decay(self, f_TX: Tensor) -> Tensor:
        """Return the logarithms of the decays of every key channel."""
        biased_TX = f_TX + self._dt_bias_X
        match self.spec.decay:
            case "softplus":
                return softplus(biased_TX).mul_(self._A_X).neg_()
            case "bounded":
                assert self.spec.decay_bound is not None
                return sigmoid(biased_TX.mul_(self._A_X)).mul_(self.spec.decay_bound)
