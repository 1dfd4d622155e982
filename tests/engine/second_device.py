"""A second device made of the CPU, so that a tensor left on the wrong one is found without a GPU.

Inside `second_device()` what is made on, or moved to, the device SECOND computes on the CPU but says
that it lies on SECOND, and meets a CPU tensor as a CUDA tensor would: with an error, except where
CUDA takes one, too (scalars, indices, copies).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

SECOND = torch.device("meta")
"""A device that torch lets a tensor claim to be on."""
aten = torch.ops.aten
TAKE_CPU_INDICES = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
COPY = {aten.copy_.default, aten._to_copy.default}


class SecondTensor(Tensor):
    """Claims to lie on SECOND; `data` is the CPU tensor that holds it."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "SecondTensor":
        made: SecondTensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=SECOND,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return dispatch(func, args, dict(kwargs or {}))


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Also sees the functions that make tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, dict(kwargs or {}))


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_second = any(isinstance(tensor, SecondTensor) for tensor in tensors)
    device = kwargs.get("device")
    if device is not None:
        is_second = torch.device(device) == SECOND
        kwargs = kwargs | {"device": torch.device("cpu")}
    if is_second and func not in COPY:
        checked = tensors[:1] if func in TAKE_CPU_INDICES else tensors
        for tensor in checked:
            if tensor.dim() and not isinstance(tensor, SecondTensor):
                raise RuntimeError(f"{func} meets a CPU tensor of shape {tuple(tensor.shape)}")
    plain_args, plain_kwargs = tree_map(_held, (tuple(args), kwargs))
    out = func(*plain_args, **plain_kwargs)
    if func is aten.copy_.default:
        return args[0]
    if not is_second:
        return out
    out = tree_map(lambda leaf: SecondTensor(leaf) if isinstance(leaf, Tensor) else leaf, out)
    return return_and_correct_aliasing(func, args, kwargs, out)  # type: ignore[no-untyped-call]


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, SecondTensor) else leaf


@contextlib.contextmanager
def second_device() -> Iterator[torch.device]:
    """Make SECOND usable in this thread."""
    on_cpu = torch.tensor

    def tensor(data: Any, *, device: torch.device | None = None, **how: Any) -> Tensor:
        # torch forgets the data of what claims to lie there.
        made = on_cpu(data, **how)
        return made if device is None else made.to(device)

    mode = _Mode()  # type: ignore[no-untyped-call]
    with patch.object(torch, "tensor", tensor), mode:
        yield SECOND
