"""The dense feed-forward layers, and the activations of all layers.

Shapes: T tokens, D model dim, F feed-forward dim.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import assert_never

import torch
from torch import Tensor

from prfaas.engine.linear import Linear
from prfaas.engine.model_spec import Activation

SLAB_ROWS = 192
"""Rows computed at once: their activations stay in cache. Any row count that
the linear layers accept stays one after taking this many away."""
GELU_LINEAR = -2 * math.sqrt(2 / math.pi)
GELU_CUBIC = GELU_LINEAR * 0.044715
CLAMP = 7.0
"""gpt-oss keeps its gate below it, and up within it either way."""
CLAMPED_SLOPE = 1.702


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
        self._is_clamped = activation == "clamped_silu"
        self._activate = _activation(activation)
        self._num_hidden = num_hidden
        self._gate_scale = gate_scale
        self._down_scale = down_scale

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the output rows; `x_TD` has a row count that the linear layers accept."""
        return _in_slabs(self._slab, x_TD)

    def _slab(self, x_TD: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x_TD)
        gate_TF, up_TF = gate_up[:, : self._num_hidden], gate_up[:, self._num_hidden :]
        if self._gate_scale != 1.0:
            gate_TF = gate_TF * self._gate_scale
        if self._is_clamped:
            up_TF = up_TF.clamp(-CLAMP, CLAMP).add_(1.0)
        out_TD = self.down_proj(self._activate(gate_TF).mul_(up_TF))
        return out_TD if self._down_scale == 1.0 else out_TD.mul_(self._down_scale)


class PlainMlp:
    """down(act(up(x))): a feed-forward without a gate (Nemotron-H)."""

    def __init__(self, up_proj: Linear, down_proj: Linear, activation: Activation) -> None:
        self.up_proj = up_proj
        self.down_proj = down_proj
        self._activate = _activation(activation)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the output rows; `x_TD` has a row count that the linear layers accept."""
        return _in_slabs(self._slab, x_TD)

    def _slab(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self._activate(self.up_proj(x_TD)))


def _in_slabs(compute: Callable[[Tensor], Tensor], x_TD: Tensor) -> Tensor:
    if len(x_TD) <= SLAB_ROWS:
        return compute(x_TD)
    return torch.cat([compute(slab) for slab in torch.split(x_TD, SLAB_ROWS)])


def _activation(name: Activation) -> Callable[[Tensor], Tensor]:
    match name:
        case "silu":
            return silu
        case "gelu_tanh":
            return gelu_tanh
        case "relu2":
            return relu2
        case "clamped_silu":
            return clamped_silu
        case _:
            assert_never(name)


# torch's own silu, sigmoid and gelu round the last elements of a tensor in another way than the
# others, so a row's bits would depend on the rows beside it. exp, on contiguous memory, does not.


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x) as a new contiguous tensor."""
    return x / inverse_sigmoid(x)


def inverse_sigmoid(x: Tensor) -> Tensor:
    """Return 1 / sigmoid(x), which is infinite below -89, as a new contiguous tensor."""
    return torch.neg(x).contiguous().exp_().add_(1.0)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return 0.5x(1 + tanh(sqrt(2/pi)(x + 0.044715x^3))) as a new contiguous tensor.

    Computed as x * sigmoid of twice the argument, which is the same function.
    """
    inner = torch.addcmul(_gelu_linear(x.device), x, x, value=GELU_CUBIC).mul_(x)
    return x / inner.exp_().add_(1.0)


@cache
def _gelu_linear(device: torch.device) -> Tensor:
    return torch.tensor([GELU_LINEAR], device=device)


def relu2(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 as a new contiguous tensor."""
    positive = x.clamp(min=0.0).contiguous()
    return positive.mul_(positive)


def clamped_silu(x: Tensor) -> Tensor:
    """Return min(x, 7) * sigmoid(1.702 min(x, 7)) as a new contiguous tensor (gpt-oss)."""
    low = x.clamp(max=CLAMP).contiguous()
    return low.div_((low * -CLAMPED_SLOPE).exp_().add_(1.0))
