"""Packed linear layers: right, and with rows that depend on nothing but themselves."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from prfaas.engine.linear import (
    SHARD_OUTPUTS,
    TORCH_DTYPES,
    Packing,
    is_available,
    is_exact,
    kv_dtype,
    pack,
    padded_rows,
)
from tests.engine.places import PLACES, Place

PACKINGS: tuple[Packing, ...] = ("fbgemm-fp16", "onednn-f32", "padded-f32")
SHAPES = [(640, 1536), (1024, 640), (64, 512), (96, 20), (64, 1), (72, 4)]


@pytest.fixture(params=PACKINGS)
def packing(request: pytest.FixtureRequest) -> Packing:
    name: Packing = request.param
    if not is_available(name):
        pytest.skip(f"this build of torch does not compute {name}")
    return name


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_a_packed_layer_computes_the_product(
    packing: Packing, num_inputs: int, num_outputs: int
) -> None:
    weight = torch.randn(num_outputs, num_inputs) * 0.05
    rows = torch.randn(24, num_inputs)
    exact = weight.half().double() if packing == "fbgemm-fp16" else weight.double()
    expected = F.linear(rows.double(), exact)
    torch.testing.assert_close(pack(weight, packing)(rows).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_bias_is_added_to_the_product(packing: Packing) -> None:
    weight, bias, rows = torch.randn(20, 96), torch.randn(20), torch.randn(24, 96)
    expected = pack(weight, packing)(rows) + bias
    with_bias = pack(weight, packing, bias)
    bias.zero_()  # the caller's again
    assert torch.equal(with_bias(rows), expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_rows", [1, 3, 24])
@pytest.mark.parametrize("has_bias", [False, True])
def test_torchs_product_is_that_of_rounded_rows_and_weights(
    place: Place, num_rows: int, has_bias: bool
) -> None:
    dtype = TORCH_DTYPES[place.packing]
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
    assert padded_rows(num_rows, place.packing) == num_rows


def test_only_torchs_own_packings_are_not_exact() -> None:
    assert all(map(is_exact, PACKINGS))
    assert {kv_dtype(packing) for packing in PACKINGS} == {"float32"}
    assert not is_exact("torch-bf16")
    assert not is_exact("torch-f32")
    assert (kv_dtype("torch-bf16"), kv_dtype("torch-f32")) == ("bfloat16", "float32")


def test_a_head_of_several_shards_equals_its_rows_packed_alone() -> None:
    if not is_available("fbgemm-fp16"):
        pytest.skip("this build of torch has no fbgemm")
    weight = torch.randn(2 * SHARD_OUTPUTS + 7, 64)
    rows = torch.randn(6, 64)
    whole = pack(weight, "fbgemm-fp16")(rows)
    tail = pack(weight[2 * SHARD_OUTPUTS :], "fbgemm-fp16")(rows)
    assert torch.equal(whole[:, 2 * SHARD_OUTPUTS :], tail)
    torch.testing.assert_close(whole, rows @ weight.T, rtol=0.01, atol=0.05)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("packing_name", PACKINGS)
def test_rows_do_not_depend_on_their_neighbours(packing_name: Packing, data: st.DataObject) -> None:
    if not is_available(packing_name):
        pytest.skip(f"this build of torch does not compute {packing_name}")
    num_inputs, num_outputs = data.draw(st.sampled_from(SHAPES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    bias = torch.randn(num_outputs, generator=generator) if data.draw(st.booleans()) else None
    linear = pack(weight, packing_name, bias)
    num_rows = data.draw(st.integers(2, 250))
    rows = torch.randn(padded_rows(num_rows, packing_name), num_inputs, generator=generator)
    cuts = sorted(data.draw(st.sets(st.integers(1, num_rows - 1), max_size=4)))
    whole = linear(rows)
    for start, stop in pairwise([0, *cuts, num_rows]):
        piece = torch.zeros(padded_rows(stop - start, packing_name), num_inputs)
        piece[: stop - start] = rows[start:stop]
        assert torch.equal(linear(piece)[: stop - start], whole[start:stop])


@given(num_rows=st.integers(1, 10_000))
@pytest.mark.parametrize("packing_name", PACKINGS)
def test_padding_is_small_and_done_once(packing_name: Packing, num_rows: int) -> None:
    padded = padded_rows(num_rows, packing_name)
    assert num_rows <= padded < num_rows + 8
    assert padded_rows(padded, packing_name) == padded


def test_a_packing_that_torch_does_not_know_is_not_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no engine")

    monkeypatch.setattr(torch.ops.quantized, "linear_prepack_fp16", refuse)
    assert not is_available("fbgemm-fp16")
