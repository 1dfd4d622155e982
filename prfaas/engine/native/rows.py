"""RMS norm and rotation of rows: kernels of a CPU.

A row's bits follow from the row alone: squares are summed in fixed lanes, and every element is
rounded in the same way wherever it stands.

Shapes: T tokens, H heads, K a row's width, C pairs of numbers in it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from prfaas.engine.native.code import Code, Pointer, Value
from prfaas.engine.native.kernel import Argument, Kernel, Task

SUM_LANES = 8
NUM_SUMS = 4
"""Sums of squares side by side in each lane: one chain would wait for itself."""
LANES = 8
SERIAL_ELEMENTS = 32_768
"""So many are done before other threads have woken up."""
UNIT_ELEMENTS = 8_192
"""What a thread takes at a time."""


class RowNorm:
    """x / sqrt(mean(x * x) + eps) * weight, of float32 rows."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Make the norm of rows [K], or of the heads of rows [H, K]; `weight` must not change."""
        assert weight.dtype == torch.float32
        assert weight.is_contiguous()
        self._weight = weight
        self._at = weight.data_ptr()
        self._width = weight.shape[-1]
        self._num_heads = weight.shape[0] if weight.dim() == 2 else None
        self._head_stride = self._width if weight.dim() == 2 else 0
        self._numbers = (1.0 / self._width, eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed rows of x_TK or x_THK, as new contiguous memory."""
        out = torch.empty(*x.shape)
        if x.dim() == 3:
            self._run(_NORMED, x, 0, out, out.stride(), 0.0)
        else:
            self._run(_NORMED, x, 0, out, (self._width, 0), 0.0)
        return out

    def turned(self, x_THK: Tensor, turns_T1C: Tensor) -> Tensor:
        """Return the normed rows with their pairs turned, as `rotate` does."""
        turns = _turns_at(x_THK, turns_T1C)
        out_THK = torch.empty(*x_THK.shape)
        self._run(_NORMED_TURNED, x_THK, turns, out_THK, out_THK.stride(), 0.0)
        return out_THK

    def add_to(self, stream_TK: Tensor, x_TK: Tensor, scale: float) -> None:
        """Add the normed rows times `scale` to the stream, in place: fma(normed, scale, stream)."""
        assert stream_TK.shape == x_TK.shape
        assert stream_TK.dtype is torch.float32
        token_stride, stride = stream_TK.stride()
        assert stride == 1
        self._run(_NORMED_ADDED, x_TK, 0, stream_TK, (token_stride, 0), scale)

    def _run(
        self,
        kernel: Kernel,
        x: Tensor,
        turns: int,
        out: Tensor,
        out_strides: Sequence[int],
        scale: float,
    ) -> None:
        tokens, token_stride, heads, head_stride, width = _rows(x)
        assert width == self._width
        assert self._num_heads in (None, heads)
        if not (num_rows := tokens * heads):
            return
        is_small = num_rows * width <= SERIAL_ELEMENTS
        kernel(
            x.data_ptr(),
            token_stride,
            head_stride,
            self._at,
            self._head_stride,
            turns,
            out.data_ptr(),
            out_strides[0],
            out_strides[1],
            num_rows,
            heads,
            width,
            num_rows if is_small else -(-UNIT_ELEMENTS // width),
            *self._numbers,
            scale,
            threads=1 if is_small else None,
        )


def rotate(x_THK: Tensor, turns_T1C: Tensor) -> Tensor:
    """Return `x_THK` with its pairs multiplied by complex numbers, as new contiguous memory.

    (a + bi)(c + di) is fma(a, c, -bd) + fma(b, c, ad)i.

    Args:
        x_THK: float32; a row's elements lie side by side, those of a pair too.
        turns_T1C: complex64, contiguous, of each token's pairs.
    """
    turns = _turns_at(x_THK, turns_T1C)
    tokens, token_stride, heads, head_stride, width = _rows(x_THK)
    out_THK = torch.empty(*x_THK.shape)
    if not (num_rows := tokens * heads):
        return out_THK
    is_small = num_rows * width <= SERIAL_ELEMENTS
    _TURNED(
        x_THK.data_ptr(),
        token_stride,
        head_stride,
        0,
        0,
        turns,
        out_THK.data_ptr(),
        heads * width,
        width,
        num_rows,
        heads,
        width,
        num_rows if is_small else -(-UNIT_ELEMENTS // width),
        0.0,
        0.0,
        0.0,
        threads=1 if is_small else None,
    )
    return out_THK


def _rows(x: Tensor) -> tuple[int, int, int, int, int]:
    """Return tokens, their stride, heads, their stride and the width of x_TK or x_THK."""
    assert x.dtype is torch.float32
    assert x.is_cpu
    if x.dim() == 2:
        tokens, width = x.shape
        heads = 1
        token_stride, stride = x.stride()
        head_stride = 0
    else:
        tokens, heads, width = x.shape
        token_stride, head_stride, stride = x.stride()
    assert stride == 1 or width == 1
    return tokens, token_stride, heads, head_stride, width


def _turns_at(x_THK: Tensor, turns_T1C: Tensor) -> int:
    num_tokens, _, width = x_THK.shape
    assert turns_T1C.shape[0] == num_tokens
    assert turns_T1C.numel() * 2 == num_tokens * width
    assert turns_T1C.dtype is torch.complex64
    assert turns_T1C.is_contiguous()
    return turns_T1C.data_ptr()


ARGUMENTS: dict[str, Argument] = {
    "x": "float32*",
    "x_token": "int",
    "x_head": "int",
    "weight": "float32*",
    "weight_head": "int",
    "turns": "float32*",
    "out": "float32*",
    "out_token": "int",
    "out_head": "int",
    "num_rows": "int",
    "num_heads": "int",
    "width": "int",
    "unit_rows": "int",
    "inverse_width": "float",
    "eps": "float",
    "scale": "float",
}


def _kernel(*, is_normed: bool = False, is_turned: bool = False, is_added: bool = False) -> Kernel:
    parts = {"normed": is_normed, "turned": is_turned, "added": is_added}
    name = "_".join(["rows", *(name for name, is_in in parts.items() if is_in)])

    def body(task: Task) -> None:
        code, num_rows, unit_rows = task.code, task.number("num_rows"), task.number("unit_rows")
        num_heads, width = task.number("num_heads"), task.number("width")
        num_units = (num_rows + unit_rows - 1) // unit_rows
        with task.units(num_units) as unit:
            start = unit * unit_rows
            with code.loop(start, code.smaller(start + unit_rows, num_rows)) as row:
                token, head = row // num_heads, row % num_heads
                x = (
                    task.pointer("x")
                    + token * task.number("x_token")
                    + head * task.number("x_head")
                )
                out = task.pointer("out") + (
                    token * task.number("out_token") + head * task.number("out_head")
                )
                weight = task.pointer("weight") + head * task.number("weight_head")
                turns = task.pointer("turns") + token * width
                factor = _inverse_rms(task, x) if is_normed else None

                def write(at: Value, lanes: int) -> None:
                    y = (x + at).load(lanes)
                    if factor is not None:
                        y = y * factor * (weight + at).load(lanes)
                    if is_turned:
                        y = _turned(code, y, (turns + at).load(lanes))
                    if is_added:
                        y = code.fma(y, code.like(y, task.number("scale")), (out + at).load(lanes))
                    (out + at).store(y)

                whole = width - width % LANES
                with code.loop(0, whole, LANES) as at:
                    write(at, LANES)
                rest = 2 if is_turned else 1
                with code.loop(whole, width, rest) as at:
                    write(at, rest)

    return Kernel(name, ARGUMENTS, body)


def _inverse_rms(task: Task, x: Pointer) -> Value:
    """Return 1 / sqrt(mean square + eps) of a row."""
    code, width = task.code, task.number("width")
    sums = [code.variable(code.real(0.0, SUM_LANES)) for _ in range(NUM_SUMS)]
    step = SUM_LANES * NUM_SUMS
    whole_steps, whole = width - width % step, width - width % SUM_LANES
    with code.loop(0, whole_steps, step) as at:
        for index, total in enumerate(sums):
            part = (x + (at + index * SUM_LANES)).load(SUM_LANES)
            total.set(code.fma(part, part, total.value))
    with code.loop(whole_steps, whole, SUM_LANES) as at:
        part = (x + at).load(SUM_LANES)
        sums[0].set(code.fma(part, part, sums[0].value))
    rest = code.variable(code.real(0.0))
    with code.loop(whole, width) as at:
        part = (x + at).load()
        rest.set(code.fma(part, part, rest.value))
    lanes = (sums[0].value + sums[1].value) + (sums[2].value + sums[3].value)
    half = SUM_LANES // 2
    while half:
        lanes = code.shuffle(lanes, lanes, range(half)) + code.shuffle(
            lanes, lanes, range(half, 2 * half)
        )
        half //= 2
    square_sum = code.lane(lanes, 0) + rest.value
    mean = code.fma(square_sum, task.number("inverse_width"), task.number("eps"))
    return code.real(1.0) / code.sqrt(mean)


def _turned(code: Code, pairs: Value, turns: Value) -> Value:
    """Return the complex products of (re, im) neighbours."""
    lanes = range(pairs.lanes)
    swapped = code.shuffle(pairs, pairs, [lane ^ 1 for lane in lanes])
    re = code.shuffle(turns, turns, [lane & ~1 for lane in lanes])
    im = code.shuffle(turns, turns, [lane | 1 for lane in lanes])
    crossed = swapped * im
    minus = code.shuffle(-crossed, crossed, [lane + pairs.lanes * (lane & 1) for lane in lanes])
    return code.fma(pairs, re, minus)


_NORMED = _kernel(is_normed=True)
_NORMED_TURNED = _kernel(is_normed=True, is_turned=True)
_NORMED_ADDED = _kernel(is_normed=True, is_added=True)
_TURNED = _kernel(is_turned=True)
