"""Puts the keys and values of a batch's rows where their sequences keep them.

Shapes: T rows of the batch, H KV heads, K and V dims of a key and a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prfaas.engine.native.code import F32, Code, Pointer, Value
from prfaas.engine.native.kernel import Argument, Kernel, Task

if TYPE_CHECKING:
    from array import array

    from torch import Tensor

LANES = 8
SERIAL_VALUES = 1 << 16
"""So many are copied before other threads have woken up."""
UNIT_TOKENS = 64
TARGET = ("keys", "values", "key_head", "value_head", "first_row", "num_tokens")
"""A sequence's int64s: addresses of where its first row goes, strides between heads there, in
elements, and which rows of the batch are its own."""
ARGUMENTS: dict[str, Argument] = {
    "keys": "float32*",
    "key_token": "int",
    "key_head": "int",
    "values": "float32*",
    "value_token": "int",
    "value_head": "int",
    "targets": "int64*",
    "num_targets": "int",
    "units_per_target": "int",
    "num_heads": "int",
    "key_dim": "int",
    "value_dim": "int",
    "key_stride": "int",
    "value_stride": "int",
}


class RowStore:
    """Rows that are copied from where they lie to the places of their sequences."""

    def __init__(self, keys_THK: Tensor, values_THV: Tensor | None = None) -> None:
        """Take the rows.

        Args:
            keys_THK: float32, with unit stride in K; what is kept of a token in one buffer has no values.
            values_THV: likewise.
        """
        num_rows, num_heads, key_dim = keys_THK.shape
        assert keys_THK.dtype is torch.float32
        assert keys_THK.is_cpu
        assert keys_THK.stride(2) == 1
        values, value_dim = keys_THK, 0
        if values_THV is not None:
            assert values_THV.dtype is torch.float32
            assert values_THV.shape[:2] == (num_rows, num_heads)
            assert values_THV.stride(2) == 1
            values, value_dim = values_THV, values_THV.shape[2]
        self._tensors = (keys_THK, values)  # their memory stays
        self._rows = (
            keys_THK.data_ptr(),
            *keys_THK.stride()[:2],
            values.data_ptr(),
            *values.stride()[:2],
        )
        self._shape = (num_heads, key_dim, value_dim)
        is_small = num_rows * num_heads * (key_dim + value_dim) <= SERIAL_VALUES
        self._threads = 1 if is_small else None

    def store(self, targets: array[int], most_tokens: int, strides: tuple[int, int]) -> None:
        """Copy the rows.

        Args:
            targets: TARGET's numbers of each sequence.
            most_tokens: of a sequence.
            strides: between tokens at the places of keys and of values, in elements.
        """
        _STORE(
            *self._rows,
            targets.buffer_info()[0],
            len(targets) // len(TARGET),
            -(-most_tokens // UNIT_TOKENS),
            *self._shape,
            *strides,
            threads=self._threads,
        )


def _body(task: Task) -> None:
    code, number = task.code, task.number
    with task.units(number("num_targets") * number("units_per_target")) as unit:
        target = task.pointer("targets") + unit // number("units_per_target") * len(TARGET)
        found = {name: (target + index).load() for index, name in enumerate(TARGET)}
        places = {"key": target.load_pointer(F32), "value": (target + 1).load_pointer(F32)}
        start = unit % number("units_per_target") * UNIT_TOKENS
        stop = code.smaller(start + UNIT_TOKENS, found["num_tokens"])
        with code.loop(start, stop) as token, code.loop(0, number("num_heads")) as head:
            for name, base in places.items():
                source = task.pointer(f"{name}s") + (
                    (found["first_row"] + token) * number(f"{name}_token")
                    + head * number(f"{name}_head")
                )
                place = base + (token * number(f"{name}_stride") + head * found[f"{name}_head"])
                _copy(code, source, place, number(f"{name}_dim"))


def _copy(code: Code, source: Pointer, place: Pointer, width: Value) -> None:
    whole = width - width % LANES
    with code.loop(0, whole, LANES) as at:
        (place + at).store((source + at).load(LANES))
    with code.loop(whole, width) as at:
        (place + at).store((source + at).load())


_STORE = Kernel("store", ARGUMENTS, _body)
