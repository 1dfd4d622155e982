"""A GGUF file as a checkpoint directory: safetensors, config.json, tokenizer.json, chat template."""

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas.engine.gguf import read_gguf
from prfaas.errors import ConfigError
from prfaas.models.manifest import Manifest, write_manifest
from prfaas.models.progress import Progress, silent
from prfaas.models.weights import write_weights
from prfaas.text.gguf_vocab import read_vocabulary

WEIGHTS_STAGE = "Converting the weights"
TOKENIZER_STAGE = "Building the tokenizer"


def convert_gguf(
    path: Path,
    out_dir: Path,
    progress: Progress = silent,
    *,
    source: Mapping[str, object] | None = None,
) -> Manifest:
    """Fill the empty directory `out_dir` from a GGUF file and return what prfaas.json there says.

    Quantised weights become float32, since the product of a block's scale and its integers needs more
    bits than float16 has. One pass; one tensor is in memory at a time.

    `source` is what prfaas.json tells of where the file came from.

    Raises:
        ConfigError: the file is damaged, or its model or tokenizer is of a kind not supported.
    """
    checkpoint = read_gguf(path)
    num_splits = checkpoint.metadata.get("split.count", 1)
    if num_splits not in (0, 1):
        raise ConfigError(f"{path} is one of {num_splits} parts; join them with gguf-split --merge")
    progress(TOKENIZER_STAGE, 0, 1)
    vocabulary = read_vocabulary(checkpoint.metadata)
    tokenizer_json = with_spaced_merges(json.loads(vocabulary.tokenizer.to_str()))
    (out_dir / "tokenizer.json").write_text(
        json.dumps(tokenizer_json, ensure_ascii=False, separators=(",", ":")), "utf-8"
    )
    write_json(out_dir / "tokenizer_config.json", vocabulary.tokenizer_config)
    write_json(out_dir / "generation_config.json", vocabulary.generation_config)
    if vocabulary.chat_template is not None:
        (out_dir / "chat_template.jinja").write_text(vocabulary.chat_template, "utf-8")
    progress(TOKENIZER_STAGE, 1, 1)
    write_json(out_dir / "config.json", checkpoint.config)
    total = 4 * sum(prod(tensor.shape) for tensor in checkpoint.header.tensors)
    fingerprint = write_weights(
        _finite(checkpoint.tensors, path),
        out_dir / "model.safetensors",
        lambda done: progress(WEIGHTS_STAGE, done, total),
    )
    manifest = Manifest(
        model_fingerprint=fingerprint, source=source or {"kind": "gguf", "file_name": path.name}
    )
    write_manifest(out_dir, manifest)
    return manifest


def write_json(path: Path, value: object) -> None:
    """Write `value` as an indented JSON file."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def with_spaced_merges(tokenizer_json: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json whose merges are strings "a b" where no part holds a space.

    It names the same tokenizer and is read in two thirds of the time that pairs take, which at half
    a million merges is a second of every start.
    """
    model = tokenizer_json["model"]
    merges = model.get("merges") or ()
    if any(" " in part for merge in merges for part in merge):
        return tokenizer_json
    spaced = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return tokenizer_json | {"model": model | {"merges": spaced}}


def _finite(
    tensors: Iterator[tuple[str, NDArray[np.floating]]], path: Path
) -> Iterator[tuple[str, NDArray[np.floating]]]:
    for name, array in tensors:
        if not np.isfinite(array).all():
            raise ConfigError(
                f"{path} is damaged: tensor {name!r} holds values that are not finite"
            )
        yield name, array
