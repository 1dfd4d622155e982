"""The product of rows and a weight matrix, each output one chain of fused multiply-adds.

y[m, n] starts at 0 and takes x[m, k] * weight[n, k] for k = 0, 1, ..., rounded once each. That is all
that decides its bits: not the rows beside it, the tile it is computed in, the thread or the machine.

The weights lie in panels of PANEL_OUTPUTS outputs: an output is a lane of a vector, and panels are
read from the first byte to the last. A strip is a few rows and some panels; it is computed in tiles
of as many panels as registers hold sums for.

Shapes: M rows, K inputs, N outputs, Q panels, P outputs of a panel.
"""

from collections.abc import Iterable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from prfaas.engine.native.code import ELEMENT_BYTES, Code, Pointer, Value, Variable
from prfaas.engine.native.kernel import Argument, Kernel, Task, address
from prfaas.engine.native.machine import vector_lanes

PANEL_OUTPUTS = 16
SQUARE = 8
"""Rows and columns that are packed at once."""
PREFETCH_BYTES = 512
"""How far ahead of the sums panels are fetched: without it memory gives two thirds of its rate."""
BLOCK_ROWS = 192
"""Rows that stay in the second cache while panels pass. To cut the inputs, too, is no faster, even of
16,384: a tile needs a new cache line of weights every third or sixth cycle, which any cache brings."""
MAX_UNIT_PANELS = 32
SERIAL_PRODUCTS = 1 << 18
"""Fewer are done before another thread has woken up."""
ELEMENTS: dict[torch.dtype, Argument] = {
    torch.bfloat16: "bfloat16*",
    torch.float16: "float16*",
    torch.float32: "float32*",
}


def pack_panels(weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights as `dtype` in panels, [Q, K, P], the last filled up with zeros.

    Args:
        weight_NK: of any float dtype; K is at least 1.
        dtype: float16 or float32.
    """
    num_outputs, num_inputs = weight_NK.shape
    assert num_inputs > 0
    assert weight_NK.is_cpu
    if weight_NK.dtype not in ELEMENTS:
        weight_NK = weight_NK.float()
    if weight_NK.stride(1) != 1:
        weight_NK = weight_NK.contiguous()
    num_whole, num_left = divmod(num_outputs, PANEL_OUTPUTS)
    panels_QKP = torch.empty(num_whole + bool(num_left), num_inputs, PANEL_OUTPUTS, dtype=dtype)
    kernel = _packing_kernel(weight_NK.dtype, dtype)
    kernel(address(weight_NK), weight_NK.stride(0), address(panels_QKP), num_inputs, num_whole)
    if num_left:
        last_PK = weight_NK.new_zeros(PANEL_OUTPUTS, num_inputs)
        last_PK[:num_left] = weight_NK[-num_left:]
        kernel(address(last_PK), num_inputs, address(panels_QKP[-1]), num_inputs, 1)
    return panels_QKP


def product(x_MK: Tensor, panels_QKP: Tensor, num_outputs: int) -> Tensor:
    """Return x @ weight.T as new float32 memory, [M, N].

    Args:
        x_MK: float32, of any stride between rows.
        panels_QKP: as `pack_panels` returns them.
        num_outputs: N, which ends in the last panel.
    """
    num_rows, num_inputs = x_MK.shape
    num_panels, panel_inputs, panel_outputs = panels_QKP.shape
    assert x_MK.dtype == torch.float32
    assert x_MK.is_cpu
    assert panels_QKP.is_contiguous()
    assert (num_inputs, PANEL_OUTPUTS) == (panel_inputs, panel_outputs)
    assert num_panels == -(-num_outputs // PANEL_OUTPUTS)
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    y_MN = torch.empty(num_rows, num_panels * PANEL_OUTPUTS)
    _multiply(x_MK, (x_MK.stride(0), 0), panels_QKP, y_MN, num_rows, 1, num_inputs, num_panels)
    if num_outputs % PANEL_OUTPUTS:
        return y_MN[:, :num_outputs].contiguous()
    return y_MN


def product_by_head(x_MHK: Tensor, panels_HQKP: Tensor, num_outputs: int) -> Tensor:
    """Return each head's product with its own weights as new float32 memory, [M, H, N].

    The bits are those of `product` head by head.

    Args:
        x_MHK: float32, of any strides between rows and heads.
        panels_HQKP: what `pack_panels` returns of each head's weights.
        num_outputs: N, which ends in the last panel.
    """
    num_rows, num_heads, num_inputs = x_MHK.shape
    num_panels = panels_HQKP.shape[1]
    assert x_MHK.dtype == torch.float32
    assert x_MHK.is_cpu
    assert panels_HQKP.is_contiguous()
    assert panels_HQKP.shape == (num_heads, num_panels, num_inputs, PANEL_OUTPUTS)
    assert num_panels == -(-num_outputs // PANEL_OUTPUTS)
    if x_MHK.stride(2) != 1:
        x_MHK = x_MHK.contiguous()
    row_stride, head_stride, _ = x_MHK.stride()
    y_MHN = torch.empty(num_rows, num_heads, num_panels * PANEL_OUTPUTS)
    strides = (row_stride, head_stride)
    _multiply(x_MHK, strides, panels_HQKP, y_MHN, num_rows, num_heads, num_inputs, num_panels)
    if num_outputs % PANEL_OUTPUTS:
        return y_MHN[..., :num_outputs].contiguous()
    return y_MHN


def _multiply(
    x: Tensor,
    strides: tuple[int, int],
    panels: Tensor,
    y: Tensor,
    num_rows: int,
    num_heads: int,
    num_inputs: int,
    num_panels: int,
) -> None:
    is_small = num_rows * panels.numel() < SERIAL_PRODUCTS
    threads = 1 if is_small else torch.get_num_threads()
    _product_kernel(panels.dtype, vector_lanes())(
        x.data_ptr(),
        *strides,
        panels.data_ptr(),
        y.data_ptr(),
        num_rows,
        num_heads,
        num_inputs,
        num_panels,
        min(max(num_panels // (8 * threads) & -4, 4), MAX_UNIT_PANELS),
        threads=threads,
    )


@cache
def _packing_kernel(stored: torch.dtype, dtype: torch.dtype) -> Kernel:
    arguments: dict[str, Argument] = {
        "weights": ELEMENTS[stored],
        "stride": "int",
        "panels": ELEMENTS[dtype],
        "num_inputs": "int",
        "num_panels": "int",
    }
    return Kernel("pack_panels", arguments, _write_packing)


def _write_packing(task: Task) -> None:
    code, stride, num_inputs = task.code, task.number("stride"), task.number("num_inputs")
    with task.units(task.number("num_panels")) as panel:
        first = task.pointer("weights") + panel * PANEL_OUTPUTS * stride
        rows = [first + stride * row for row in range(PANEL_OUTPUTS)]
        out = task.pointer("panels") + panel * PANEL_OUTPUTS * num_inputs
        with code.loop(0, num_inputs - (SQUARE - 1), SQUARE) as k:
            for half in range(0, PANEL_OUTPUTS, SQUARE):
                square = [(row + k).load(SQUARE) for row in rows[half : half + SQUARE]]
                for number, column in enumerate(code.transposed(square)):
                    (out + ((k + number) * PANEL_OUTPUTS + half)).store(column)
        with code.loop(num_inputs - num_inputs % SQUARE, num_inputs) as k:
            (out + k * PANEL_OUTPUTS).store(code.vector([(row + k).load() for row in rows]))


@cache
def _product_kernel(dtype: torch.dtype, lanes: int) -> Kernel:
    arguments: dict[str, Argument] = {
        "x": "float32*",
        "x_stride": "int",
        "x_head": "int",
        "panels": ELEMENTS[dtype],
        "y": "float32*",
        "num_rows": "int",
        "num_heads": "int",
        "num_inputs": "int",
        "num_panels": "int",
        "unit_panels": "int",
    }
    write = partial(_write_product, lanes=lanes, weight=ELEMENTS[dtype])
    return Kernel("product", arguments, write)


def _write_product(task: Task, *, lanes: int, weight: Argument) -> None:
    """A unit is a block of rows and some panels of a head."""
    code = task.code
    num_rows, num_inputs = task.number("num_rows"), task.number("num_inputs")
    num_panels, unit_panels = task.number("num_panels"), task.number("unit_panels")
    x_stride = task.number("x_stride")
    max_rows = 6 if lanes == 8 else 12  # registers for two panels' sums of these, or one's
    arguments: list[Argument] = ["float32*", "int", "int", weight, "float32*", "int", "int"]
    strips = [
        task.function(f"strip_{rows}", arguments, partial(_write_strip, rows=rows, lanes=lanes))
        for rows in range(1, max_rows + 1)
    ]
    num_heads, panel_stride = task.number("num_heads"), num_inputs * PANEL_OUTPUTS
    y_stride = num_heads * num_panels * PANEL_OUTPUTS
    panel_units = (num_panels + (unit_panels - 1)) // unit_panels
    num_blocks = (num_rows + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    head_units = panel_units * num_blocks
    with task.units(head_units * num_heads) as number:
        head, unit = number // head_units, number % head_units
        head_x, head_panel = task.pointer("x") + head * task.number("x_head"), head * num_panels
        first_row = unit // panel_units * BLOCK_ROWS
        first_panel = unit % panel_units * unit_panels
        rows = code.smaller(num_rows - first_row, BLOCK_ROWS)
        end_panel = code.smaller(num_panels, first_panel + unit_panels)
        num_strips = (rows + (max_rows - 1)) // max_rows
        # Several strips of rows take one tile of panels in turn, which the first of them fetches.
        width = code.select(num_strips.equals(1), unit_panels, _tile_panels(max_rows, lanes))
        with code.loop(first_panel, end_panel, width) as panel:
            panels = task.pointer("panels") + (head_panel + panel) * panel_stride
            some = code.smaller(end_panel - panel, width)
            with code.loop(0, num_strips) as strip:
                start = strip * rows // num_strips
                size = (strip + 1) * rows // num_strips - start
                row = first_row + start
                x = head_x + row * x_stride
                y = task.pointer("y") + (row * y_stride + (head_panel + panel) * PANEL_OUTPUTS)
                for strip_rows, function in enumerate(strips, 1):
                    with code.when(size.equals(strip_rows)):
                        code.call(function, x, x_stride, num_inputs, panels, y, y_stride, some)


def _tile_panels(rows: int, lanes: int) -> int:
    """Return how many panels at once have enough sums to hide the latency, and not too many."""
    most = 12 if lanes == 8 else 24
    return max(p for p in (1, 2, 4) if p == 1 or rows * p * PANEL_OUTPUTS <= most * lanes)


def _write_strip(
    code: Code,
    x: Pointer,
    x_stride: Value,
    num_inputs: Value,
    panels: Pointer,
    y: Pointer,
    y_stride: Value,
    num_panels: Value,
    *,
    rows: int,
    lanes: int,
) -> None:
    """Write the product of `rows` rows and some panels."""
    row_starts = [x + x_stride * row for row in range(rows)]

    def write_tile(panel: Value, width: int) -> None:
        starts = [panels + (panel + next_) * num_inputs * PANEL_OUTPUTS for next_ in range(width)]
        for row, sums in enumerate(_sums_of_tile(code, row_starts, starts, num_inputs, lanes)):
            place = y + (y_stride * row + panel * PANEL_OUTPUTS)
            for number, total in enumerate(sums):
                (place + number * lanes).store(total.value)

    width = _tile_panels(rows, lanes)
    with code.loop(0, num_panels - (width - 1), width) as panel:
        write_tile(panel, width)
    if width > 1:
        with code.loop(num_panels - num_panels % width, num_panels) as panel:
            write_tile(panel, 1)


def _sums_of_tile(
    code: Code,
    row_starts: Sequence[Pointer],
    panel_starts: Sequence[Pointer],
    num_inputs: Value,
    lanes: int,
) -> list[list[Variable]]:
    """Return the vectors of outputs of each row."""
    parts = range(0, PANEL_OUTPUTS, lanes)
    zero = code.real(0.0, lanes)
    sums = [[code.variable(zero) for _ in panel_starts for _ in parts] for _ in row_starts]
    with code.loop(0, num_inputs) as k:
        places = [start + k * PANEL_OUTPUTS for start in panel_starts]
        for place in places:
            (place + PREFETCH_BYTES // ELEMENT_BYTES[place.element]).prefetch()
        values = (code.splat((row_start + k).load(), lanes) for row_start in row_starts)
        weights = ((place + part).load(lanes) for place in places for part in parts)
        # Registers hold the weights of one panel, or the values for several; the others pass.
        if len(panel_starts) == 1:
            _add_products(code, values, list(weights), sums)
        else:
            _add_products(
                code, weights, list(values), [list(each) for each in zip(*sums, strict=True)]
            )
    return sums


def _add_products(
    code: Code,
    passing: Iterable[Value],
    held: Sequence[Value],
    sums: Sequence[Sequence[Variable]],
) -> None:
    for one, totals in zip(passing, sums, strict=True):
        for other, total in zip(held, totals, strict=True):
            total.set(code.fma(one, other, total.value))
