"""Smooth functions whose elements do not depend on the elements beside them.

torch's own sigmoid and softplus round the last elements of a tensor in another way than the others,
so a row's bits would depend on the rows beside it. exp and log1p, on contiguous memory, do not.
"""

from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) as a new contiguous tensor."""
    return x.neg().contiguous().exp_().add_(1.0).reciprocal_()


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) as a new contiguous tensor; nothing overflows."""
    return x.abs().neg_().contiguous().exp_().log1p_().add_(x.clamp(min=0.0))
