"""One mapped safetensors file.

The library's own reader maps the file too, but cannot give pages back; after packing, all but the
embedding's would stay resident beside the packed copy.
"""

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prfaas.errors import ConfigError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HEADER_LENGTH = struct.Struct("<Q")


class SafetensorsFile:
    """The tensors of one file, as views of its mapping."""

    def __init__(self, path: Path) -> None:
        """Map `path`; raises ConfigError if it is no complete safetensors file."""
        self._path = path
        try:
            with path.open("rb") as file:
                # A private mapping is writable in principle, which torch asks of a buffer.
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._entries, self._start = self._read_header()
        except (OSError, ValueError, struct.error, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a usable safetensors file: {error}") from error

    def _read_header(self) -> tuple[dict[str, dict[str, Any]], int]:
        (length,) = HEADER_LENGTH.unpack_from(self.data)
        start = HEADER_LENGTH.size + length
        if start > len(self.data):
            raise ValueError(f"a header of {length} bytes in a file of {len(self.data)}")
        entries: dict[str, dict[str, Any]] = json.loads(self.data[HEADER_LENGTH.size : start])
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            first, end = entry["data_offsets"]
            if not 0 <= first <= end <= len(self.data) - start:
                raise ValueError(f"tensor {name!r} lies outside the file")
        return entries, start

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of the file."""
        return tuple(self._entries)

    def tensor(self, name: str) -> Tensor:
        """Return a view of the mapped bytes; raises ConfigError for a dtype not read here."""
        entry = self._entries[name]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ConfigError(
                f"{self._path}: tensor {name!r} has dtype {entry['dtype']}; "
                f"supported: {', '.join(DTYPES)}"
            )
        first, end = entry["data_offsets"]
        flat = torch.frombuffer(
            self.data,
            dtype=dtype,
            count=(end - first) // dtype.itemsize,
            offset=self._start + first,
        )
        return flat.view(entry["shape"])

    def release(self) -> None:
        """Give the resident pages back; views stay valid and read the file again."""
        self.data.madvise(mmap.MADV_DONTNEED)
