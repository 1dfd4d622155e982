"""One mapped safetensors file.

The library's own reader maps the file too, but cannot give pages back; after packing, all but the
embedding's would stay resident beside the packed copy.
"""

import mmap
from pathlib import Path

import torch
from torch import Tensor

from prfaas.engine.safetensors_header import stored_tensors
from prfaas.errors import ConfigError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFile:
    """The tensors of one file, as views of its mapping."""

    def __init__(self, path: Path) -> None:
        """Map `path`; raises ConfigError if it is no complete safetensors file."""
        self.path = path
        try:
            with path.open("rb") as file:
                # A private mapping is writable in principle, which torch asks of a buffer.
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is not a usable safetensors file: {error}") from error
        self._stored = {tensor.name: tensor for tensor in stored_tensors(self.data, path)}

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of the file."""
        return tuple(self._stored)

    def tensor(self, name: str) -> Tensor:
        """Return a view of the mapped bytes; raises ConfigError for a dtype not read here."""
        stored = self._stored[name]
        dtype = DTYPES.get(stored.dtype)
        if dtype is None:
            raise ConfigError(
                f"{self.path}: tensor {name!r} has dtype {stored.dtype}; "
                f"supported: {', '.join(DTYPES)}"
            )
        count = (stored.end - stored.start) // dtype.itemsize
        if not count:
            return torch.empty(stored.shape, dtype=dtype)
        flat = torch.frombuffer(self.data, dtype=dtype, count=count, offset=stored.start)
        return flat.view(stored.shape)

    def release(self) -> None:
        """Give the resident pages back; views stay valid and read the file again."""
        self.data.madvise(mmap.MADV_DONTNEED)
