"""Numbers rounded to 8 or 16 bits, for pages of attention that may come out a little different.

fp16 is the nearest float16 of each number. int8 and fp8 divide each row (one token's one head) by a
scale that makes its largest number the format's largest, 127 or 448, and round to the nearest. fp8 is
E4M3: 4 bits of exponent, 3 of mantissa, no infinity.

    fp16         numbers x float16
    int8, fp8    rows x (scale float32) | numbers x 1 byte

What a format cannot hold is not rounded at all: `quantize` returns None for a page with a NaN, an
infinity or a number beyond the format, and the page travels without loss. Encoded bytes of a peer are
not trusted: their length is compared before anything is allocated, and they decode to finite
numbers or not at all.

Types: a number of any kind is worked on as float32, its bits as uint32. R rows, W their width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas.errors import ProtocolError
from prfaas.transport.kv_numbers import PageNumbers
from prfaas.transport.wire import Codec

Floats = NDArray[np.float32]
Bits = NDArray[np.uint32]
Words = NDArray[Any]
"""Unsigned, of 1, 2 or 4 bytes."""

SLICE_ITEMS = 1 << 14

MIN_MAGNITUDE = np.float32(1e-30)
"""A row without a larger number becomes zeros: a smaller scale has no float32 inverse."""
INT8_MAX = 127

_SCALE_BYTES = 4
_MAX_MAGNITUDE = {"float32": 1e38, "float16": 65504.0, "bfloat16": 1e38}
"""Of a number in a scaled row: a code times a scale is still finite in the page's type."""
_CODE_MAX = {Codec.INT8: float(INT8_MAX), Codec.FP8: 448.0}
_INFINITE = 0x7F800000
_FP16_INFINITE = 0x7C00
_E4M3_NAN = 0x7F


@dataclass(frozen=True, slots=True)
class _Format:
    """A float format narrower than float32."""

    mantissa_bits: int
    min_exponent: int
    """Of normal numbers."""
    sign_bit: int


_FP16 = _Format(mantissa_bits=10, min_exponent=-14, sign_bit=15)
_E4M3 = _Format(mantissa_bits=3, min_exponent=-6, sign_bit=7)


def quantize(codec: Codec, page: memoryview | bytes, numbers: PageNumbers) -> memoryview | None:
    """Return the page in `codec`, a lossy one; None if that is no shorter or cannot hold a number."""
    num_bytes = _encoded_bytes(codec, len(page), numbers)
    if num_bytes is None:
        return None
    encoded = np.empty(num_bytes, np.uint8)
    words_RW = _words(np.frombuffer(page, np.uint8), numbers)
    scale_R, codes_RW = _parts(codec, encoded, len(words_RW))
    for rows in _slices(words_RW):
        values_RW = _to_float32(words_RW[rows], numbers.dtype)
        # A NaN is not less than anything, and fails here, too.
        largest_R = np.abs(values_RW).max(axis=1)
        if not bool((largest_R <= _max_magnitude(codec, numbers.dtype)).all()):
            return None
        if codec is Codec.FP16:
            codes_RW[rows] = _round(values_RW, _FP16)
            continue
        code_max = np.float32(_CODE_MAX[codec])
        is_zero_R = largest_R < MIN_MAGNITUDE
        scale_R[rows] = np.where(is_zero_R, np.float32(0), largest_R / code_max)
        inverse_R = code_max / np.maximum(largest_R, MIN_MAGNITUDE)
        inverse_R[is_zero_R] = 0
        scaled_RW = values_RW * inverse_R[:, None]
        if codec is Codec.INT8:
            codes_RW.view(np.int8)[rows] = np.rint(scaled_RW, out=scaled_RW)
        else:
            codes_RW[rows] = _round(scaled_RW, _E4M3)
    return encoded.data


def dequantize(codec: Codec, data: bytes, num_bytes: int, numbers: PageNumbers) -> memoryview:
    """Return the page of `num_bytes` bytes that `data` stands for, or raise ProtocolError."""
    expected = _encoded_bytes(codec, num_bytes, numbers)
    if expected is None:
        raise ProtocolError(f"codec {codec.name} for a page of {num_bytes} bytes of {numbers}")
    if len(data) != expected:
        raise ProtocolError(f"{codec.name} page of {len(data)} bytes, expected {expected} bytes")
    page = np.empty(num_bytes, np.uint8)
    words_RW = _words(page, numbers)
    scale_R, codes_RW = _parts(codec, np.frombuffer(data, np.uint8), len(words_RW))
    _check_codes(codec, scale_R, codes_RW, numbers.dtype)
    for rows in _slices(words_RW):
        match codec:
            case Codec.FP16:
                values_RW = _widen(codes_RW[rows])
            case Codec.INT8:
                values_RW = codes_RW.view(np.int8)[rows].astype(np.float32)
            case _:
                values_RW = np.take(_E4M3_VALUES, codes_RW[rows])
        if codec is not Codec.FP16:
            values_RW *= scale_R[rows, None]
        words_RW[rows] = _from_float32(values_RW, numbers.dtype)
    return page.data


def _check_codes(codec: Codec, scale_R: Floats, codes_RW: Words, dtype: str) -> None:
    """Raise ProtocolError for codes that stand for no number, or for one that a page cannot hold."""
    if codec is Codec.FP16:
        is_whole = int((codes_RW & np.uint16(0x7FFF)).max()) < _FP16_INFINITE
    elif codec is Codec.FP8:
        is_whole = int((codes_RW & np.uint8(0x7F)).max()) < _E4M3_NAN
    else:
        is_whole = int(codes_RW.view(np.int8).min()) >= -INT8_MAX
    if not is_whole:
        raise ProtocolError(f"{codec.name} page with a code that stands for no number")
    if codec is not Codec.FP16:
        limit = np.float32(_max_magnitude(codec, dtype)) / np.float32(_CODE_MAX[codec])
        if not bool(((scale_R >= 0) & (scale_R <= limit)).all()):
            raise ProtocolError(
                f"{codec.name} page with a scale that is not between 0 and {limit:g}"
            )


def _words(octets: NDArray[np.uint8], numbers: PageNumbers) -> Words:
    """Return a page's rows as unsigned words; a view."""
    assert numbers.row_items is not None, "pages that must stay exact were sorted out"
    words = octets.view("<u4" if numbers.item_bytes == 4 else "<u2")
    return words.reshape(-1, numbers.row_items)


def _parts(codec: Codec, encoded: NDArray[np.uint8], num_rows: int) -> tuple[Floats, Words]:
    """Return the scales and the codes, rows of unsigned words, of an encoded page; views."""
    if codec is Codec.FP16:
        return np.empty(0, np.float32), encoded.view("<u2").reshape(num_rows, -1)
    start = num_rows * _SCALE_BYTES
    return encoded[:start].view("<f4"), encoded[start:].reshape(num_rows, -1)


def _slices(words_RW: Words) -> Iterator[slice]:
    """Yield slices of rows: what is made of one at a time stays in the processor's cache."""
    num_rows = max(1, SLICE_ITEMS // words_RW.shape[1])
    for start in range(0, len(words_RW), num_rows):
        yield slice(start, start + num_rows)


def _max_magnitude(codec: Codec, dtype: str) -> float:
    """Return the largest number that a page may have: what it decodes to is still finite."""
    return 65504.0 if codec is Codec.FP16 else _MAX_MAGNITUDE[dtype]


def _encoded_bytes(codec: Codec, num_bytes: int, numbers: PageNumbers) -> int | None:
    """Return the length of a page in `codec`; None for a page that does not get shorter by it."""
    row_bytes = numbers.item_bytes * (numbers.row_items or 0)
    if numbers.dtype not in _MAX_MAGNITUDE or not row_bytes or num_bytes % row_bytes:
        return None
    num_items, num_rows = num_bytes // numbers.item_bytes, num_bytes // row_bytes
    encoded = 2 * num_items if codec is Codec.FP16 else num_items + _SCALE_BYTES * num_rows
    return encoded if encoded < num_bytes else None


def _round(values: Floats, form: _Format) -> Bits:
    """Return the code of the nearest number of a narrower format, ties to even.

    Finite, and no larger than the format's largest. A power of two whose unit in the last place is
    the format's at this exponent is added: the sum's last bits are the rounded mantissa.
    """
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    exponent = np.maximum(magnitude, np.uint32((form.min_exponent + 127) << 23))
    exponent &= np.uint32(_INFINITE)
    power = exponent + np.uint32((23 - form.mantissa_bits) << 23)
    codes: Bits = (magnitude.view(np.float32) + power.view(np.float32)).view(np.uint32)
    codes -= power
    exponent >>= np.uint32(23 - form.mantissa_bits)
    codes += exponent
    codes -= np.uint32((form.min_exponent + 127) << form.mantissa_bits)
    sign = bits >> np.uint32(31)
    sign <<= np.uint32(form.sign_bit)
    codes |= sign
    return codes


def _widen(halves: Words) -> Floats:
    """Return float16 numbers as float32; those that are not finite become larger than all others."""
    bits = halves.view(np.int16).astype(np.int32)  # the sign goes to the top, and below it
    bits <<= 13
    bits &= np.int32(-0x70002000)
    values = bits.view(np.float32)
    values *= np.float32(2.0**112)  # the exponents' biases are as far apart
    return values


def _to_float32(words: Words, dtype: str) -> Floats:
    match dtype:
        case "float32":
            return words.view(np.float32)
        case "float16":
            return _widen(words)
        case _:
            bits = words.astype(np.uint32)
            bits <<= np.uint32(16)
            return bits.view(np.float32)


def _from_float32(values: Floats, dtype: str) -> Bits:
    """Return the words of numbers that the type can hold; ties to even."""
    match dtype:
        case "float32":
            return values.view(np.uint32)
        case "float16":
            return _round(values, _FP16)
        case _:
            bits = values.view(np.uint32)
            bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            bits >>= np.uint32(16)
            return bits


def _e4m3_values() -> Floats:
    """Return the number of each code."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    magnitudes = np.where(
        exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10.0)
    )
    return np.where(codes < 128, magnitudes, -magnitudes).astype(np.float32)


_E4M3_VALUES = _e4m3_values()
