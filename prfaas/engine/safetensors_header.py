"""What a safetensors file says it holds; torch-free."""

import itertools
import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
HEADER_LENGTH = struct.Struct("<Q")
DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Of one value; dtypes of less than a byte are not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file; offsets count from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def stored_tensors(data: mmap.mmap, path: Path) -> list[StoredTensor]:
    """Return the tensors that a safetensors file lists, in its order.

    Raises:
        ConfigError: the header is no safetensors header, a tensor lies outside the file or has not
            the bytes of its shape, or two share bytes or a name.
    """
    try:
        (length,) = HEADER_LENGTH.unpack_from(data)
        start = HEADER_LENGTH.size
        text = data[start : start + min(length, MAX_HEADER_BYTES)]
        header = json.loads(text, object_pairs_hook=_without_repeats)
        header.pop("__metadata__", None)
        tensors = [_stored_tensor(name, entry, start + length) for name, entry in header.items()]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a usable safetensors file: {error}") from error
    if start + length > len(data):
        raise ConfigError(f"{path} is cut short: it has {len(data)} bytes")
    for tensor in tensors:
        if not start + length <= tensor.start <= tensor.end <= len(data):
            raise ConfigError(f"{path} is cut short: tensor {tensor.name!r} lies outside the file")
    by_start = sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))
    for before, after in itertools.pairwise(by_start):
        if before.end > after.start:
            raise ConfigError(
                f"{path} is damaged: tensors {before.name!r} and {after.name!r} share bytes"
            )
    end = max((tensor.end for tensor in tensors), default=start + length)
    if end < len(data):
        raise ConfigError(f"{path} is damaged: {len(data) - end} bytes follow its last tensor")
    return tensors


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in its header twice")
    return found


def _stored_tensor(name: str, entry: dict[str, object], base: int) -> StoredTensor:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not (isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise ValueError(f"tensor {name!r} has shape {shape!r} and offsets {offsets!r}")
    dtype, dims = str(entry["dtype"]), tuple(map(int, shape))
    num_bytes = int(offsets[1]) - int(offsets[0])
    value_bytes = DTYPE_BYTES.get(dtype)
    fits = value_bytes is None or num_bytes == math.prod(dims) * value_bytes
    if any(dim < 0 for dim in dims) or not fits:
        raise ValueError(f"tensor {name!r} of {dtype} {list(dims)} has {num_bytes} bytes")
    return StoredTensor(
        name=name,
        dtype=dtype,
        shape=dims,
        start=base + int(offsets[0]),
        end=base + int(offsets[1]),
    )
