"""Activations and gates of rows: kernels of a CPU.

An element's bits follow from it alone, wherever it stands. Far from 0 a gate ends in 0, a denormal
or infinity; a NaN stays one.

Shapes: T rows, F elements of each, E = 2 F gates and what they multiply.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from prfaas.engine.native.code import Code, Value
from prfaas.engine.native.exp import exp
from prfaas.engine.native.kernel import Argument, Kernel, Task
from prfaas.engine.native.machine import vector_lanes

Name = Literal["silu", "gelu_tanh", "relu2", "clamped_silu", "sigmoid"]

GELU_LINEAR = -2 * math.sqrt(2 / math.pi)
GELU_CUBIC = GELU_LINEAR * 0.044715
CLAMP = 7.0
"""gpt-oss keeps its gate below it, and up within it either way."""
CLAMPED_SLOPE = 1.702
FLOAT_BYTES = 4
SERIAL_ELEMENTS = 8_192
"""So many are done before other threads have woken up."""
UNIT_ELEMENTS = 4_096
"""What a thread takes at a time."""


def activated(name: Name, x: Tensor) -> Tensor:
    """Return the activation of each element of float32 `x`, as new contiguous memory."""
    out = torch.empty(*x.shape)
    if x.numel():
        rows = x if x.dim() == 2 and x.stride(1) == 1 else _as_rows(x.contiguous())
        place = _rows(rows)
        num_rows, width = rows.shape
        _run(_ALONE[name], place, place, _rows(_as_rows(out)), num_rows, width, 1.0)
    return out


def _as_rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.view(x.shape[0] if x.dim() > 2 else 1, -1)


def gated(name: Name, gate_up_TE: Tensor, gate_scale: float = 1.0) -> Tensor:
    """Return activation(gate * gate_scale) * up, as new contiguous memory [T, F].

    Of "clamped_silu" up is kept within CLAMP first, and 1 is added to it.

    Args:
        name: of the activation.
        gate_up_TE: float32 [T, 2 F], a row's gates before its ups, side by side.
        gate_scale: multiplies the gates.
    """
    num_rows, num_both = gate_up_TE.shape
    width = num_both // 2
    assert num_both == 2 * width
    out_TF = torch.empty(num_rows, width)
    at, stride = _rows(gate_up_TE)
    up = (at + width * FLOAT_BYTES, stride)
    _run(_GATED[name], (at, stride), up, _rows(out_TF), num_rows, width, gate_scale)
    return out_TF


def multiply_by_gate(out_TF: Tensor, gate_TF: Tensor) -> None:
    """Multiply the rows by the gates' sigmoid, in place; float32, a row's elements side by side."""
    assert out_TF.shape == gate_TF.shape
    out = _rows(out_TF)
    num_rows, width = out_TF.shape
    _run(_GATED["sigmoid"], _rows(gate_TF), out, out, num_rows, width, 1.0)


Rows = tuple[int, int]
"""Where rows begin, and how many elements lie from one to the next."""


def _rows(rows_TF: Tensor) -> Rows:
    assert rows_TF.is_cpu
    assert rows_TF.dtype is torch.float32
    row_stride, stride = rows_TF.stride()
    assert stride == 1 or rows_TF.shape[1] <= 1
    return rows_TF.data_ptr(), row_stride


def _run(
    kernel: Kernel,
    gate: Rows,
    up: Rows,
    out: Rows,
    num_rows: int,
    width: int,
    gate_scale: float,
) -> None:
    if not num_rows or not width:
        return
    is_small = num_rows * width <= SERIAL_ELEMENTS
    kernel(
        *gate,
        *up,
        *out,
        num_rows,
        width,
        num_rows if is_small else -(-UNIT_ELEMENTS // width),
        gate_scale,
        threads=1 if is_small else None,
    )


ARGUMENTS: dict[str, Argument] = {
    "gate": "float32*",
    "gate_row": "int",
    "up": "float32*",
    "up_row": "int",
    "out": "float32*",
    "out_row": "int",
    "num_rows": "int",
    "width": "int",
    "unit_rows": "int",
    "gate_scale": "float",
}


def _kernel(name: Name, *, is_gate: bool) -> Kernel:
    def body(task: Task) -> None:
        code, num_rows, unit_rows = task.code, task.number("num_rows"), task.number("unit_rows")
        width, lanes = task.number("width"), vector_lanes()
        with task.units((num_rows + unit_rows - 1) // unit_rows) as unit:
            start = unit * unit_rows
            with code.loop(start, code.smaller(start + unit_rows, num_rows)) as row:
                gate = task.pointer("gate") + row * task.number("gate_row")
                up = task.pointer("up") + row * task.number("up_row")
                out = task.pointer("out") + row * task.number("out_row")

                def write(at: Value, lanes: int) -> None:
                    y = (gate + at).load(lanes)
                    if not is_gate:
                        y = ACTIVATIONS[name](code, y)
                    else:
                        y = ACTIVATIONS[name](code, y * task.number("gate_scale"))
                        factor = (up + at).load(lanes)
                        if name == "clamped_silu":
                            factor = _within(code, factor, -CLAMP, CLAMP) + 1.0
                        y = y * factor
                    (out + at).store(y)

                whole = width - width % lanes
                with code.loop(0, whole, lanes) as at:
                    write(at, lanes)
                with code.loop(whole, width) as at:
                    write(at, 1)

    return Kernel(f"{'gated' if is_gate else 'activated'}_{name}", ARGUMENTS, body)


def _silu(code: Code, x: Value) -> Value:
    return x / (exp(code, -x) + 1.0)


def _gelu_tanh(code: Code, x: Value) -> Value:
    """0.5x(1 + tanh(sqrt(2/pi)(x + 0.044715x^3))), as x times the sigmoid of twice the argument."""
    inner = code.fma(x * x, code.like(x, GELU_CUBIC), code.like(x, GELU_LINEAR)) * x
    return x / (exp(code, inner) + 1.0)


def _relu2(code: Code, x: Value) -> Value:
    positive = code.select(x <= 0.0, code.like(x, 0.0), x)
    return positive * positive


def _clamped_silu(code: Code, x: Value) -> Value:
    """Min(x, 7) * sigmoid(1.702 min(x, 7)) (gpt-oss)."""
    low = code.select(x > CLAMP, code.like(x, CLAMP), x)
    return low / (exp(code, low * -CLAMPED_SLOPE) + 1.0)


def _sigmoid(code: Code, x: Value) -> Value:
    return code.like(x, 1.0) / (exp(code, -x) + 1.0)


def _within(code: Code, x: Value, low: float, high: float) -> Value:
    x = code.select(x < low, code.like(x, low), x)
    return code.select(x > high, code.like(x, high), x)


ACTIVATIONS: dict[Name, Callable[[Code, Value], Value]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
    "clamped_silu": _clamped_silu,
    "sigmoid": _sigmoid,
}
_ALONE = {name: _kernel(name, is_gate=False) for name in ACTIVATIONS}
_GATED = {name: _kernel(name, is_gate=True) for name in ACTIVATIONS}
