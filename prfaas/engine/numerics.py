"""What decides the bits of a result, tested at start and named in a fingerprint."""

from typing import TYPE_CHECKING, Literal

import torch

from prfaas.engine.linear import Packing, is_available

if TYPE_CHECKING:
    from prfaas.engine.model import Model


def choose_packing(dtype: Literal["float16", "float32"]) -> Packing:
    if dtype == "float16" and is_available("fbgemm-fp16"):
        return "fbgemm-fp16"
    return "onednn-f32" if is_available("onednn-f32") else "padded-f32"


def fingerprint(model: "Model") -> str:
    return (
        f"cpu {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__} {model.packing}"
    )
