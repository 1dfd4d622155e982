"""Linear layers whose rows do not depend on the batch they are computed in.

On a CPU every result is one chain of fused multiply-adds over the inputs in ascending order, by our
own kernel: a function of its input row and the weights alone, bit for bit, on any machine and for any
number of rows. Elsewhere the product is torch's own, which promises no such thing.

Shapes: M rows (tokens), K input dim, N output dim; Q panels of P outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from prfaas.engine.mixer_spec import KvDtype
from prfaas.engine.native.product import pack_panels, product
from prfaas.errors import ConfigError

ExactPacking = Literal["fma-fp16", "fma-f32"]
Packing = ExactPacking | Literal["torch-bf16", "torch-f32"]
WEIGHT_DTYPES: dict[Packing, torch.dtype] = {
    "fma-fp16": torch.float16,
    "fma-f32": torch.float32,
    "torch-bf16": torch.bfloat16,
    "torch-f32": torch.float32,
}
MAX_FLOAT16 = torch.finfo(torch.float16).max

Linear = Callable[[Tensor], Tensor]
"""x_MK -> y_MN, new float32 memory; x_MK is float32, and of any number of rows and stride between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelLinear:
    """A linear layer of an exact packing."""

    panels_QKP: Tensor
    """The weights, in panels; the last is filled up with zeros."""
    num_outputs: int
    bias_N: Tensor | None = None

    def __call__(self, x_MK: Tensor) -> Tensor:
        """Return the layer's outputs; a bias is added to the finished sums."""
        y_MN = product(x_MK, self.panels_QKP, self.num_outputs)
        return y_MN if self.bias_N is None else y_MN.add_(self.bias_N)


def is_exact(packing: Packing) -> bool:
    """Return whether a row's bits do not depend on the rows beside it."""
    return packing in ("fma-fp16", "fma-f32")


def kv_dtype(packing: Packing) -> KvDtype:
    """Return what K, V and convolution rows are kept in: 16 bits where the products are too."""
    return "bfloat16" if packing == "torch-bf16" else "float32"


def pack(weight_NK: Tensor, packing: Packing, bias_N: Tensor | None = None) -> Linear:
    """Return the linear layer of `weight_NK` and a bias, which the caller may free afterwards.

    That of an exact packing is a `PanelLinear`. Packing is shared among threads.

    Raises:
        ConfigError: a weight does not fit the packing's dtype.
    """
    dtype = WEIGHT_DTYPES[packing]
    if not is_exact(packing):
        return _torch_linear(weight_NK.to(dtype).contiguous(), bias_N)
    if dtype == torch.float16:
        _require_float16(weight_NK)
    return PanelLinear(
        panels_QKP=pack_panels(weight_NK, dtype),
        num_outputs=len(weight_NK),
        bias_N=None if bias_N is None else bias_N.to(torch.float32, copy=True),
    )


def _torch_linear(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
    dtype = weight_NK.dtype
    bias = None if bias_N is None else bias_N.to(dtype)
    return lambda x_MK: F.linear(x_MK.to(dtype), weight_NK, bias).float()


def _require_float16(weight_NK: Tensor) -> None:
    low, high = (float(value) for value in torch.aminmax(weight_NK))
    if not -MAX_FLOAT16 <= low <= high <= MAX_FLOAT16:
        raise ConfigError(
            f"weights from {low:g} to {high:g} do not fit float16, whose largest value is "
            f"{MAX_FLOAT16:g}; use --dtype float32"
        )
