"""The dense feed-forward layers, and the activations of all layers.

Shapes: T tokens, D model dim, F feed-forward dim, E = 2 F gates and ups.
"""

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional as F

from prfaas.engine.linear import Linear
from prfaas.engine.model_spec import Activation
from prfaas.engine.native import activations
from prfaas.engine.native.activations import CLAMP, CLAMPED_SLOPE

SLAB_ROWS = 192
"""Rows computed at once: their activations stay in cache."""


class GatedMlp:
    """down(act(gate_scale * gate(x)) * up(x)) * down_scale, with gate and up in one matrix."""

    def __init__(
        self,
        gate_up_proj: Linear,
        down_proj: Linear,
        activation: Activation,
        num_hidden: int,
        *,
        gate_scale: float = 1.0,
        down_scale: float = 1.0,
    ) -> None:
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._activation: Activation = activation
        self._num_hidden = num_hidden
        self._gate_scale = gate_scale
        self._down_scale = down_scale

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the output rows."""
        return _in_slabs(self._slab, x_TD)

    def _slab(self, x_TD: Tensor) -> Tensor:
        gate_up_TE = self.gate_up_proj(x_TD)
        out_TD = self.down_proj(_gated(self._activation, gate_up_TE, self._gate_scale))
        return out_TD if self._down_scale == 1.0 else out_TD.mul_(self._down_scale)


class PlainMlp:
    """down(act(up(x))): a feed-forward without a gate (Nemotron-H)."""

    def __init__(self, up_proj: Linear, down_proj: Linear, activation: Activation) -> None:
        self.up_proj = up_proj
        self.down_proj = down_proj
        self._activation: Activation = activation

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the output rows."""
        return _in_slabs(self._slab, x_TD)

    def _slab(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(activated(self._activation, self.up_proj(x_TD)))


def _in_slabs(compute: Callable[[Tensor], Tensor], x_TD: Tensor) -> Tensor:
    if x_TD.shape[0] <= SLAB_ROWS:
        return compute(x_TD)
    return torch.cat([compute(slab) for slab in torch.split(x_TD, SLAB_ROWS)])


def activated(name: Activation, x: Tensor) -> Tensor:
    """Return an activation of each element, as new memory."""
    if x.is_cpu:
        return activations.activated(name, x)
    match name:
        case "silu":
            return F.silu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu2":
            return F.relu(x).square_()
        case "clamped_silu":
            low = x.clamp(max=CLAMP)
            return low * (low * CLAMPED_SLOPE).sigmoid_()
        case _:
            assert_never(name)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x) as new memory."""
    return activated("silu", x)


def _gated(name: Activation, gate_up_TE: Tensor, gate_scale: float) -> Tensor:
    """Return activation(gate * gate_scale) * up; up of "clamped_silu" is within CLAMP, plus 1."""
    if gate_up_TE.is_cpu:
        return activations.gated(name, gate_up_TE, gate_scale)
    gate_TF, up_TF = gate_up_TE.chunk(2, dim=1)
    if gate_scale != 1.0:
        gate_TF = gate_TF * gate_scale
    if name == "clamped_silu":
        up_TF = up_TF.clamp(-CLAMP, CLAMP).add_(1.0)
    return activated(name, gate_TF).mul_(up_TF)
