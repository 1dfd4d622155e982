"""The tensors of a checkpoint directory: sharded safetensors, mapped, every tensor accounted for."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from prfaas.engine.model_spec import ModelSpec
from prfaas.engine.safetensors_file import SafetensorsFile
from prfaas.errors import ConfigError

IGNORED_TENSORS = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|visual|mtp)\."
    r"|.*\.rotary_emb\.inv_freq$"
    r"|.*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"
)
"""Parts of a multimodal checkpoint that text does not use, layers that predict further tokens, and
tables that are computed here."""
TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
"""What multimodal checkpoints write for `model.`."""
RELEASE_BYTES = 512 << 20
"""Pages are given back whenever so much more was taken: what is packed is not held twice."""
HEAD = "lm_head.weight"
FURTHER_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class TensorSource(Protocol):
    """Where the builders get tensors from."""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the tensor; raises ConfigError if it is missing or has another shape."""


class Weights:
    """The tensors of a checkpoint by their Hugging Face name; counts which were taken."""

    def __init__(self, model_dir: Path) -> None:
        """Map the files; raises ConfigError if one is damaged or two hold one tensor."""
        self.files = [SafetensorsFile(path) for path in weight_files(model_dir)]
        self._file_of: dict[str, tuple[SafetensorsFile, str]] = {}
        for file in self.files:
            for stored_name in file.names:
                name = _canonical(stored_name)
                if name in self._file_of:
                    other = self._file_of[name][0].path
                    raise ConfigError(
                        f"tensor {name!r} is stored twice: in {other} and {file.path}"
                    )
                self._file_of[name] = (file, stored_name)
        self._left = set(self.names)
        self._taken_bytes = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the text model's tensors, as `model.` and `lm_head.` write them."""
        return tuple(name for name in self._file_of if not IGNORED_TENSORS.match(name))

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        return name in self._file_of

    def tensor(self, name: str) -> Tensor:
        """Return a view of the mapped file; raises ConfigError if there is no such tensor."""
        if name not in self._file_of:
            raise ConfigError(f"the checkpoint has no tensor {name!r}")
        file, stored_name = self._file_of[name]
        return file.tensor(stored_name)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the tensor, a view of the mapped file; raises ConfigError if it is not as told."""
        tensor = self.tensor(name)
        if tensor.shape != shape:
            raise ConfigError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}; the config asks for {shape}"
            )
        self._left.discard(name)
        self._taken_bytes += tensor.nbytes  # several threads; a lost update only delays a release
        if self._taken_bytes > RELEASE_BYTES:
            self._taken_bytes = 0
            self.release()
        return tensor

    def check_all_taken(self, model: ModelSpec, embedding: Tensor) -> None:
        """Raise ConfigError naming tensors that no parameter took, or a tied head of its own."""
        is_stored_twice = model.has_tied_embeddings and self.has(HEAD)
        if is_stored_twice and not torch.equal(self.tensor(HEAD).to(embedding), embedding):
            raise ConfigError(
                f"tensor {HEAD!r} is not the embedding, which tie_word_embeddings says it is"
            )
        left = {name for name in self._left if not _is_of_further_layer(name, model)}
        if model.has_tied_embeddings:
            left.discard(HEAD)  # some savers write the tied head once more
        if left:
            names = ", ".join(sorted(left)[:5])
            raise ConfigError(
                f"{len(left)} tensors are not part of a {model.model_type} model: {names}"
            )

    def release(self) -> None:
        """Give the mapped pages back to the system; they are read again when touched."""
        for file in self.files:
            file.release()


def _is_of_further_layer(name: str, model: ModelSpec) -> bool:
    """Whether the tensor is of a layer after the last, which predicts tokens further ahead."""
    match = FURTHER_LAYER.match(name)
    num_layers = len(model.layers)
    if match is None:
        return False
    return num_layers <= int(match[1]) < num_layers + model.num_further_layers


def weights_fingerprint(model_dir: Path) -> str:
    """Return the sha256 over the bytes of the directory's safetensors files, in order of name."""
    return _hash_files([SafetensorsFile(path) for path in weight_files(model_dir)])


def model_fingerprint(model_dir: Path, weights: Weights) -> str:
    """Return the identity that prfaas.json records, else weights_fingerprint."""
    path = model_dir / "prfaas.json"
    if path.exists():
        recorded = read_json(path).get("model_fingerprint")
        if not isinstance(recorded, str) or not recorded:
            raise ConfigError(f"{path} names no model_fingerprint")
        return recorded
    return _hash_files(weights.files)


def _hash_files(files: list[SafetensorsFile]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.data)
    return digest.hexdigest()


def weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files that the index names, or all; raises ConfigError without any."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise ConfigError(f"{index} has no weight_map")
        return sorted({_inside(model_dir, str(name)) for name in weight_map.values()})
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{model_dir} holds no *.safetensors file")
    return files


def _inside(model_dir: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ConfigError(f"the safetensors index names {name!r}, which is not a plain file name")
    return model_dir / name


def _canonical(name: str) -> str:
    for prefix in TEXT_PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.") if name.endswith("lm_head.weight") else name


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises ConfigError if it cannot be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value
