"""How a page's bytes are made smaller for the wire: without loss here, with loss in `quantized`.

zstd with byte shuffle, which gives back what went in: each number is rotated left by its sign bit, so that its exponent lies in one byte;
the bytes of equal weight of all numbers make one plane; each plane is compressed by itself, or stands
as it is if that is not longer. Exponents of neighbours are alike and mantissas are not, so one
plane shrinks to a third and the others stay. Then come the bytes that make no whole number:

    item_bytes x (length u32 | plane) | tail

A plane of `length` bytes is raw if that is its full length. Encoded bytes of a peer are not trusted:
nothing is allocated beyond the page that they are for.
"""

import struct

import numpy as np
import zstandard
from numpy.typing import NDArray

from prfaas.errors import ProtocolError
from prfaas.transport.kv_numbers import PageNumbers
from prfaas.transport.quantized import dequantize, quantize
from prfaas.transport.wire import Codec

LOSSLESS = frozenset({Codec.RAW, Codec.ZSTD})

ZSTD_LEVEL = 1
"""Higher ones gain under 1% on KV and cost several times the time."""

_LENGTH = struct.Struct("<I")
_UNSIGNED: dict[int, np.dtype[np.unsignedinteger]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def encode_page(
    codec: Codec, page: memoryview | bytes, numbers: PageNumbers
) -> tuple[Codec, memoryview | bytes]:
    """Return `page` encoded, and in which codec: ZSTD or RAW where `codec` does not fit or shorten it."""
    if codec not in LOSSLESS:
        quantized = quantize(codec, page, numbers)
        if quantized is not None:
            return codec, quantized
        codec = Codec.ZSTD
    if codec is Codec.ZSTD:
        planes = _encode_planes(page, numbers.item_bytes)
        if len(planes) < len(page):
            return codec, planes
    return Codec.RAW, page


def decode_page(
    codec: Codec, data: bytes, num_bytes: int, numbers: PageNumbers
) -> bytes | memoryview:
    """Return the `num_bytes` bytes that `data` stands for; raise ProtocolError if it does not."""
    match codec:
        case Codec.RAW:
            if len(data) != num_bytes:
                raise ProtocolError(f"page of {len(data)} bytes, expected {num_bytes} bytes")
            return data
        case Codec.ZSTD:
            return _decode_planes(memoryview(data), num_bytes, numbers.item_bytes)
        case Codec.FP16 | Codec.INT8 | Codec.FP8:
            return dequantize(codec, data, num_bytes, numbers)


def _encode_planes(page: memoryview | bytes, item_bytes: int) -> bytes:
    end = len(page) // item_bytes * item_bytes
    items = np.frombuffer(page[:end], _UNSIGNED[item_bytes])
    rotated = (items << 1) | (items >> (8 * item_bytes - 1))
    planes = np.ascontiguousarray(rotated.view(np.uint8).reshape(-1, item_bytes).T)
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    parts: list[bytes] = []
    for plane in planes:
        encoded = compressor.compress(plane)
        if len(encoded) >= len(plane):
            encoded = plane.tobytes()
        parts += (_LENGTH.pack(len(encoded)), encoded)
    return b"".join([*parts, bytes(page[end:])])


def _decode_planes(data: memoryview, num_bytes: int, item_bytes: int) -> bytes:
    num_items, tail_bytes = divmod(num_bytes, item_bytes)
    octets = np.empty((num_items, item_bytes), np.uint8)
    for weight in range(item_bytes):  # plane by plane: numpy's transposed copy is 4 times slower
        if len(data) < _LENGTH.size:
            raise ProtocolError("encoded page ends before its planes do")
        (length,) = _LENGTH.unpack_from(data)
        encoded, data = data[_LENGTH.size :][:length], data[_LENGTH.size + length :]
        octets[:, weight] = _decode_plane(encoded, num_items)
    if len(data) != tail_bytes:
        raise ProtocolError(f"encoded page ends in {len(data)} bytes, expected {tail_bytes} bytes")
    rotated = octets.view(_UNSIGNED[item_bytes])
    items = (rotated >> 1) | (rotated << (8 * item_bytes - 1))
    return b"".join([items.tobytes(), data])


def _decode_plane(data: memoryview, num_bytes: int) -> NDArray[np.uint8]:
    if len(data) == num_bytes:
        return np.frombuffer(data, np.uint8)
    try:
        if zstandard.frame_content_size(data) != num_bytes:  # -1 where the frame does not say
            raise ProtocolError(f"encoded plane does not say that it has {num_bytes} bytes")
        plane = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"damaged zstd plane: {error}") from error
    if len(plane) != num_bytes:
        raise ProtocolError(f"plane of {len(plane)} bytes, expected {num_bytes} bytes")
    return np.frombuffer(plane, np.uint8)
