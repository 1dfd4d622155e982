"""Linear layers whose rows do not depend on the batch they are computed in.

Every result row is a function of its input row and the weight alone, bit for bit, whatever the
number of rows. Plain `F.linear` on a CPU is not: it takes another kernel for few rows. Each exact
packing here names the row counts for which the property holds, and the model pads its batches to
them. The others are torch's own product on whatever device the weight lies on, padded to nothing.

Shapes: M rows (tokens), K input dim, N output dim.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from prfaas.engine.mixer_spec import KvDtype
from prfaas.errors import ConfigError

ExactPacking = Literal["fbgemm-fp16", "onednn-f32", "padded-f32"]
Packing = ExactPacking | Literal["torch-bf16", "torch-f32"]
TORCH_DTYPES = {"torch-bf16": torch.bfloat16, "torch-f32": torch.float32}
"""Weights of the packings that are not exact."""
FBGEMM_PADDED_REMAINDER = (0, 3, 3, 3, 4, 5)
"""fbgemm cuts rows into bands of 6. Its kernels for 3 to 6 rows round alike, those for 1 and 2 do not."""
SHARD_OUTPUTS = 8192
MAX_FLOAT16 = torch.finfo(torch.float16).max
REORDER_BATCH_HINT = 64  # with a hint of 1, oneDNN packs for one row and M=1 rounds differently

Linear = Callable[[Tensor], Tensor]
"""x_MK -> y_MN; M must be one of padded_rows(), x_MK contiguous float32."""


def is_exact(packing: Packing) -> bool:
    """Return whether a row's bits do not depend on the rows beside it."""
    return packing not in TORCH_DTYPES


def kv_dtype(packing: Packing) -> KvDtype:
    """Return what K, V and convolution rows are kept in: 16 bits where the products are too."""
    return "bfloat16" if packing == "torch-bf16" else "float32"


def pack(
    weight_NK: Tensor,
    packing: Packing,
    bias_N: Tensor | None = None,
    *,
    pool: Executor | None = None,
) -> Linear:
    """Return the linear layer of `weight_NK` and a bias, which the caller may free afterwards.

    A matrix is packed by one thread; a `pool` shares the shards of a large one.

    Raises:
        ConfigError: a weight does not fit the packing's dtype.
    """
    if packing == "torch-bf16" or packing == "torch-f32":  # narrows the type
        return _pack_torch(weight_NK, bias_N, TORCH_DTYPES[packing])
    product = _pack_weight(weight_NK, packing, pool)
    if bias_N is None:
        return product
    # Added to the finished sum, where no kernel's choice of rows can change its bits.
    bias = bias_N.float().clone()
    return lambda x_MK: product(x_MK).add_(bias)


def _pack_weight(weight_NK: Tensor, packing: ExactPacking, pool: Executor | None) -> Linear:
    match packing:
        case "fbgemm-fp16":
            return _pack_fbgemm(weight_NK, map if pool is None else pool.map)
        case "onednn-f32":
            return _pack_onednn(weight_NK)
        case "padded-f32":
            weight = weight_NK.float().contiguous()
            return lambda x_MK: F.linear(x_MK, weight)


def _pack_torch(weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Linear:
    weight = weight_NK.to(dtype).contiguous()
    bias = None if bias_N is None else bias_N.to(dtype)
    return lambda x_MK: F.linear(x_MK.to(dtype), weight, bias).float()


def _pack_fbgemm(weight_NK: Tensor, map_shards: Callable[..., Iterable[Any]]) -> Linear:
    # Packing walks down the columns of the weight; beyond a few thousand rows every step misses the
    # cache (2.5 times slower). The product itself is no slower in shards, so a head is split.
    packed = list(map_shards(_pack_shard, torch.split(weight_NK, SHARD_OUTPUTS)))
    apply = torch.ops.quantized.linear_dynamic_fp16
    if len(packed) == 1:
        return lambda x_MK: apply(x_MK, packed[0])
    return lambda x_MK: torch.cat([apply(x_MK, shard) for shard in packed], dim=1)


def _pack_shard(shard_NK: Tensor) -> Any:
    low, high = (float(value) for value in torch.aminmax(shard_NK))
    if not -MAX_FLOAT16 <= low <= high <= MAX_FLOAT16:  # fbgemm would clip it, and not say so
        raise ConfigError(
            f"weights from {low:g} to {high:g} do not fit float16, whose largest value is "
            f"{MAX_FLOAT16:g}; use --dtype float32"
        )
    return torch.ops.quantized.linear_prepack_fp16(shard_NK.float(), None)


def _pack_onednn(weight_NK: Tensor) -> Linear:
    # What torch.compile itself calls on a CPU; numerics.self_test covers a change of either.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.float(), REORDER_BATCH_HINT)  # noqa: SLF001
    apply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
    return lambda x_MK: apply(x_MK, packed, None, "none", [], "")


def padded_rows(num_rows: int, packing: Packing) -> int:
    """Return the smallest row count >= num_rows at which `packing` is exact."""
    match packing:
        case "fbgemm-fp16":
            bands, remainder = divmod(num_rows, 6)
            return 6 * bands + FBGEMM_PADDED_REMAINDER[remainder]
        case "padded-f32":
            return -(-num_rows // 8) * 8  # MKL takes other kernels for 1 to 3 rows
        case "onednn-f32" | "torch-bf16" | "torch-f32":
            return num_rows


def is_available(packing: Packing) -> bool:
    """Return whether this build of torch on this machine computes `packing`."""
    weight = torch.eye(16)
    rows = torch.ones(padded_rows(1, packing), 16)
    try:
        return torch.equal(pack(weight, packing)(rows), rows)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
