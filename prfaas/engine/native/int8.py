"""A copy of a matrix in 8 bits, and bounds of the matrix's own products from it.

For each output w the copy holds integers q, a scale s and an error e. For a float32 row x,

    |fma chain of w and x  -  s * (float32 product of q and x)|  <=  e |x|

holds after every rounding on both sides: e is |w - s q|, known from the weights, and ROUNDINGS of
s (|q| + |w / s - q| + 1) for the float32 operations. So one reading of a byte a weight bounds what the
matrix itself would give, however unlucky the row.

Shapes: M rows, K inputs, Q panels of P = PANEL_OUTPUTS outputs, U units of work.
"""

import math
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from prfaas.engine.native.code import Code, Pointer, Value
from prfaas.engine.native.kernel import Argument, Kernel, Task
from prfaas.engine.native.product import PANEL_OUTPUTS, SERIAL_PRODUCTS

LEVELS = 127
MIN_PEAK = 1e-12
"""Of weights that are less, all roundings together are less than the 1 in the error's formula."""
MAX_ERROR = 1e12
"""An output with more, or with weights that are not finite, is bounded by nothing."""
MIN_NORM, MAX_NORM = 1e-15, 1e15
"""Of rows for which no float32 of the products, or of the matrix's own, leaves the normal range."""
INPUTS_AT_ONCE = 4
"""A cache line of a panel."""
STRIP_ROWS = (4, 2, 1)
"""With the panel's outputs and, for fewer rows, 2 or 4 inputs at once: 8 sums of 8 lanes."""
PREFETCH_BYTES = 4096
UNIT_PANELS = 16

Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Panels:
    """The copy, in the order in which it is read."""

    levels_QKP: Tensor
    """int8; K filled up with zeros to a multiple of INPUTS_AT_ONCE."""
    scales_QP: Tensor
    errors_QP: Tensor
    """Infinite where nothing is known, as for the outputs that fill up the last panel."""
    num_inputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the products of rows may be."""

    floor_M: Float32s
    """A row's largest product is not less."""
    upper_MQ: Float32s
    """Nor is one of a panel's outputs more."""


def rounding_fraction(num_inputs: int) -> float:
    """Return a bound of all float32 roundings, as a fraction of s (|q| + |w / s - q| + 1) |x|.

    In units of 2**-24, K inputs, first order: the matrix's chain K, that of q and its partial sums
    K + 3, of w / s and of its difference from q 4, the norm of this difference K / 2 + 4, s times the
    product, the error's own formula and the two bounds 8.
    """
    return (3 * num_inputs + 64) * 2.0**-24


def round_panels(panels_QKP: Tensor, num_outputs: int) -> Int8Panels:
    """Return the copy of a matrix's float16 or float32 panels."""
    num_panels, num_inputs, num_lanes = panels_QKP.shape
    assert num_lanes == PANEL_OUTPUTS
    assert panels_QKP.is_contiguous()
    assert panels_QKP.is_cpu
    padded = -(-num_inputs // INPUTS_AT_ONCE) * INPUTS_AT_ONCE
    levels_QKP = torch.empty(num_panels, padded, num_lanes, dtype=torch.int8)
    levels_QKP[:, num_inputs:] = 0
    scales_QP, errors_QP = torch.empty(2, num_panels, num_lanes)
    _rounding_kernel(panels_QKP.dtype)(
        panels_QKP.data_ptr(),
        levels_QKP.data_ptr(),
        scales_QP.data_ptr(),
        errors_QP.data_ptr(),
        num_panels,
        num_inputs,
        padded,
        rounding_fraction(num_inputs),
    )
    errors_QP.view(-1)[num_outputs:] = torch.inf
    is_unknown_QP = ~(errors_QP < MAX_ERROR)
    errors_QP[is_unknown_QP] = torch.inf
    scales_QP[is_unknown_QP] = 0.0
    return Int8Panels(
        levels_QKP=levels_QKP, scales_QP=scales_QP, errors_QP=errors_QP, num_inputs=num_inputs
    )


def bounds(x_MK: Tensor, panels: Int8Panels) -> Bounds | None:
    """Return bounds of the matrix's products with float32 rows; None: a row is out of range.

    That is, its norm is not from MIN_NORM to MAX_NORM, or no number.
    """
    num_rows, num_inputs = x_MK.shape
    num_panels, padded, _ = panels.levels_QKP.shape
    assert num_inputs == panels.num_inputs
    assert x_MK.dtype == torch.float32
    assert x_MK.is_cpu
    if num_inputs < padded:
        x_MK = F.pad(x_MK, (0, padded - num_inputs))
    x = np.ascontiguousarray(x_MK.numpy())
    wide = x.astype(np.float64)
    norms_M = np.sqrt(np.einsum("mk,mk->m", wide, wide))
    if not all(MIN_NORM <= norm <= MAX_NORM for norm in norms_M.tolist()):
        return None
    norms_M = norms_M.astype(np.float32)
    # Of numpy's memory: torch's is new each time, and writing its pages first costs more than all this.
    lower_MU = np.empty((num_rows, -(-num_panels // UNIT_PANELS)), np.float32)
    upper_MQ = np.empty((num_rows, num_panels), np.float32)
    is_small = num_rows * panels.levels_QKP.numel() < SERIAL_PRODUCTS
    _bounding(
        x.ctypes.data,
        norms_M.ctypes.data,
        panels.levels_QKP.data_ptr(),
        panels.scales_QP.data_ptr(),
        panels.errors_QP.data_ptr(),
        lower_MU.ctypes.data,
        upper_MQ.ctypes.data,
        num_rows,
        padded,
        num_panels,
        threads=1 if is_small else None,
    )
    return Bounds(floor_M=lower_MU.max(axis=1), upper_MQ=upper_MQ)


@cache
def _rounding_kernel(dtype: torch.dtype) -> Kernel:
    weight: Argument = "float16*" if dtype == torch.float16 else "float32*"
    assert dtype in (torch.float16, torch.float32)
    arguments: dict[str, Argument] = {
        "panels": weight,
        "levels": "int8*",
        "scales": "float32*",
        "errors": "float32*",
        "num_panels": "int",
        "num_inputs": "int",
        "padded_inputs": "int",
        "roundings": "float",
    }
    return Kernel(f"round_{weight[:-1]}", arguments, _write_rounding)


def _write_rounding(task: Task) -> None:
    code, lanes = task.code, PANEL_OUTPUTS
    num_inputs, padded = task.number("num_inputs"), task.number("padded_inputs")
    with task.units(task.number("num_panels")) as panel:
        weights = task.pointer("panels") + panel * num_inputs * lanes
        levels = task.pointer("levels") + panel * padded * lanes
        peak = code.variable(code.real(MIN_PEAK, lanes))
        with code.loop(0, num_inputs) as k:
            weight = (weights + k * lanes).load(lanes)
            peak.set(code.maximum(code.absolute(weight), peak.value))
        inverse = code.real(LEVELS, lanes) / peak.value
        levels_squared, rests_squared = (code.variable(code.real(0.0, lanes)) for _ in range(2))
        with code.loop(0, num_inputs) as k:
            ratio = (weights + k * lanes).load(lanes) * inverse
            level = code.minimum(code.maximum(code.round(ratio), -LEVELS), LEVELS)
            rest = ratio - level
            levels_squared.set(code.fma(level, level, levels_squared.value))
            rests_squared.set(code.fma(rest, rest, rests_squared.value))
            (levels + k * lanes).store(code.narrow(code.to_int32(level)))
        rests = code.sqrt(rests_squared.value)
        whole = code.sqrt(levels_squared.value) + rests + 1.0
        scale = peak.value / LEVELS
        roundings = code.splat(task.number("roundings"), lanes)
        (task.pointer("scales") + panel * lanes).store(scale)
        (task.pointer("errors") + panel * lanes).store(scale * code.fma(roundings, whole, rests))


def _write_bounding(task: Task) -> None:
    code = task.code
    num_rows, num_inputs = task.number("num_rows"), task.number("num_inputs")
    num_panels = task.number("num_panels")
    floats: list[Argument] = ["float32*", "float32*"]
    kinds: list[Argument] = [*floats, "int8*", *floats, *floats, "int", "int", "int"]
    strips = {
        rows: task.function(f"strip_{rows}", kinds, partial(_write_strip, rows=rows))
        for rows in STRIP_ROWS
    }
    num_units = (num_panels + (UNIT_PANELS - 1)) // UNIT_PANELS
    with task.units(num_units) as unit:
        first = unit * UNIT_PANELS
        lower = task.pointer("lower") + unit
        with code.loop(0, num_rows) as row:
            (lower + row * num_units).store(code.real(-math.inf))
        with code.loop(first, code.smaller(num_panels, first + UNIT_PANELS)) as panel:
            next_row = code.variable(code.whole(0))
            for rows, strip in strips.items():
                with code.loop(next_row.value, num_rows - (rows - 1), rows) as start:
                    code.call(
                        strip,
                        task.pointer("x") + start * num_inputs,
                        task.pointer("norms") + start,
                        task.pointer("levels") + panel * num_inputs * PANEL_OUTPUTS,
                        task.pointer("scales") + panel * PANEL_OUTPUTS,
                        task.pointer("errors") + panel * PANEL_OUTPUTS,
                        lower + start * num_units,
                        task.pointer("upper") + (start * num_panels + panel),
                        num_inputs,
                        num_panels,
                        num_units,
                    )
                    next_row.set(start + rows)


def _write_strip(
    code: Code,
    x: Pointer,
    norms: Pointer,
    levels: Pointer,
    scales: Pointer,
    errors: Pointer,
    lower: Pointer,
    upper: Pointer,
    num_inputs: Value,
    num_panels: Value,
    num_units: Value,
    *,
    rows: int,
) -> None:
    """Write the bounds of some rows and one panel."""
    lanes, phases = PANEL_OUTPUTS, INPUTS_AT_ONCE // rows
    sums = [[code.variable(code.real(0.0, lanes)) for _ in range(phases)] for _ in range(rows)]
    with code.loop(0, num_inputs, INPUTS_AT_ONCE) as start:
        line = levels + start * lanes
        (line + PREFETCH_BYTES).prefetch()
        for k in range(INPUTS_AT_ONCE):
            level = (line + k * lanes).load(lanes)
            for row, partial_sums in enumerate(sums):
                value = code.splat((x + num_inputs * row + start + k).load(), lanes)
                partial_sum = partial_sums[k % phases]
                partial_sum.set(code.fma(value, level, partial_sum.value))
    scale, error = scales.load(lanes), errors.load(lanes)
    for row, partial_sums in enumerate(sums):
        total = partial_sums[0].value
        for partial_sum in partial_sums[1:]:
            total = total + partial_sum.value
        product, norm = scale * total, code.splat((norms + row).load(), lanes)
        low = _largest(code, code.fma(-error, norm, product))
        place = lower + num_units * row
        place.store(code.select(low > place.load(), low, place.load()))
        high = _largest(code, code.fma(error, norm, product))
        (upper + num_panels * row).store(high)


def _largest(code: Code, vector: Value) -> Value:
    """Return the largest lane; none is a NaN."""
    lanes = vector.lanes
    while lanes > 1:
        lanes //= 2
        other = code.shuffle(vector, vector, range(lanes, 2 * lanes))
        vector = code.shuffle(vector, vector, range(lanes))
        vector = code.select(vector > other, vector, other)
    return code.lane(vector, 0)


_bounding = Kernel(
    "bound",
    {
        "x": "float32*",
        "norms": "float32*",
        "levels": "int8*",
        "scales": "float32*",
        "errors": "float32*",
        "lower": "float32*",
        "upper": "float32*",
        "num_rows": "int",
        "num_inputs": "int",
        "num_panels": "int",
    },
    _write_bounding,
)
