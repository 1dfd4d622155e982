"""The Gated DeltaNet mixer (Qwen3-Next, Qwen3.5, OLMo hybrid).

Shapes: T rows of the batch, D model dim, H value heads, V value dim, W convolution width,
C convolution channels, X = H V.
"""

import torch
from torch import Tensor

from prfaas.engine.batch import Batch, OnWritten, Rows
from prfaas.engine.layers.conv import CausalConv
from prfaas.engine.layers.delta import DeltaRecurrence
from prfaas.engine.layers.delta_walk import DeltaWalk
from prfaas.engine.layers.gates import sigmoid, softplus
from prfaas.engine.layers.mlp import silu
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear
from prfaas.engine.mixer_spec import GdnSpec
from prfaas.engine.native.exp import exp_of
from prfaas.engine.native.gates import gate_rows
from prfaas.engine.recurrence import begin, run


class GdnMixer:
    """One layer. in_proj's rows are [q | k | v | z | b | a], each by heads; `norm` is of a head."""

    def __init__(
        self,
        spec: GdnSpec,
        *,
        in_proj: Linear,
        conv_weight_WC: Tensor,
        A_log_H: Tensor,
        dt_bias_H: Tensor,
        norm: RmsNorm,
        out_proj: Linear,
    ) -> None:
        self.spec = spec
        self.in_proj = in_proj
        self.norm = norm
        self.out_proj = out_proj
        conv = CausalConv(conv_weight_WC, has_silu=True)
        self.core = DeltaRecurrence(
            conv,
            num_key_heads=spec.num_key_heads,
            num_value_heads=spec.num_value_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            decays_per_head=1,
        )
        self._negative_A_H = exp_of(A_log_H).neg_()
        self._dt_bias_H = dt_bias_H.float()
        self._norm_weight_HV = norm.weight.repeat(spec.num_value_heads, 1)
        self._walk = None
        if conv.device.type == "cpu":
            self._walk = DeltaWalk(
                conv,
                num_key_heads=spec.num_key_heads,
                key_dim=spec.key_dim,
                value_dim=spec.value_dim,
                A_G=-self._negative_A_H,
                bias_G=self._dt_bias_H,
                is_by_channel=False,
                beta_scale=spec.beta_scale,
            )

    def __call__(self, x_TD: Tensor, rows: Rows, layer: int, on_written: OnWritten) -> Tensor:
        """Return the mixer's output rows; calls `on_written` once all states are in place."""
        spec = self.spec
        widths = [spec.conv_channels, self.core.out_dim, spec.num_value_heads, spec.num_value_heads]
        u_TC, z_TX, b_TH, a_TH = torch.split(self.in_proj(x_TD), widths, dim=1)
        out_TX = x_TD.new_empty(len(x_TD), self.core.out_dim)
        if (walk := self._walk) is not None:

            def fold(batch: Batch) -> None:
                walk(u_TC, b_TH, a_TH, begin(batch, layer), out_TX)
                on_written(batch)

            rows.each_time(fold)
            gate_rows(
                out_TX,
                z_TX,
                activation="silu",
                order="norm_first",
                weight_NM=self._norm_weight_HV,
                eps=self.norm.eps,
            )
            return self.out_proj(out_TX)
        beta_TH = sigmoid(b_TH)
        if spec.beta_scale != 1.0:
            beta_TH.mul_(spec.beta_scale)
        g_TH = softplus(a_TH + self._dt_bias_H).mul_(self._negative_A_H)
        rows_TR = torch.cat([u_TC, beta_TH, g_TH], dim=1)

        def fold_by_torch(batch: Batch) -> None:
            run(self.core, rows_TR, batch, layer, out_TX)
            on_written(batch)

        rows.each_time(fold_by_torch)
        normed_THV = self.norm(out_TX.view(len(x_TD), spec.num_value_heads, spec.value_dim))
        return self.out_proj(normed_THV.view_as(out_TX).mul_(silu(z_TX)))
