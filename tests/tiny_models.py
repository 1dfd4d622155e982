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
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

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
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
CORPUS = (
    "The capital of France is Paris, and the capital of Germany is Berlin.",
    "Long prompts are prefilled by a remote node; the local node decodes the answer.",
    "She sells sea shells by the sea shore, and the shells she sells are sea shells, I am sure.",
    "The quick brown fox jumps over the lazy dog while the other foxes are sleeping.",
    "Question: what is the largest planet of the solar system? Answer: Jupiter is the largest.",
    "Die schnelle Übertragung größerer Datenmengen benötigt genügend Bandbreite für alle.",
    "Les élèves étudient près de la fenêtre; où êtes-vous allés après le déjeuner d'été?",
    "Быстрая коричневая лиса прыгает через ленивую собаку. Это предложение для обучения.",
    "日本語の文章もあります。今日は良い天気ですね。東京は日本の首都です。",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, i))\n",
    "0 1 2 3 4 5 6 7 8 9 10 100 1000 2024 2025 3.14159 😀 🚀",
)


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
    build_model(model, recorder, "padded-f32", model_fingerprint="")
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


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB_SIZE ids; encoding puts <bos> first."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        show_progress=False,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    return tokenizer
