"""Reads a GGUF checkpoint as Hugging Face would have written it: names, config, float32 tensors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from prfaas.engine.gguf_config import hf_name, to_hf_config
from prfaas.engine.gguf_header import GgufHeader, GgufTensor, read_header
from prfaas.errors import ConfigError

Array = NDArray[np.float32]

SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K")
)
ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3.1's frequency scaling, which GGUF keeps as a divisor for each frequency."""
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What every published Llama 3.1 to 3.3 uses; `factor` is read off the divisors and checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufCheckpoint:
    """One model in Hugging Face's terms; tensors are read when asked for."""

    header: GgufHeader
    config: dict[str, Any]
    """What config.json would say."""

    @property
    def metadata(self) -> dict[str, object]:
        """The GGUF file's own key-value pairs, tokenizer included."""
        return self.header.metadata

    @property
    def num_tensors(self) -> int:
        """How many items `tensors` yields."""
        return len(self._weights())

    @property
    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Yield (Hugging Face name, float32 array), dequantised one at a time."""
        data = np.memmap(self.header.path, mode="r", dtype=np.uint8)
        for tensor in self._weights():
            yield (
                hf_name(tensor.name, self.config["model_type"]),
                self._as_hf(tensor, read_tensor(data, tensor)),
            )

    def _weights(self) -> list[GgufTensor]:
        return [tensor for tensor in self.header.tensors if tensor.name != ROPE_FACTORS]

    def _as_hf(self, tensor: GgufTensor, values: Array) -> Array:
        match self.config["model_type"], tensor.name.split(".")[-2]:
            case "gemma3_text", part if part.endswith("norm"):
                return values - np.float32(1.0)  # GGUF stores what the norm multiplies by
            case "llama", "attn_q":
                return unpermute(values, self.config["num_attention_heads"])
            case "llama", "attn_k":
                return unpermute(values, self.config["num_key_value_heads"])
            case _:
                return values


def read_gguf(path: Path) -> GgufCheckpoint:
    """Return the checkpoint in the GGUF file at `path`, checked by name and type.

    Raises:
        ConfigError: the file is damaged, or its architecture, a quantisation or a tensor is not
            supported; the message names it.
    """
    header = read_header(path)
    config = to_hf_config(header.metadata)
    for tensor in header.tensors:
        if tensor.name != ROPE_FACTORS:
            hf_name(tensor.name, config["model_type"])
        if tensor.ggml_type not in SUPPORTED_TYPES:
            raise ConfigError(
                f"{path}: tensor {tensor.name!r} is quantised as {tensor.ggml_type.name}; "
                f"supported: {', '.join(kind.name for kind in SUPPORTED_TYPES)}"
            )
        if tensor.name == ROPE_FACTORS:
            data = np.memmap(path, mode="r", dtype=np.uint8)
            config["rope_scaling"] = _llama3_scaling(config, read_tensor(data, tensor))
    names = {tensor.name for tensor in header.tensors}
    config["tie_word_embeddings"] = "output.weight" not in names
    return GgufCheckpoint(header=header, config=config)


def read_tensor(data: NDArray[np.uint8], tensor: GgufTensor) -> Array:
    """Return the tensor's values, float32 in torch's order of dimensions."""
    raw = data[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
    num_rows = math.prod(tensor.shape[:-1])
    rows = raw.reshape(num_rows, -1)
    match tensor.ggml_type:
        case GGMLQuantizationType.F32:
            values = rows.view("<f4")
        case GGMLQuantizationType.F16:
            values = rows.view("<f2")
        case _:
            values = dequantize(rows, tensor.ggml_type)
    return np.array(values, dtype=np.float32, copy=True).reshape(tensor.shape)


def unpermute(weight: Array, num_heads: int) -> Array:
    """Return q or k rows of a llama GGUF in Hugging Face's order.

    GGUF interleaves each head's first and second half of rows, because llama.cpp rotates neighbours.
    """
    rows, columns = weight.shape
    by_head = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(by_head.swapaxes(1, 2)).reshape(rows, columns)


def _llama3_scaling(config: dict[str, Any], divisors: Array) -> dict[str, Any]:
    factor = float(divisors.max())
    scaling = LLAMA3_SCALING | {"factor": factor}
    frequencies = config["rope_theta"] ** -(np.arange(len(divisors)) / len(divisors))
    turns = 8192 * frequencies / (2 * math.pi)
    blend = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if len(divisors) * 2 != config["head_dim"] or not np.allclose(divisors, expected, rtol=1e-3):
        raise ConfigError(f"GGUF tensor {ROPE_FACTORS!r} is not Llama 3's frequency scaling")
    return scaling
