"""Weights as one safetensors file, and the identity of weights.

The identity is a sha256 over the digests of all tensors, sorted; a tensor's digest covers its name, dtype,
shape and bytes. So it does not depend on the order of tensors or on how they are spread over files.
"""

import hashlib
import json
import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prfaas.engine.safetensors_header import stored_tensors
from prfaas.errors import ConfigError

HEADER_BYTES = 1 << 20
"""The header is written last, into a space of this size kept free at the start; blanks fill it up."""

_PIECE_BYTES = 8 << 20
_SAMPLE_ITEMS = 4096

OnBytes = Callable[[int], None]
"""Is told the bytes done so far."""


def write_weights(
    tensors: Iterable[tuple[str, NDArray[np.floating]]], path: Path, on_bytes: OnBytes
) -> str:
    """Write float tensors to a new safetensors file and return their identity.

    One tensor is in memory at a time. Each is stored as float16 or bfloat16 if that loses no bit, else as
    float32. `on_bytes` is told the size of what was taken, as float32.

    Raises:
        ConfigError: a name occurs twice, or there are more tensors than the header has room for.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    digests = []
    taken = 0
    with path.open("xb") as file:
        file.seek(HEADER_BYTES)
        for name, array in tensors:
            if name in header:
                raise ConfigError(f"the checkpoint holds two tensors named {name!r}")
            dtype, stored = narrow(array)
            data = np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data
            start = file.tell() - HEADER_BYTES
            file.write(data)
            header[name] = {
                "dtype": dtype,
                "shape": list(array.shape),
                "data_offsets": [start, start + len(data)],
            }
            digests.append(_digest(name, dtype, array.shape, [data]))
            taken += array.size * 4
            on_bytes(taken)
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > HEADER_BYTES - 8:
            raise ConfigError(f"{len(digests)} tensors do not fit the header of {path.name}")
        file.seek(0)
        file.write(struct.pack("<Q", HEADER_BYTES - 8) + text.ljust(HEADER_BYTES - 8))
    return _combine(digests)


def narrow(array: NDArray[np.floating]) -> tuple[str, NDArray[np.generic]]:
    """Return (safetensors dtype, array to store): the narrowest form that gives back the same bits."""
    if array.dtype == np.float16:
        return "F16", array
    single = np.ascontiguousarray(array, dtype=np.float32)
    bits = single.view(np.uint32)
    if _agrees(bits, lambda part: part & np.uint32(0xFFFF0000)):
        return "BF16", (bits >> np.uint32(16)).astype(np.uint16)
    if _agrees(bits, _through_float16):
        return "F16", single.astype(np.float16)
    return "F32", single


def _agrees(
    bits: NDArray[np.uint32], change: Callable[[NDArray[np.uint32]], NDArray[np.uint32]]
) -> bool:
    """Whether `change` leaves all bits alone; a sample first, which settles most cases."""
    flat = bits.reshape(-1)
    return all(bool(np.array_equal(part, change(part))) for part in (flat[:_SAMPLE_ITEMS], flat))


def _through_float16(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    with np.errstate(over="ignore", invalid="ignore"):
        return bits.view(np.float32).astype(np.float16).astype(np.float32).view(np.uint32)


def identify_weights(paths: Sequence[Path], on_bytes: OnBytes) -> str:
    """Return the identity of the weights in some safetensors files.

    Raises:
        ConfigError: a file cannot be read or is damaged.
    """
    digests = []
    done = 0
    for path in paths:
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
                for tensor in stored_tensors(m, path):
                    pieces = (
                        m[start : min(start + _PIECE_BYTES, tensor.end)]
                        for start in range(tensor.start, tensor.end, _PIECE_BYTES)
                    )
                    digests.append(_digest(tensor.name, tensor.dtype, tensor.shape, pieces))
                    done += tensor.end - tensor.start
                    on_bytes(done)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the weights {path}: {error}") from error
    return _combine(digests)


def _digest(
    name: str, dtype: str, shape: Sequence[int], pieces: Iterable[bytes | memoryview]
) -> str:
    digest = hashlib.sha256(json.dumps([name, dtype, list(shape)]).encode())
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _combine(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()
