"""The gated feed-forward layer.

Shapes: T tokens, D model dim, F feed-forward dim.
"""

import math

import torch
from torch import Tensor

from prfaas.engine.config import Activation
from prfaas.engine.linear import Linear

SLAB_ROWS = 192
"""Rows computed at once: their activations stay in cache. Any row count that
the linear layers accept stays one after taking this many away."""
GELU_LINEAR = -2 * math.sqrt(2 / math.pi)
GELU_CUBIC = GELU_LINEAR * 0.044715
_GELU_LINEAR = torch.tensor([GELU_LINEAR])


class GatedMlp:
    """down(act(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(
        self, gate_up_proj: Linear, down_proj: Linear, activation: Activation, num_hidden: int
    ) -> None:
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._activate = gelu_tanh if activation == "gelu_tanh" else silu
        self._num_hidden = num_hidden

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the output rows; `x_TD` has a row count that the linear layers accept."""
        if len(x_TD) <= SLAB_ROWS:
            return self._slab(x_TD)
        return torch.cat([self._slab(slab) for slab in torch.split(x_TD, SLAB_ROWS)])

    def _slab(self, x_TD: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x_TD)
        hidden_TF = self._activate(gate_up[:, : self._num_hidden])
        return self.down_proj(hidden_TF.mul_(gate_up[:, self._num_hidden :]))


# torch's own silu, sigmoid and gelu round the last elements of a tensor in another way than the
# others, so a row's bits would depend on the rows beside it. exp, on contiguous memory, does not.


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x) as a new contiguous tensor."""
    return x / torch.neg(x).contiguous().exp_().add_(1.0)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return 0.5x(1 + tanh(sqrt(2/pi)(x + 0.044715x^3))) as a new contiguous tensor.

    Computed as x * sigmoid of twice the argument, which is the same function.
    """
    inner = torch.addcmul(_GELU_LINEAR, x, x, value=GELU_CUBIC).mul_(x)
    return x / inner.exp_().add_(1.0)
