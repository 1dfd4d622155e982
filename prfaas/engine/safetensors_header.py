"""What a safetensors file says it holds; torch-free."""

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
HEADER_LENGTH = struct.Struct("<Q")


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
        ConfigError: the header is no safetensors header, or a tensor lies outside the file.
    """
    try:
        (length,) = HEADER_LENGTH.unpack_from(data)
        start = HEADER_LENGTH.size
        header = json.loads(data[start : start + min(length, MAX_HEADER_BYTES)])
        header.pop("__metadata__", None)
        tensors = [_stored_tensor(name, entry, start + length) for name, entry in header.items()]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a usable safetensors file: {error}") from error
    if start + length > len(data):
        raise ConfigError(f"{path} is cut short: it has {len(data)} bytes")
    for tensor in tensors:
        if not start + length <= tensor.start <= tensor.end <= len(data):
            raise ConfigError(f"{path} is cut short: tensor {tensor.name!r} lies outside the file")
    return tensors


def _stored_tensor(name: str, entry: dict[str, object], base: int) -> StoredTensor:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not (isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise ValueError(f"tensor {name!r} has shape {shape!r} and offsets {offsets!r}")
    return StoredTensor(
        name=name,
        dtype=str(entry["dtype"]),
        shape=tuple(map(int, shape)),
        start=base + int(offsets[0]),
        end=base + int(offsets[1]),
    )
