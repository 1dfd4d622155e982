"""Packed linear layers: right, and with rows that depend on nothing but themselves."""

from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from prfaas.engine.linear import (
    MAX_FLOAT16,
    WEIGHT_DTYPES,
    ExactPacking,
    PanelLinear,
    is_exact,
    kv_dtype,
    pack,
)
from prfaas.errors import ConfigError
from tests.engine.places import PLACES, Place

PACKINGS = get_args(ExactPacking)
SHAPES = [(640, 1536), (1024, 640), (64, 512), (96, 20), (64, 1), (72, 4)]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_a_packed_layer_computes_the_product(
    packing: ExactPacking, num_inputs: int, num_outputs: int
) -> None:
    weight = torch.randn(num_outputs, num_inputs) * 0.05
    rows = torch.randn(24, num_inputs)
    expected = F.linear(rows.double(), weight.to(WEIGHT_DTYPES[packing]).double())
    torch.testing.assert_close(pack(weight, packing)(rows).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_bias_is_added_to_the_product(packing: ExactPacking) -> None:
    weight, bias, rows = torch.randn(20, 96), torch.randn(20), torch.randn(24, 96)
    expected = pack(weight, packing)(rows) + bias
    with_bias = pack(weight, packing, bias)
    bias.zero_()  # the caller's again
    assert torch.equal(with_bias(rows), expected)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packed_layer_takes_the_bytes_of_its_weights(packing: ExactPacking) -> None:
    layer = pack(torch.randn(640, 100).bfloat16(), packing)
    assert isinstance(layer, PanelLinear)
    assert layer.panels_QKP.nbytes == 640 * 100 * WEIGHT_DTYPES[packing].itemsize
    assert layer.num_outputs == 640


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("odd", [1e5, -1e5, torch.inf, torch.nan])
def test_a_weight_that_does_not_fit_float16_is_refused(dtype: torch.dtype, odd: float) -> None:
    weight = torch.randn(20, 96).to(dtype)
    weight[19, 95] = odd
    with pytest.raises(ConfigError, match="use --dtype float32"):
        pack(weight, "fma-fp16")
    weight[19, 95] = MAX_FLOAT16 if dtype == torch.float32 else 65280
    assert pack(weight, "fma-fp16")(torch.zeros(1, 96)).isfinite().all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_rows", [1, 3, 24])
@pytest.mark.parametrize("has_bias", [False, True])
def test_torchs_product_is_that_of_rounded_rows_and_weights(
    place: Place, num_rows: int, has_bias: bool
) -> None:
    dtype = WEIGHT_DTYPES[place.packing]
    weight, bias, rows = torch.randn(20, 96), torch.randn(20), torch.randn(num_rows, 96)
    layer = pack(
        weight.to(place.device), place.packing, bias.to(place.device) if has_bias else None
    )
    weight64, bias64, rows64 = (tensor.to(dtype).double() for tensor in (weight, bias, rows))
    expected = F.linear(rows64, weight64, bias64 if has_bias else None)
    ours = layer(rows.to(place.device))
    assert (ours.dtype, ours.device.type) == (torch.float32, place.device)
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def test_only_torchs_own_packings_are_not_exact() -> None:
    assert all(map(is_exact, PACKINGS))
    assert {kv_dtype(packing) for packing in PACKINGS} == {"float32"}
    assert not is_exact("torch-bf16")
    assert not is_exact("torch-f32")
    assert (kv_dtype("torch-bf16"), kv_dtype("torch-f32")) == ("bfloat16", "float32")


@given(data=st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_do_not_depend_on_their_neighbours(packing: ExactPacking, data: st.DataObject) -> None:
    num_inputs, num_outputs = data.draw(st.sampled_from(SHAPES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    bias = torch.randn(num_outputs, generator=generator) if data.draw(st.booleans()) else None
    linear = pack(weight, packing, bias)
    num_rows = data.draw(st.integers(2, 250))
    rows = torch.randn(num_rows, num_inputs, generator=generator)
    cuts = sorted(data.draw(st.sets(st.integers(1, num_rows - 1), max_size=4)))
    whole = linear(rows)
    for start, stop in pairwise([0, *cuts, num_rows]):
        assert torch.equal(linear(rows[start:stop]), whole[start:stop])
