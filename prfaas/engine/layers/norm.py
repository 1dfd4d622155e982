"""RMS norm over the last dimension."""

import torch
from torch import Tensor

from prfaas.engine.native.rows import RowNorm
from prfaas.engine.rope import rotate


class RmsNorm:
    """x / rms(x) * weight, in float32; rows do not depend on each other.

    `weight` may have more dimensions than the last: per-head weights [H, K] norm x_THK by head.
    On a CPU by our own kernel, else by torch's.
    """

    def __init__(self, weight: Tensor, eps: float, *, has_unit_offset: bool) -> None:
        weight = weight.float()
        self.weight = (1.0 + weight if has_unit_offset else weight).contiguous()
        self.eps = eps
        self._eps = torch.tensor([eps], device=weight.device)
        self._inverse_size = 1.0 / weight.shape[-1]
        self._rows = RowNorm(self.weight, eps) if weight.is_cpu else None

    def with_weight(self, weight: Tensor) -> "RmsNorm":
        """Return a norm of the same eps that multiplies by `weight`, offset included."""
        return RmsNorm(weight, self.eps, has_unit_offset=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed rows as a new tensor."""
        if self._rows is not None:
            return self._rows(x)
        # vector_norm reads x once; mean(x * x) makes a product first and takes twice as long.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=self._inverse_size).rsqrt_()
        return (x * scale).mul_(self.weight)

    def turned(self, x_THK: Tensor, turns_T1C: Tensor) -> Tensor:
        """Return the normed rows, then turned as rope.rotate does it, as a new tensor."""
        if self._rows is not None:
            return self._rows.turned(x_THK, turns_T1C)
        return rotate(self(x_THK), turns_T1C)

    def add_to(self, stream_TD: Tensor, x_TD: Tensor, scale: float = 1.0) -> None:
        """Add the normed rows, times `scale`, to those of the stream, in place."""
        if self._rows is not None:
            self._rows.add_to(stream_TD, x_TD, scale)
        else:
            stream_TD += self(x_TD) if scale == 1.0 else self(x_TD) * scale
