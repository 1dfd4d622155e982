"""The product against chains of fused multiply-adds from elsewhere, and the bits of every cut."""

import ctypes
import ctypes.util
import mmap
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.native import product as product_module
from prfaas.engine.native.product import (
    BLOCK_ROWS,
    PANEL_OUTPUTS,
    pack_panels,
    product,
    product_by_head,
)

DTYPES = (torch.float16, torch.float32)
SIZES = st.sampled_from([1, 2, 7, 16, 31, 96, 576, 640, 2048])
OUTPUTS = st.sampled_from([1, 8, 15, 16, 17, 24, 64, 80, 300, 576])
ROWS = st.one_of(st.integers(1, 30), st.integers(31, BLOCK_ROWS + 20))


fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
"""a * b + c in float32, rounded once, by the C library."""
fmaf.restype = ctypes.c_float
fmaf.argtypes = [ctypes.c_float] * 3


def chains(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return the product, one output after another."""
    y_MN = torch.zeros(len(x_MK), len(weight_NK))
    for m, x_K in enumerate(x_MK.tolist()):
        for n, weight_K in enumerate(weight_NK.float().tolist()):
            total = 0.0
            for x, weight in zip(x_K, weight_K, strict=True):
                total = fmaf(x, weight, total)
            y_MN[m, n] = total
    return y_MN


def drawn(data: st.DataObject, *shape: int) -> Tensor:
    """Return numbers of several magnitudes, some of them 0."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    magnitudes = 10.0 ** torch.randint(-4, 2, shape, generator=generator)
    numbers = torch.randn(shape, generator=generator) * magnitudes
    return numbers * (torch.rand(shape, generator=generator) > 0.1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    data=st.data(),
    num_rows=st.integers(1, 14),
    num_inputs=st.integers(1, 20),
    num_outputs=st.integers(1, 40),
)
@settings(max_examples=25, deadline=None)
def test_every_output_is_one_chain_in_ascending_order_of_inputs(
    dtype: torch.dtype, data: st.DataObject, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    x_MK, weight_NK = drawn(data, num_rows, num_inputs), drawn(data, num_outputs, num_inputs)
    ours = product(x_MK, pack_panels(weight_NK, dtype), num_outputs)
    assert same_bits(ours, chains(x_MK, weight_NK.to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data(), num_rows=ROWS, num_inputs=SIZES, num_outputs=OUTPUTS)
@settings(max_examples=40, deadline=None)
def test_bits_do_not_depend_on_cuts_threads_strides_or_vectors(
    dtype: torch.dtype, data: st.DataObject, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    x_MK, weight_NK = drawn(data, num_rows, num_inputs), drawn(data, num_outputs, num_inputs)
    panels_QKP = pack_panels(weight_NK, dtype)
    whole = product(x_MK, panels_QKP, num_outputs)
    assert whole.is_contiguous()
    assert whole.shape == (num_rows, num_outputs)
    cuts = sorted(data.draw(st.sets(st.integers(0, num_rows), max_size=4)))
    spaced_MK = torch.full((num_rows, num_inputs + data.draw(st.integers(0, 5))), torch.nan)
    spaced_MK = spaced_MK[:, :num_inputs].copy_(x_MK)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.integers(1, 3)))
        with pytest.MonkeyPatch.context() as patch:
            if data.draw(st.booleans()):
                patch.setattr(product_module, "vector_lanes", lambda: 16)
            patch.setattr(
                product_module, "SERIAL_PRODUCTS", data.draw(st.sampled_from([0, 1 << 18]))
            )
            pieces = [
                product(spaced_MK[start:stop], panels_QKP, num_outputs)
                for start, stop in pairwise([0, *cuts, num_rows])
            ]
    finally:
        torch.set_num_threads(before)
    assert same_bits(torch.cat(pieces), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(640, 4096), (2048, 640), (7, 33)])
@pytest.mark.parametrize("num_rows", [1, 5, 130])
def test_the_product_is_that_of_float64_within_rounding(
    dtype: torch.dtype, num_inputs: int, num_outputs: int, num_rows: int
) -> None:
    x_MK, weight_NK = torch.randn(num_rows, num_inputs), torch.randn(num_outputs, num_inputs)
    ours = product(x_MK, pack_panels(weight_NK, dtype), num_outputs).double()
    weight_NK = weight_NK.to(dtype).double()
    sizes = x_MK.double().abs() @ weight_NK.abs().T
    difference = (ours - x_MK.double() @ weight_NK.T).abs()
    assert bool((difference <= sizes * num_inputs * 2.0**-24).all())


def test_fbgemm_has_the_same_bits_where_it_is() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this build of torch has no fbgemm")
    x_MK, weight_NK = torch.randn(6, 640), torch.randn(1024, 640)
    packed = torch.ops.quantized.linear_prepack_fp16(weight_NK, None)
    expected = torch.ops.quantized.linear_dynamic_fp16(x_MK, packed)
    assert same_bits(product(x_MK, pack_panels(weight_NK, torch.float16), 1024), expected)


def test_no_rows_have_no_products() -> None:
    panels_QKP = pack_panels(torch.randn(40, 7), torch.float16)
    assert product(torch.empty(0, 7), panels_QKP, 40).shape == (0, 40)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_spoils_no_other(odd: float) -> None:
    x_MK, weight_NK = torch.randn(9, 33), torch.randn(20, 33)
    panels_QKP = pack_panels(weight_NK, torch.float32)
    clean = product(x_MK, panels_QKP, 20)
    x_MK[4, 5] = odd
    ours = product(x_MK, panels_QKP, 20)
    torch.testing.assert_close(ours[4], (x_MK @ weight_NK.T)[4], equal_nan=True)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert same_bits(ours[others], clean[others])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
@given(num_outputs=st.integers(1, 50), num_inputs=st.integers(1, 40), is_turned=st.booleans())
@settings(max_examples=15, deadline=None)
def test_panels_hold_the_weights_rounded_as_torch_does(
    stored: torch.dtype, dtype: torch.dtype, num_outputs: int, num_inputs: int, is_turned: bool
) -> None:
    weight_NK = (torch.randn(num_outputs, num_inputs) * 3).to(stored)
    if is_turned:
        weight_NK = weight_NK.T.contiguous().T
    panels_QKP = pack_panels(weight_NK, dtype)
    assert panels_QKP.shape == (-(-num_outputs // PANEL_OUTPUTS), num_inputs, PANEL_OUTPUTS)
    rows = panels_QKP.transpose(1, 2).flatten(0, 1)
    assert torch.equal(rows[:num_outputs], weight_NK.float().to(dtype))
    assert not rows[num_outputs:].any()


class Guarded:
    """Memory that ends where the next byte may neither be read nor written."""

    def __init__(self, num_bytes: int) -> None:
        pages = -(-num_bytes // mmap.PAGESIZE)
        self._memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        end = start + pages * mmap.PAGESIZE
        assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, 0)
        self.offset = pages * mmap.PAGESIZE - num_bytes

    def tensor(self, like: Tensor) -> Tensor:
        """Return a copy of a tensor that ends with the memory."""
        flat = torch.frombuffer(
            self._memory, dtype=like.dtype, count=like.numel(), offset=self.offset
        )
        return flat.view(like.shape).copy_(like)


def guarded(tensor: Tensor) -> Tensor:
    return Guarded(tensor.numel() * tensor.element_size()).tensor(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs", [1, 7, 640])
@pytest.mark.parametrize("num_outputs", [1, 16, 40, 144])
def test_nothing_beyond_the_tensors_is_touched(
    dtype: torch.dtype, num_inputs: int, num_outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_NK = guarded(torch.randn(num_outputs, num_inputs))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: guarded(empty(*shape, **kind)))
    panels_QKP = pack_panels(weight_NK, dtype)
    for num_rows in (1, 2, 3, 6, 7, BLOCK_ROWS + 5):
        x_MK = guarded(torch.randn(num_rows, num_inputs))
        y_MN = product(x_MK, panels_QKP, num_outputs)
        torch.testing.assert_close(y_MN, x_MK @ weight_NK.to(dtype).float().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("x_MK", "num_outputs"),
    [
        (torch.zeros(2, 8), 20),
        (torch.zeros(2, 7, dtype=torch.float64), 20),
        (torch.zeros(2, 7), 16),
        (torch.zeros(2, 7), 33),
    ],
)
def test_what_does_not_fit_the_panels_never_reaches_the_kernel(
    x_MK: Tensor, num_outputs: int
) -> None:
    with pytest.raises(AssertionError):
        product(x_MK, pack_panels(torch.zeros(20, 7), torch.float16), num_outputs)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("num_outputs", [16, 24, 512])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 2 * BLOCK_ROWS + 3])
def test_heads_have_the_bits_of_each_alone(num_rows: int, num_outputs: int, threads: int) -> None:
    num_heads, num_inputs = 3, 393
    x_MHK = torch.randn(num_rows, num_heads, num_inputs + 5)[..., 2:-3]
    heads = [
        pack_panels(torch.randn(num_outputs, num_inputs), torch.float32) for _ in range(num_heads)
    ]
    alone = [product(x_MHK[:, head], heads[head], num_outputs) for head in range(num_heads)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y_MHN = product_by_head(x_MHK, torch.stack(heads), num_outputs)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(y_MHN, torch.stack(alone, dim=1))
