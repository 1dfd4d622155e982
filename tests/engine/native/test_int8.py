"""Bounds from 8 bits a weight: no product of the matrix itself may be outside of them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.native.int8 import (
    INPUTS_AT_ONCE,
    LEVELS,
    MAX_NORM,
    MIN_NORM,
    UNIT_PANELS,
    Int8Panels,
    bounds,
    round_panels,
)
from prfaas.engine.native.product import PANEL_OUTPUTS, pack_panels, product
from tests.engine.native.margins import MARGIN, MARK, guarded

DTYPES = (torch.float16, torch.float32)
LARGEST = {torch.float16: 6e4, torch.float32: 1e13}
SIZES = st.sampled_from([1, 3, 4, 16, 63, 160, 640, 2048])
OUTPUTS = st.sampled_from([1, 15, 16, 17, 48, 320])


def weights_of(seed: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    """Return rows of every magnitude, some zero, some with outliers, some of them denormal."""
    generator = torch.Generator().manual_seed(seed)
    least = -9.0 if dtype == torch.float16 else -44.0
    powers = torch.rand(num_outputs, 1, generator=generator) * (4.0 - least) + least
    weight_NK = torch.randn(num_outputs, num_inputs, generator=generator) * 10.0**powers
    weight_NK[::7, :2] *= 50.0
    weight_NK[3::11] = 0.0
    weight_NK *= torch.rand(weight_NK.shape, generator=generator) > 0.1
    largest = LARGEST[dtype]
    return weight_NK.clamp_(-largest, largest)


def rows_of(seed: int, num_rows: int, num_inputs: int) -> Tensor:
    """Return rows whose norms go from MIN_NORM to MAX_NORM, some with outliers."""
    generator = torch.Generator().manual_seed(seed)
    x_MK = torch.randn(num_rows, num_inputs, generator=generator)
    x_MK[::2, :1] *= 1000.0
    powers = torch.rand(num_rows, 1, generator=generator) * 28.0 - 14.0
    x_MK *= 10.0**powers / x_MK.norm(dim=1, keepdim=True)
    return x_MK


def peaks(products_MN: Tensor) -> Tensor:
    """Return the largest product of each panel, [M, Q]."""
    missing = -products_MN.shape[1] % PANEL_OUTPUTS
    filled = torch.nn.functional.pad(products_MN, (0, missing), value=-torch.inf)
    return filled.view(len(products_MN), -1, PANEL_OUTPUTS).amax(2)


def rounded(weight_NK: Tensor, dtype: torch.dtype) -> Int8Panels:
    return round_panels(pack_panels(weight_NK, dtype), len(weight_NK))


def levels_of(panels: Int8Panels, output: int) -> Tensor:
    """Return one output's weights as the copy has them, [K]."""
    panel, lane = divmod(output, PANEL_OUTPUTS)
    levels = panels.levels_QKP[panel, : panels.num_inputs, lane].double()
    return levels * float(panels.scales_QP[panel, lane])


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    seed=st.integers(0, 1 << 16),
    num_rows=st.integers(1, 9),
    num_inputs=SIZES,
    num_outputs=OUTPUTS,
    threads=st.sampled_from([1, 2, 3]),
    has_equals=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_product_is_out_of_its_bounds(
    dtype: torch.dtype,
    seed: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    threads: int,
    has_equals: bool,
) -> None:
    weight_NK = weights_of(seed, num_outputs, num_inputs, dtype)
    if has_equals:  # so that every output is its panel's largest
        weight_NK = weight_NK[: -(-num_outputs // PANEL_OUTPUTS)].repeat_interleave(
            PANEL_OUTPUTS, 0
        )
        num_outputs = len(weight_NK)
    x_MK = rows_of(seed + 1, num_rows, num_inputs)
    # Rows that look for trouble: along weights, and along what rounding changed in them.
    panels = rounded(weight_NK, dtype)
    for row in range(0, num_rows, 2):
        output = (seed + row) % num_outputs
        change_K = weight_NK[output].to(dtype).double() - levels_of(panels, output)
        wanted_K = change_K if row % 4 else weight_NK[output].double()
        if 0 < wanted_K.norm() < torch.inf:
            x_MK[row] = (wanted_K / wanted_K.norm()).float() * x_MK[row].norm()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = bounds(x_MK, panels)
    finally:
        torch.set_num_threads(before)
    peaks_MQ = peaks(product(x_MK, pack_panels(weight_NK, dtype), num_outputs))
    assert found is not None
    assert (found.floor_M <= peaks_MQ.amax(1).numpy()).all()
    assert (found.upper_MQ >= peaks_MQ.numpy()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_worst_row_nearly_reaches_its_bound(dtype):
    weight_NK = torch.randn(1, 640, generator=torch.Generator().manual_seed(3))
    weight_NK = weight_NK.expand(PANEL_OUTPUTS, -1)
    panels = rounded(weight_NK, dtype)
    change_K = weight_NK[0].to(dtype).double() - levels_of(panels, 0)
    x_MK = (change_K / change_K.norm()).float()[None]
    found = bounds(torch.cat([x_MK, -x_MK]), panels)
    assert found is not None
    exact = float(product(x_MK, pack_panels(weight_NK, dtype), 16)[0, 0])
    room = 0.05 * float(change_K.norm())
    assert exact <= found.upper_MQ[0, 0] <= exact + room
    assert -exact - room <= found.floor_M[1] <= -exact


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 1 << 16), num_inputs=SIZES, num_outputs=OUTPUTS)
@settings(max_examples=20, deadline=None)
def test_the_copy_is_the_weights_to_half_a_level(dtype, seed, num_inputs, num_outputs):
    generator = torch.Generator().manual_seed(seed)
    weight_NK = torch.randn(num_outputs, num_inputs, generator=generator)
    panels = rounded(weight_NK, dtype)
    assert panels.levels_QKP.shape[1] % INPUTS_AT_ONCE == 0
    assert not panels.levels_QKP[:, num_inputs:].any()
    for output in range(num_outputs):
        weight_K = weight_NK[output].to(dtype).double()
        scale = float(weight_K.abs().max()) / LEVELS
        change_K = (weight_K - levels_of(panels, output)).abs()
        assert change_K.max() <= 0.5001 * scale
        error = panels.errors_QP.view(-1)[output]
        assert change_K.norm() <= error <= change_K.norm() * 1.01 + weight_K.norm() * 1e-3


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_an_output_of_which_nothing_is_known_may_be_anything(odd):
    weight_NK = torch.randn(40, 24)
    weight_NK[20, 5] = odd
    panels = rounded(weight_NK, torch.float32)
    found = bounds(torch.randn(3, 24), panels)
    assert found is not None
    assert np.isposinf(found.upper_MQ[:, 1]).all()
    assert np.isfinite(found.upper_MQ[:, 0]).all()
    assert np.isfinite(found.floor_M).all()


@pytest.mark.parametrize("norm", [0.0, MIN_NORM / 2, MAX_NORM * 2, torch.nan, torch.inf])
def test_rows_out_of_range_have_no_bounds(norm):
    panels = rounded(torch.randn(16, 8), torch.float16)
    x_MK = torch.eye(8)[:3]
    x_MK[1, 1] = norm
    assert bounds(x_MK, panels) is None


@pytest.mark.parametrize("num_inputs", [1, 7, 64, 640])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7])
def test_nothing_beyond_the_tensors_is_read(num_rows, num_inputs):
    weight_NK = torch.randn(37, num_inputs)
    with guarded(pack_panels(weight_NK, torch.float16)) as (panels_QKP,):
        panels = round_panels(panels_QKP, 37)
    held = (
        panels.levels_QKP,
        panels.scales_QP,
        panels.errors_QP,
        torch.randn(num_rows, num_inputs),
    )
    plain = bounds(held[-1], panels)
    with guarded(*held) as (levels_QKP, scales_QP, errors_QP, x_MK):
        copy = replace(panels, levels_QKP=levels_QKP, scales_QP=scales_QP, errors_QP=errors_QP)
        found = bounds(x_MK, copy)
    assert plain is not None
    assert found is not None
    assert np.array_equal(found.floor_M, plain.floor_M)
    assert np.array_equal(found.upper_MQ, plain.upper_MQ)


@pytest.mark.parametrize("num_panels", [1, UNIT_PANELS, UNIT_PANELS + 3])
@pytest.mark.parametrize("num_rows", [1, 3, 6])
def test_nothing_beside_the_results_is_written(monkeypatch, num_rows, num_panels):
    panels = rounded(torch.randn(PANEL_OUTPUTS * num_panels, 20), torch.float16)
    x_MK = torch.randn(num_rows, 20)
    plain = bounds(x_MK, panels)
    assert plain is not None
    empty, rooms = np.empty, []

    def with_margins(shape, dtype):
        size = math.prod(shape)
        rooms.append(empty(size + 2 * MARGIN, dtype))
        rooms[-1][:] = MARK
        return rooms[-1][MARGIN:-MARGIN].reshape(shape)

    monkeypatch.setattr(np, "empty", with_margins)
    found = bounds(x_MK, panels)
    assert found is not None
    assert np.array_equal(found.upper_MQ, plain.upper_MQ)
    assert len(rooms) == 2
    for room in rooms:
        assert (room[:MARGIN] == MARK).all()
        assert (room[-MARGIN:] == MARK).all()
