"""The causal depthwise convolution: a kernel of a CPU.

A row's bits follow from the rows that it sees alone: each channel's products are added in one order.

Shapes: T tokens, C channels, W width, P pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from prfaas.engine.native.activations import ACTIVATIONS
from prfaas.engine.native.code import F32, Pointer, Value
from prfaas.engine.native.kernel import Argument, Kernel, Task, address
from prfaas.engine.native.strips import Strip, each_strip

TILE = 512
"""Channels of a unit: the rows that it sees at a time stay in the first cache."""
UNIT_ROWS = 32
UNIT_WORDS = 4
SERIAL_VALUES = 8_192
"""So many are done before other threads have woken up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvPiece:
    """The next rows of one sequence: start, ..., stop - 1 of all arrays."""

    start: int
    stop: int
    before_WC: Tensor
    """The W - 1 rows before the first; contiguous."""


def convolve(
    rows_TC: Tensor,
    pieces: Sequence[ConvPiece],
    weight_WC: Tensor,
    bias_C: Tensor | None,
    *,
    has_silu: bool,
) -> Tensor:
    """Return bias + sum over i of weight_i * u_(t - W + 1 + i) for all pieces' rows, then silu.

    Args:
        rows_TC: float32, channels side by side.
        pieces: rows of no piece are not written.
        weight_WC: contiguous float32.
        bias_C: contiguous float32.
        has_silu: y / (1 + exp(-y)) follows.
    """
    num_rows, num_channels = rows_TC.shape
    width = len(weight_WC)
    assert rows_TC.is_cpu
    assert rows_TC.dtype == torch.float32
    assert rows_TC.stride(1) == 1 or num_channels == 1
    assert weight_WC.shape == (width, num_channels)
    for tensor in (weight_WC, bias_C):
        assert tensor is None or (tensor.is_contiguous() and tensor.dtype == torch.float32)
    assert bias_C is None or bias_C.shape == (num_channels,)
    units: list[int] = []
    for piece in pieces:
        before_WC = piece.before_WC
        assert 0 <= piece.start <= piece.stop <= num_rows
        assert before_WC.shape == (width - 1, num_channels)
        assert before_WC.dtype == torch.float32
        assert before_WC.is_contiguous()
        for start in range(piece.start, piece.stop, UNIT_ROWS):
            stop = min(start + UNIT_ROWS, piece.stop)
            units += [start, stop, start - piece.start, before_WC.data_ptr()]
    out_TC = torch.empty(num_rows, num_channels)
    if not units or not num_channels:
        return out_TC
    table = torch.tensor(units)
    _kernel(width, bias_C is not None, has_silu)(
        rows_TC.data_ptr(),
        rows_TC.stride(0),
        weight_WC.data_ptr(),
        address(bias_C),
        out_TC.data_ptr(),
        table.data_ptr(),
        len(units) // UNIT_WORDS,
        num_channels,
        threads=1 if num_rows * num_channels <= SERIAL_VALUES else None,
    )
    return out_TC


ARGUMENTS: dict[str, Argument] = {
    "rows": "float32*",
    "row_stride": "int",
    "weight": "float32*",
    "bias": "float32*",
    "out": "float32*",
    "table": "int64*",
    "num_blocks": "int",
    "num_channels": "int",
}


@cache
def _kernel(width: int, has_bias: bool, has_silu: bool) -> Kernel:
    def body(task: Task) -> None:
        code, num_channels = task.code, task.number("num_channels")
        num_tiles = (num_channels + (TILE - 1)) // TILE
        with task.units(task.number("num_blocks") * num_tiles) as unit:
            words = task.pointer("table") + unit // num_tiles * UNIT_WORDS
            first = unit % num_tiles * TILE
            stop = code.smaller(first + TILE, num_channels)
            start = words.load()
            with code.loop(start, (words + 1).load()) as row:
                offset = (words + 2).load() + (row - start)
                seen = [_seen(task, row, offset, words + 3, width, i) for i in range(width)]
                out = task.pointer("out") + row * num_channels

                def write(strip: Strip, seen: list[Pointer] = seen, out: Pointer = out) -> None:
                    weight = task.pointer("weight")
                    total = strip.load(weight) * strip.load(seen[0])
                    for i in range(1, width):
                        weight_i = strip.load(weight + num_channels * i)
                        total = code.fma(weight_i, strip.load(seen[i]), total)
                    if has_bias:
                        total = total + strip.load(task.pointer("bias"))
                    strip.store(out, ACTIVATIONS["silu"](code, total) if has_silu else total)

                each_strip(code, first, stop, write)

    bias, act = "_bias" if has_bias else "", "_silu" if has_silu else ""
    return Kernel(f"conv{width}{bias}{act}", ARGUMENTS, body)


def _seen(task: Task, row: Value, offset: Value, before: Pointer, width: int, tap: int) -> Pointer:
    """Return the row that a tap sees: of the piece, or before it."""
    code = task.code
    here = task.pointer("rows") + (row - (width - 1 - tap)) * task.number("row_stride")
    place = code.variable(Value(code, here.ir))
    with code.when(offset + tap < width - 1):
        earlier = before.load_pointer(F32) + (offset + tap) * task.number("num_channels")
        place.set(Value(code, earlier.ir))
    return Pointer(code, place.value.ir, F32)
