"""Lossy codecs: how far a number may move, what stays as it is, and what is no page.

The oracles are torch's own conversions to float16 and float8_e4m3fn and bounds worked out in float64.
"""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.transport.codec import LOSSLESS, decode_page, encode_page
from prfaas.transport.kv_numbers import PageNumbers
from prfaas.transport.quantized import SLICE_ITEMS, dequantize, quantize
from prfaas.transport.wire import Codec

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SCALED = [Codec.INT8, Codec.FP8]

dtypes = st.sampled_from(sorted(TORCH))
widths = st.sampled_from([8, 64, 96, 256])
exponents = st.integers(-50, 110)


def page_of(values: torch.Tensor, dtype: str) -> bytes:
    return values.to(TORCH[dtype]).contiguous().view(torch.uint8).numpy().tobytes()


def values_of(page: bytes | memoryview, dtype: str) -> np.ndarray:
    tensor = torch.frombuffer(bytearray(page), dtype=TORCH[dtype])
    return tensor.to(torch.float64).numpy()


def there_and_back(
    codec: Codec, page: bytes, numbers: PageNumbers
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers before and after, as float64, in rows."""
    encoded = quantize(codec, page, numbers)
    assert encoded is not None
    assert len(encoded) < len(page)
    decoded = dequantize(codec, bytes(encoded), len(page), numbers)
    assert numbers.row_items is not None
    shape = (-1, numbers.row_items)
    return (
        values_of(page, numbers.dtype).reshape(shape),
        values_of(decoded, numbers.dtype).reshape(shape),
    )


def random_values(seed: int, num_rows: int, width: int, exponent: int) -> torch.Tensor:
    """Rows of unlike size: each is its own power of two times normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, width, generator=generator)
    scale = torch.randint(-6, 7, (num_rows, 1), generator=generator) + exponent
    return values * 2.0**scale


@given(
    dtype=dtypes,
    width=widths,
    seed=st.integers(0, 999),
    exponent=exponents,
    rows=st.integers(1, 40),
)
@pytest.mark.parametrize("codec", SCALED)
def test_a_number_moves_by_no_more_than_its_codec_allows(codec, dtype, width, seed, exponent, rows):
    if dtype == "float16":
        exponent %= 8
    numbers = PageNumbers(dtype=dtype, row_items=width)
    page = page_of(random_values(seed, rows, width, exponent), dtype)
    before, after = there_and_back(codec, page, numbers)
    largest = np.abs(before).max(axis=1, keepdims=True)
    if codec is Codec.INT8:
        step = np.broadcast_to(largest / 127, before.shape)
    else:  # 3 bits of mantissa, and below 2^-6 of 448 steps that stay equal
        magnitude = np.maximum(np.abs(before), largest / 448 * 2.0**-6)
        step = 2.0 ** np.floor(np.log2(magnitude / largest * 448)) * 2.0**-3 * largest / 448
    slack = 2.0**-20 * largest + EPSILON[dtype] * np.abs(before) + 1e-30
    smallest = 2.0**-24 if dtype == "float16" else 0.0
    assert (np.abs(after - before) <= 0.5 * step * 1.0001 + slack + smallest).all()


@given(width=widths, seed=st.integers(0, 999), exponent=st.integers(-40, 8))
def test_fp16_is_the_nearest_float16(width, seed, exponent):
    values = random_values(seed, 20, width, exponent)
    page = page_of(values, "float32")
    numbers = PageNumbers(dtype="float32", row_items=width)
    encoded = bytes(quantize(Codec.FP16, page, numbers) or b"")
    assert encoded == page_of(values.to(torch.float16), "float16")
    decoded = dequantize(Codec.FP16, encoded, len(page), numbers)
    assert decoded == page_of(values.to(torch.float16).to(torch.float32), "float32")


def test_every_finite_float16_has_its_own_code():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    halves = bits.view(torch.float16)
    halves = halves[halves.isfinite()]
    page = page_of(halves.to(torch.float32), "float32")
    numbers = PageNumbers(dtype="float32", row_items=4)
    assert bytes(quantize(Codec.FP16, page, numbers) or b"") == page_of(halves, "float16")


@given(seed=st.integers(0, 999))
def test_fp8_codes_are_those_of_e4m3(seed):
    """A row whose largest number is 448 has a scale of 1."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(10, 64, generator=generator) * 2.0 ** torch.randint(
        -10, 7, (10, 64), generator=generator
    )
    values[:, 7] = 448.0
    values.clamp_(-448, 448)
    encoded = quantize(
        Codec.FP8, page_of(values, "float32"), PageNumbers(dtype="float32", row_items=64)
    )
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert bytes(encoded or b"") == np.ones(10, "<f4").tobytes() + codes.tobytes()


def test_every_fp8_code_but_nan_decodes_as_e4m3():
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0
    data = np.ones(1, "<f4").tobytes() + codes.tobytes()
    page = dequantize(Codec.FP8, data, 1024, PageNumbers(dtype="float32", row_items=256))
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32)
    assert page == page_of(expected, "float32")


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("dtype", sorted(TORCH))
def test_zeros_stay_zeros_and_their_row_does_not_touch_others(codec, dtype):
    values = torch.zeros(4, 64)
    values[1] = torch.linspace(-3, 3, 64)
    before, after = there_and_back(
        codec, page_of(values, dtype), PageNumbers(dtype=dtype, row_items=64)
    )
    assert not after[[0, 2, 3]].any()
    assert np.abs(after[1] - before[1]).max() < 0.2


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-31, 2e-30])
def test_denormal_rows_give_finite_numbers_no_further_than_they_are_small(codec, dtype, size):
    values = torch.linspace(-size, size, 128, dtype=torch.float64).to(torch.float32).reshape(2, 64)
    before, after = there_and_back(
        codec, page_of(values, dtype), PageNumbers(dtype=dtype, row_items=64)
    )
    assert np.isfinite(after).all()
    assert np.abs(after - before).max() <= max(1e-30, size / 16)


@pytest.mark.parametrize("codec", [Codec.FP16, *SCALED])
@pytest.mark.parametrize("dtype", sorted(TORCH))
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 2 * SLICE_ITEMS - 1])
def test_a_page_with_a_number_that_is_not_finite_travels_without_loss(codec, dtype, odd, position):
    values = torch.randn(2 * SLICE_ITEMS, generator=torch.Generator().manual_seed(1))
    values[position] = odd
    page, numbers = page_of(values, dtype), PageNumbers(dtype=dtype, row_items=64)
    used, encoded = encode_page(codec, page, numbers)
    assert used in LOSSLESS
    assert decode_page(used, bytes(encoded), len(page), numbers) == page


@pytest.mark.parametrize(
    ("codec", "size"), [(Codec.FP16, 65505.0), (Codec.INT8, 2e38), (Codec.FP8, 2e38)]
)
def test_a_number_beyond_the_format_is_not_changed(codec, size):
    page = page_of(torch.full((64,), size), "float32")
    assert quantize(codec, page, PageNumbers(dtype="float32", row_items=64)) is None


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize(("dtype", "size"), [("float16", 65504.0), ("bfloat16", 9.9e37)])
def test_the_largest_numbers_stay_finite(codec, dtype, size):
    page = page_of(torch.full((64,), size), dtype)
    _, after = there_and_back(codec, page, PageNumbers(dtype=dtype, row_items=64))
    assert np.isfinite(after).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fp16_does_nothing_to_numbers_of_16_bits(dtype):
    page = page_of(torch.randn(64, generator=torch.Generator().manual_seed(1)), dtype)
    assert quantize(Codec.FP16, page, PageNumbers(dtype=dtype, row_items=64)) is None


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_a_cut_block_of_unequal_heads_has_whole_rows(num_tokens):
    """K [2 heads, T, 96], then V [2 heads, T, 64], in rows of 32."""
    keys = torch.full((2, num_tokens, 96), 100.0)
    values = torch.full((2, num_tokens, 64), 0.001)
    page = page_of(torch.cat([keys.flatten(), values.flatten()]), "float32")
    before, after = there_and_back(Codec.INT8, page, PageNumbers(dtype="float32", row_items=32))
    assert np.abs(after / before - 1).max() < 1e-6


@pytest.mark.parametrize("codec", [Codec.FP16, *SCALED])
def test_each_length_but_the_right_one_is_refused(codec):
    numbers = PageNumbers(dtype="float32", row_items=16)
    encoded = bytes(quantize(codec, bytes(512), numbers) or b"")
    for num_bytes in range(len(encoded)):
        with pytest.raises(ProtocolError, match="expected"):
            dequantize(codec, encoded[:num_bytes], 512, numbers)
    with pytest.raises(ProtocolError):
        dequantize(codec, encoded, 512, PageNumbers(dtype="float32"))
    with pytest.raises(ProtocolError):
        dequantize(codec, encoded, 510, numbers)


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 3e38])
def test_a_scale_that_no_page_has_is_refused(codec, scale):
    data = np.array([1.0, scale], "<f4").tobytes() + bytes(64)
    with pytest.raises(ProtocolError, match="scale"):
        dequantize(codec, data, 256, PageNumbers(dtype="float32", row_items=32))


@pytest.mark.parametrize(
    ("codec", "code"),
    [
        (Codec.INT8, b"\x80"),
        (Codec.FP8, b"\x7f"),
        (Codec.FP8, b"\xff"),
        (Codec.FP16, b"\x00\x7c"),
        (Codec.FP16, b"\x01\xfe"),
    ],
)
def test_a_code_that_stands_for_no_number_is_refused(codec, code):
    numbers = PageNumbers(dtype="float32", row_items=32)
    encoded = bytearray(quantize(codec, bytes(256), numbers) or b"")
    encoded[-len(code) :] = code
    with pytest.raises(ProtocolError, match="no number"):
        dequantize(codec, bytes(encoded), 256, numbers)


@given(
    codec=st.sampled_from([Codec.FP16, *SCALED]),
    dtype=dtypes,
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 9),
)
def test_random_codes_are_finite_numbers_or_refused(codec, dtype, seed, rows):
    numbers = PageNumbers(dtype=dtype, row_items=16)
    num_bytes = rows * 16 * numbers.item_bytes
    encoded = quantize(codec, bytes(num_bytes), numbers)
    if encoded is None:
        return
    data = np.random.default_rng(seed).bytes(len(encoded))
    try:
        page = dequantize(codec, data, num_bytes, numbers)
    except ProtocolError:
        return
    assert np.isfinite(values_of(page, dtype)).all()


@pytest.mark.parametrize("codec", [Codec.FP16, *SCALED])
def test_a_page_that_says_it_is_large_costs_no_memory(codec):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            dequantize(codec, bytes(1000), 1 << 30, PageNumbers(dtype="float32", row_items=64))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
