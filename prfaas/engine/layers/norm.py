"""RMS norm over the last dimension."""

import torch
from torch import Tensor


class RmsNorm:
    """x / rms(x) * weight, in float32; rows do not depend on each other.

    `weight` may have more dimensions than the last: per-head weights [H, K] norm x_THK by head.
    """

    def __init__(self, weight: Tensor, eps: float, *, has_unit_offset: bool) -> None:
        weight = weight.float()
        self.weight = (1.0 + weight if has_unit_offset else weight).contiguous()
        self._eps = torch.tensor([eps], device=weight.device)
        self._inverse_size = 1.0 / weight.shape[-1]

    def with_weight(self, weight: Tensor) -> "RmsNorm":
        """Return a norm of the same eps that multiplies by `weight`, offset included."""
        return RmsNorm(weight, float(self._eps), has_unit_offset=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed rows as a new tensor."""
        # vector_norm reads x once; mean(x * x) makes a product first and takes twice as long.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=self._inverse_size).rsqrt_()
        return (x * scale).mul_(self.weight)
