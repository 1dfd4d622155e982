"""Tiny random models in the Hugging Face directory format, written without transformers.

All families share one byte-level BPE tokenizer of 512 ids: 0 <pad>, 1 <eos>, 2 <bos>, 3 <unk>, the
256 bytes, then merges. The weights are random, but scaled so that activations keep their size
through the layers and greedy answers vary.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prfaas.engine.config import model_from_hf
from prfaas.engine.loading.build import build_model
from tests.tiny_attention import Config
from tests.tiny_configs import (
    BOS_ID,
    EOS_ID,
    FAMILIES,
    PAD_ID,
    UNK_ID,
    VOCAB_SIZE,
    Family,
    tiny_config,
)
from tests.tiny_tokenizer import tiny_tokenizer

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "FAMILIES",
    "PAD_ID",
    "UNK_ID",
    "VOCAB_SIZE",
    "Family",
    "tiny_config",
    "write_tiny_model",
]

Array = NDArray[np.float32]

GATED_NORMS = ("linear_attn.norm.weight",)
"""Norms that multiply by their weight alone in families whose other norms multiply by one more."""
TRANSPOSED = ("experts.gate_up_proj", "experts.down_proj")
"""gpt-oss's experts, [inputs, outputs]; no other family's checkpoint has these names here."""


def write_tiny_model(directory: Path, family: Family, seed: int = 0, **overrides: object) -> Path:
    """Write a model of `family` into `directory` (made if absent) and return it.

    The same family, seed and overrides give the same bytes. `overrides` replace config.json
    fields, e.g. num_hidden_layers=2.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family) | overrides
    tensors = random_tensors(config, seed)
    write_safetensors(directory / "model.safetensors", tensors)
    write_json(directory / "config.json", config)
    write_json(
        directory / "tokenizer_config.json",
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "add_bos_token": True,
            "add_eos_token": False,
        },
    )
    (directory / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    return directory


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write float32 tensors; by hand, so that people need no library for it."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = [np.ascontiguousarray(array).data for array in tensors.values()]
    path.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *data]))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


class Recorder:
    """Takes note of every tensor that the loader asks for, and gives it zeros."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        return not name.endswith("_blocks")  # quantised weights are not made here

    def take(self, name: str, *shape: int) -> torch.Tensor:
        self.shapes[name] = shape
        return torch.zeros(shape)


def random_tensors(config: Config, seed: int) -> dict[str, Array]:
    """The checkpoint of a config, by Hugging Face name; float32.

    The loader says which tensors it has, each drawn by its name alone.
    """
    model, recorder = model_from_hf(config), Recorder()
    build_model(model, recorder, "fma-f32", model_fingerprint="")
    tensors = {
        name: _random(name, shape, seed, has_unit_offset_norms=model.has_unit_offset_norms)
        for name, shape in sorted(recorder.shapes.items())
    }
    if model.has_tied_embeddings and model.embedding_scale > 1:
        # Else a token's own row is its best answer, and every answer repeats one token.
        tensors["model.embed_tokens.weight"] *= 0.25
    return tensors


def _random(name: str, shape: tuple[int, ...], seed: int, *, has_unit_offset_norms: bool) -> Array:
    rng = np.random.default_rng([seed, *name.encode()])
    last = name.removesuffix(".weight").rpartition(".")[2]
    if last == "A_log":
        values = np.log(rng.uniform(0.5, 4.0, shape))
    elif last == "dt_bias":
        steps = np.exp(rng.uniform(np.log(0.1), np.log(1.0), shape))
        values = steps + np.log(-np.expm1(-steps))  # the inverse of softplus
    elif last == "D":
        values = rng.normal(1.0, 0.2, shape)
    elif "norm" in last:
        is_offset = has_unit_offset_norms and not name.endswith(GATED_NORMS)
        values = (0.0 if is_offset else 1.0) + rng.normal(0.0, 0.2, shape)
    elif len(shape) == 1:
        values = rng.normal(0.0, 1.0 if "sink" in last else 0.1, shape)
    else:
        num_inputs = shape[-2] if name.endswith(TRANSPOSED) else shape[-1]
        values = rng.normal(0.0, num_inputs**-0.5, shape)
    return values.astype(np.float32)
