"""The gates of linear mixers: how much a token decays a state and writes to it, and gated norms.

Kernels of a CPU. A row's bits follow from the row alone.

Shapes: T tokens, H heads, G decays of a token: H, or H K, h heads of q and of k, K key dim,
X = N groups of M numbers, a row of outputs.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from prfaas.engine.native.activations import ACTIVATIONS
from prfaas.engine.native.code import Code, Pointer, Value
from prfaas.engine.native.exp import exp
from prfaas.engine.native.kernel import Argument, Kernel, Task
from prfaas.engine.native.strips import Strip, each_strip, sum_of_squares

ATANH_TERMS = 8
"""Of the series of log1p: what is left out is below 2^-26 of it."""
SERIAL_VALUES = 4_096
"""So many are done before other threads have woken up."""
UNIT_ROWS = 4

Activation = Literal["silu", "sigmoid"]
Order = Literal["norm_first", "gate_first"]


def softplus(code: Code, x: Value) -> Value:
    """Return log(1 + exp(x)); nothing overflows."""
    y = exp(code, -code.absolute(x))
    # log(1 + y) = 2 atanh(s), s <= 1/3: as good for a small y as for any.
    s = y / (y + 2.0)
    square = s * s
    series = code.like(x, 1.0 / (2 * ATANH_TERMS - 1))
    for term in reversed(range(ATANH_TERMS - 1)):
        series = code.fma(series, square, code.like(x, 1.0 / (2 * term + 1)))
    above = code.select(x > code.like(x, 0.0), x, 0.0)
    return code.fma(s + s, series, above)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaGates:
    """What a delta rule's tokens bring besides q, k and v."""

    decay_TG: Tensor
    beta_TH: Tensor
    scale_Th: Tensor
    """1 / the norms of q, then of k; q's times 1 / sqrt(K)."""


def delta_gates(
    f_TG: Tensor,
    b_TH: Tensor,
    qk_ThK: Tensor,
    *,
    A_G: Tensor,
    bias_G: Tensor,
    decay_bound: float | None,
    beta_scale: float,
    norm_eps: float,
) -> DeltaGates:
    """Return exp(-A softplus(f + bias)), beta_scale sigmoid(b), and the scales of q and k.

    Args:
        f_TG: float32, as all are; the last dimension is dense, heads of q and k lie one after another.
        b_TH: before its sigmoid.
        qk_ThK: heads of q, then as many of k.
        A_G: contiguous.
        bias_G: contiguous.
        decay_bound: if there is one, the decay is exp(decay_bound sigmoid(A (f + bias))).
        beta_scale: of all betas.
        norm_eps: joins the square of a norm.
    """
    num_rows, num_decays = f_TG.shape
    num_heads, (num_qk, key_dim) = b_TH.shape[1], qk_ThK.shape[1:]
    assert len(b_TH) == len(qk_ThK) == num_rows
    assert A_G.shape == bias_G.shape == (num_decays,)
    assert qk_ThK.stride(1) == key_dim or num_qk == 1
    _check(f_TG, b_TH, qk_ThK, A_G, bias_G)
    gates = DeltaGates(
        decay_TG=torch.empty(num_rows, num_decays),
        beta_TH=torch.empty(num_rows, num_heads),
        scale_Th=torch.empty(num_rows, num_qk),
    )
    if not num_rows:
        return gates
    num_values = num_rows * (num_decays + num_heads + num_qk * key_dim // 4)
    _delta_kernel(decay_bound is not None)(
        f_TG.data_ptr(),
        f_TG.stride(0),
        b_TH.data_ptr(),
        b_TH.stride(0),
        qk_ThK.data_ptr(),
        qk_ThK.stride(0),
        A_G.data_ptr(),
        bias_G.data_ptr(),
        gates.decay_TG.data_ptr(),
        gates.beta_TH.data_ptr(),
        gates.scale_Th.data_ptr(),
        num_rows,
        num_decays,
        num_heads,
        num_qk,
        key_dim,
        decay_bound or 0.0,
        beta_scale,
        norm_eps,
        1.0 / math.sqrt(key_dim),
        threads=1 if num_values <= SERIAL_VALUES else None,
    )
    return gates


def step_sizes(
    dt_TH: Tensor, *, A_H: Tensor, bias_H: Tensor, limit: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Return Mamba-2's decays exp(-A dt) and dt = softplus(dt + bias) within the limits, [T, H].

    Args:
        dt_TH: float32, as all are; the last dimension is dense.
        A_H: contiguous, positive.
        bias_H: contiguous.
        limit: the least and the largest dt.
    """
    num_rows, num_heads = dt_TH.shape
    assert A_H.shape == bias_H.shape == (num_heads,)
    _check(dt_TH, A_H, bias_H)
    decay_TH, size_TH = torch.empty(2, num_rows, num_heads)
    if num_rows:
        _step_kernel()(
            dt_TH.data_ptr(),
            dt_TH.stride(0),
            A_H.data_ptr(),
            bias_H.data_ptr(),
            decay_TH.data_ptr(),
            size_TH.data_ptr(),
            num_rows,
            num_heads,
            *limit,
            threads=1 if num_rows * num_heads <= SERIAL_VALUES else None,
        )
    return decay_TH, size_TH


def gate_rows(
    y_TX: Tensor,
    gate_TX: Tensor,
    *,
    activation: Activation,
    order: Order,
    weight_NM: Tensor,
    eps: float,
) -> None:
    """Multiply y by the activation of the gate, in place, before or after an RMS norm by groups.

    Args:
        y_TX: float32, contiguous.
        gate_TX: float32, the last dimension dense.
        activation: of the gate.
        order: of the norm and the gate.
        weight_NM: of the norm; contiguous.
        eps: joins the mean square.
    """
    num_rows, width = y_TX.shape
    assert gate_TX.shape == y_TX.shape
    assert y_TX.is_contiguous()
    num_groups, group_size = weight_NM.shape
    assert num_groups * group_size == width
    assert weight_NM.is_contiguous()
    _check(y_TX, gate_TX, weight_NM)
    if not num_rows or not width:
        return
    _gate_kernel(activation, order)(
        y_TX.data_ptr(),
        gate_TX.data_ptr(),
        gate_TX.stride(0),
        weight_NM.data_ptr(),
        num_rows,
        num_groups,
        group_size,
        1.0 / group_size,
        eps,
        threads=1 if num_rows * width <= SERIAL_VALUES else None,
    )


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.is_cpu
        assert tensor.dtype == torch.float32
        assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1


DELTA_ARGUMENTS: dict[str, Argument] = {
    "f": "float32*",
    "f_row": "int",
    "b": "float32*",
    "b_row": "int",
    "qk": "float32*",
    "qk_row": "int",
    "A": "float32*",
    "bias": "float32*",
    "decay": "float32*",
    "beta": "float32*",
    "scale": "float32*",
    "num_rows": "int",
    "num_decays": "int",
    "num_heads": "int",
    "num_qk": "int",
    "key_dim": "int",
    "bound": "float",
    "beta_scale": "float",
    "norm_eps": "float",
    "query_scale": "float",
}


@cache
def _delta_kernel(is_bounded: bool) -> Kernel:
    def body(task: Task) -> None:
        code = task.code
        with _each_row(task) as row:
            f = task.pointer("f") + row * task.number("f_row")
            b = task.pointer("b") + row * task.number("b_row")
            decay = task.pointer("decay") + row * task.number("num_decays")
            beta = task.pointer("beta") + row * task.number("num_heads")

            def write_decay(strip: Strip, f: Pointer = f, decay: Pointer = decay) -> None:
                A = strip.load(task.pointer("A"))
                biased = strip.load(f) + strip.load(task.pointer("bias"))
                if is_bounded:
                    g = ACTIVATIONS["sigmoid"](code, biased * A) * task.number("bound")
                else:
                    g = -(softplus(code, biased) * A)
                strip.store(decay, exp(code, g))

            def write_beta(strip: Strip, b: Pointer = b, beta: Pointer = beta) -> None:
                value = ACTIVATIONS["sigmoid"](code, strip.load(b))
                strip.store(beta, value * task.number("beta_scale"))

            each_strip(code, 0, task.number("num_decays"), write_decay)
            each_strip(code, 0, task.number("num_heads"), write_beta)
            _write_scales(task, row)

    return Kernel(f"delta_gates{'_bounded' if is_bounded else ''}", DELTA_ARGUMENTS, body)


def _write_scales(task: Task, row: Value) -> None:
    """Write 1 / the norm of every head of q and of k."""
    code, num_qk, key_dim = task.code, task.number("num_qk"), task.number("key_dim")
    scales = task.pointer("scale") + row * num_qk
    with code.loop(0, num_qk) as head:
        x = task.pointer("qk") + (row * task.number("qk_row") + head * key_dim)
        square = sum_of_squares(code, key_dim, lambda strip: strip.load(x))
        scale = code.real(1.0) / code.sqrt(square + task.number("norm_eps"))
        is_query = head < num_qk // 2
        (scales + head).store(code.select(is_query, scale * task.number("query_scale"), scale))


STEP_ARGUMENTS: dict[str, Argument] = {
    "dt": "float32*",
    "dt_row": "int",
    "A": "float32*",
    "bias": "float32*",
    "decay": "float32*",
    "size": "float32*",
    "num_rows": "int",
    "num_heads": "int",
    "least": "float",
    "largest": "float",
}


@cache
def _step_kernel() -> Kernel:
    def body(task: Task) -> None:
        code, num_heads = task.code, task.number("num_heads")
        with _each_row(task) as row:
            dt = task.pointer("dt") + row * task.number("dt_row")
            decay = task.pointer("decay") + row * num_heads
            size = task.pointer("size") + row * num_heads

            def write(
                strip: Strip, dt: Pointer = dt, decay: Pointer = decay, size: Pointer = size
            ) -> None:
                step = softplus(code, strip.load(dt) + strip.load(task.pointer("bias")))
                least, largest = (code.like(step, task.number(x)) for x in ("least", "largest"))
                step = code.select(step < least, least, step)
                step = code.select(step > largest, largest, step)
                strip.store(size, step)
                strip.store(decay, exp(code, -(step * strip.load(task.pointer("A")))))

            each_strip(code, 0, num_heads, write)

    return Kernel("step_sizes", STEP_ARGUMENTS, body)


GATE_ARGUMENTS: dict[str, Argument] = {
    "y": "float32*",
    "gate": "float32*",
    "gate_row": "int",
    "weight": "float32*",
    "num_rows": "int",
    "num_groups": "int",
    "group_size": "int",
    "inverse_size": "float",
    "eps": "float",
}


@cache
def _gate_kernel(activation: Activation, order: Order) -> Kernel:
    activate = ACTIVATIONS[activation]

    def body(task: Task) -> None:
        code, size = task.code, task.number("group_size")
        num_groups = task.number("num_groups")
        with _each_row(task) as row, code.loop(0, num_groups) as group:
            y = task.pointer("y") + (row * num_groups + group) * size
            gate = task.pointer("gate") + (row * task.number("gate_row") + group * size)
            weight = task.pointer("weight") + group * size

            def gated(strip: Strip) -> Value:
                return strip.load(y) * activate(code, strip.load(gate))

            def keep(strip: Strip) -> Value:
                product = gated(strip)
                strip.store(y, product)
                return product

            load = keep if order == "gate_first" else (lambda strip: strip.load(y))
            square = sum_of_squares(code, size, load)
            mean = code.fma(square, task.number("inverse_size"), task.number("eps"))
            scale = code.real(1.0) / code.sqrt(mean)

            def write(strip: Strip) -> None:
                normed = strip.load(y) * scale * strip.load(weight)
                if order == "norm_first":
                    normed = normed * activate(code, strip.load(gate))
                strip.store(y, normed)

            each_strip(code, 0, size, write)

    return Kernel(f"gate_{activation}_{order}", GATE_ARGUMENTS, body)


@contextmanager
def _each_row(task: Task) -> Iterator[Value]:
    """Write the block for every row, UNIT_ROWS to a unit."""
    code, num_rows = task.code, task.number("num_rows")
    with task.units((num_rows + (UNIT_ROWS - 1)) // UNIT_ROWS) as unit:
        first = unit * UNIT_ROWS
        with code.loop(first, code.smaller(first + UNIT_ROWS, num_rows)) as row:
            yield row
