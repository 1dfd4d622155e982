"""Loads a model directory: config.json and safetensors, every tensor accounted for.

Weights are mapped, packed one matrix at a time, and let go; only the embedding table stays mapped.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from prfaas.engine.config import GqaSpec, ModelConfig
from prfaas.engine.layers.gqa import GqaMixer
from prfaas.engine.layers.mlp import GatedMlp
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear, Packing, pack
from prfaas.engine.model import Block, Embedding, Model
from prfaas.engine.numerics import (
    InexactKernelsError,
    candidate_packings,
    numerics_fingerprint,
)
from prfaas.engine.rope import RopeTable, pair_order
from prfaas.engine.safetensors_file import SafetensorsFile
from prfaas.errors import ConfigError
from prfaas.log import get_logger

IGNORED_TENSORS = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|visual)\.|.*\.rotary_emb\.inv_freq$"
)
"""Parts of a multimodal checkpoint that text does not use, and tables that are computed here."""
TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
"""What multimodal checkpoints write for `model.`."""


def load_model(model_dir: Path, *, dtype: Literal["float16", "float32"] = "float16") -> Model:
    """Return the model in `model_dir`, its weights packed for `dtype`.

    Raises:
        ConfigError: a file is missing or damaged, a feature is not supported, a tensor is missing,
            left over or of another shape, or this machine computes no packing exactly.
    """
    config = ModelConfig.from_hf(_read_json(model_dir / "config.json"))
    weights = Weights(model_dir)
    model_fingerprint = _model_fingerprint(model_dir, weights)
    faults = []
    for packing in candidate_packings(dtype):
        model = _Builder(config, weights, packing).build(model_fingerprint)
        weights.check_all_taken(config)
        weights.release()
        try:
            model.numerics_fingerprint = numerics_fingerprint(model)
        except InexactKernelsError as error:
            faults.append(f"{packing}: {error}")
            get_logger().warning("packing.inexact", packing=packing, fault=str(error))
        else:
            return model
    raise ConfigError(f"no weight packing is exact on this machine ({'; '.join(faults)})")


class Weights:
    """The tensors of a checkpoint by their Hugging Face name; counts which were taken."""

    def __init__(self, model_dir: Path) -> None:
        self.files = [SafetensorsFile(path) for path in _weight_files(model_dir)]
        self._file_of = {
            _canonical(name): (file, name) for file in self.files for name in file.names
        }
        self._left = set(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the text model's tensors, as `model.` and `lm_head.` write them."""
        return tuple(name for name in self._file_of if not IGNORED_TENSORS.match(name))

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
        return tensor

    def check_all_taken(self, config: ModelConfig) -> None:
        """Raise ConfigError naming tensors that no parameter took."""
        if config.has_tied_embeddings:
            self._left.discard("lm_head.weight")  # some savers write the tied head once more
        if self._left:
            names = ", ".join(sorted(self._left)[:5])
            raise ConfigError(
                f"{len(self._left)} tensors are not part of a {config.model_type} model: {names}"
            )

    def release(self) -> None:
        """Give the mapped pages back to the system; they are read again when touched."""
        for file in self.files:
            file.release()


class _Builder:
    """Turns checkpoint tensors into layers."""

    def __init__(self, config: ModelConfig, weights: Weights, packing: Packing) -> None:
        self._config = config
        self._weights = weights
        self._packing = packing
        self._ropes = {
            (rope, head_dim): RopeTable(rope, head_dim)
            for rope, head_dim in {(spec.rope, spec.head_dim) for spec in config.layers}
            if rope is not None
        }

    def build(self, model_fingerprint: str) -> Model:
        config, weights = self._config, self._weights
        size = (config.vocab_size, config.hidden_size)
        embedding = weights.take("model.embed_tokens.weight", *size)
        head = embedding if config.has_tied_embeddings else weights.take("lm_head.weight", *size)
        # Packing is one thread's work for each matrix and lets go of the interpreter.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            layers = pool.map(self._block, range(len(config.layers)))
            lm_head = pack(head, self._packing, pool=pool)
        return Model(
            config,
            embed_tokens=Embedding(
                weight=embedding,
                scale=config.embedding_scale,
                is_half=self._packing == "fbgemm-fp16",
            ),
            layers=list(layers),
            norm=self._norm("model.norm"),
            lm_head=lm_head,
            packing=self._packing,
            model_fingerprint=model_fingerprint,
        )

    def _block(self, layer: int) -> Block:
        config = self._config
        name = f"model.layers.{layer}."
        post = config.has_post_norms
        return Block(
            input_layernorm=self._norm(name + "input_layernorm"),
            self_attn=self._gqa(config.layers[layer], name + "self_attn."),
            post_attention_norm=self._norm(name + "post_attention_layernorm") if post else None,
            pre_mlp_norm=self._norm(
                name + ("pre_feedforward_layernorm" if post else "post_attention_layernorm")
            ),
            mlp=self._mlp(name + "mlp."),
            post_mlp_norm=self._norm(name + "post_feedforward_layernorm") if post else None,
        )

    def _gqa(self, spec: GqaSpec, name: str) -> GqaMixer:
        hidden = self._config.hidden_size
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        assert spec.rope is not None, "refused with the model's config"
        order = pair_order(spec.head_dim, spec.rope)
        q, k = (
            self._weights.take(f"{name}{part}_proj.weight", rows, hidden)
            .view(-1, spec.head_dim, hidden)[:, order]
            .flatten(0, 1)
            for part, rows in (("q", q_rows), ("k", kv_rows))
        )
        v = self._weights.take(name + "v_proj.weight", kv_rows, hidden)
        return GqaMixer(
            spec,
            qkv_proj=pack(torch.cat([q, k, v]), self._packing),
            o_proj=self._linear((name + "o_proj", hidden), num_inputs=q_rows),
            qk_norm=self._qk_norm(spec, name) if spec.has_qk_norm else None,
            rope=self._ropes[spec.rope, spec.head_dim],
        )

    def _qk_norm(self, spec: GqaSpec, name: str) -> RmsNorm:
        order = pair_order(spec.head_dim, spec.rope)
        q = self._weights.take(name + "q_norm.weight", spec.head_dim)[order].float()
        k = self._weights.take(name + "k_norm.weight", spec.head_dim)[order].float()
        return RmsNorm(
            torch.cat([q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)]),
            self._config.norm_eps,
            has_unit_offset=self._config.has_unit_offset_norms,
        )

    def _mlp(self, name: str) -> GatedMlp:
        hidden, num_ffn = self._config.hidden_size, self._config.intermediate_size
        return GatedMlp(
            self._linear(
                (name + "gate_proj", num_ffn), (name + "up_proj", num_ffn), num_inputs=hidden
            ),
            self._linear((name + "down_proj", hidden), num_inputs=num_ffn),
            self._config.activation,
            num_ffn,
        )

    def _linear(self, *parts: tuple[str, int], num_inputs: int) -> Linear:
        """One linear layer whose output rows are those of the parts, one after another."""
        weights = [self._weights.take(f"{name}.weight", rows, num_inputs) for name, rows in parts]
        return pack(weights[0] if len(weights) == 1 else torch.cat(weights), self._packing)

    def _norm(self, name: str) -> RmsNorm:
        config = self._config
        weight = self._weights.take(name + ".weight", config.hidden_size)
        return RmsNorm(weight, config.norm_eps, has_unit_offset=config.has_unit_offset_norms)


def weights_fingerprint(model_dir: Path) -> str:
    """Return the sha256 over the bytes of the directory's safetensors files, in order of name."""
    return _hash_files([SafetensorsFile(path) for path in _weight_files(model_dir)])


def _hash_files(files: list[SafetensorsFile]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.data)
    return digest.hexdigest()


def _model_fingerprint(model_dir: Path, weights: Weights) -> str:
    path = model_dir / "prfaas.json"
    if path.exists():
        recorded = _read_json(path).get("model_fingerprint")
        if not isinstance(recorded, str) or not recorded:
            raise ConfigError(f"{path} names no model_fingerprint")
        return recorded
    return _hash_files(weights.files)


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value
