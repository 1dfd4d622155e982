"""Loading: every tensor is used once, and what does not fit is named."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from prfaas.engine.loader import load_model, weights_fingerprint
from prfaas.engine.model import Model, Segment
from prfaas.engine.options import WeightDtype
from prfaas.engine.safetensors_file import SafetensorsFile
from prfaas.errors import ConfigError
from tests.tiny_models import tiny_config, write_tiny_model

Tensors = dict[str, NDArray[Any]]
PROMPT = list(range(10, 60))


def first_logits(model: Model) -> torch.Tensor:
    kv = model.new_kv(capacity_tokens=len(PROMPT))
    return model.forward([Segment(kv=kv, tokens=PROMPT, num_logits=1)])


def change_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def change_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "llama", "llama")


def test_a_sharded_checkpoint_is_the_same_model(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_bytes((llama / "config.json").read_bytes())
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{number}.safetensors"
        save_file({name: tensors[name] for name in part}, sharded / file)
        weight_map |= dict.fromkeys(part, file)
    (sharded / "stray.safetensors").write_bytes(b"not named in the index")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(first_logits(load_model(sharded)), first_logits(load_model(llama)))


def test_a_tensor_that_two_files_hold_is_refused(llama: Path) -> None:
    """Which of them is meant cannot be told; an index may say one thing, a header another."""
    tensors = load_file(llama / "model.safetensors")
    name = "model.norm.weight"
    save_file({name: tensors[name] + 1}, llama / "other.safetensors")
    for weight_map in (
        None,
        dict.fromkeys(tensors, "model.safetensors") | {"x": "other.safetensors"},
    ):
        if weight_map is not None:
            index = llama / "model.safetensors.index.json"
            index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ConfigError, match=r"model\.norm\.weight' is stored twice"):
            load_model(llama)


def test_a_multimodal_checkpoint_gives_its_text_model(tmp_path: Path) -> None:
    text = write_tiny_model(tmp_path / "text", "gemma3")
    both = write_tiny_model(tmp_path / "both", "gemma3")

    def nest(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors["language_model." + name] = tensors.pop(name)
        tensors["vision_tower.patch.weight"] = np.zeros(3, dtype=np.float32)

    change_tensors(both, nest)
    config = {"model_type": "gemma3", "text_config": tiny_config("gemma3")}
    (both / "config.json").write_text(json.dumps(config))
    assert torch.equal(first_logits(load_model(both)), first_logits(load_model(text)))


def test_parts_that_text_does_not_need_are_left_alone(tmp_path: Path) -> None:
    text = write_tiny_model(tmp_path / "text", "qwen3_5")
    both = write_tiny_model(tmp_path / "both", "qwen3_5")

    def nest(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        for name in ("model.visual.patch.weight", "mtp.norm.weight"):
            tensors[name] = np.zeros(3, dtype=np.float32)

    change_tensors(both, nest)
    config = tiny_config("qwen3_5") | {"mtp_num_hidden_layers": 1}
    nested = {"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": True}
    (both / "config.json").write_text(json.dumps(nested))
    assert torch.equal(first_logits(load_model(both)), first_logits(load_model(text)))


def test_layers_that_predict_further_ahead_are_left_alone(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "minimax_m2")
    before = first_logits(load_model(directory))
    further = {"model.layers.3.eh_proj.weight": np.zeros(3, dtype=np.float32)}
    change_tensors(directory, lambda t: t.update(further))
    with pytest.raises(ConfigError, match=r"layers\.3\.eh_proj"):
        load_model(directory)
    change_config(directory, num_nextn_predict_layers=1)
    assert torch.equal(first_logits(load_model(directory)), before)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "qwen3")
    change_tensors(
        directory, lambda t: t.update({"lm_head.weight": 2 * t["model.embed_tokens.weight"]})
    )
    with pytest.raises(ConfigError, match=r"lm_head\.weight.*is not the embedding"):
        load_model(directory)


@pytest.mark.parametrize(
    ("value", "dtype", "named"),
    [
        (np.nan, "float16", "from nan to nan do not fit float16"),
        (7e4, "float16", "to 70000 do not fit float16.*--dtype float32"),
        (np.nan, "float32", "layer 0.*not finite"),
    ],
)
def test_weights_that_are_no_numbers_are_found_at_start(
    llama: Path, value: float, dtype: WeightDtype, named: str
) -> None:
    change_tensors(llama, lambda t: t["model.layers.0.mlp.up_proj.weight"][:1].fill(value))
    with pytest.raises(ConfigError, match=named):
        load_model(llama, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_load_as_their_float32_values(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    short, long = (write_tiny_model(tmp_path / name, "qwen3") for name in ("short", "long"))
    tensors = load_torch(long / "model.safetensors")
    halves = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_torch(halves, short / "model.safetensors")
    save_torch({k: v.float() for k, v in halves.items()}, long / "model.safetensors")
    ours, expected = (load_model(path, dtype="float32") for path in (short, long))
    assert torch.equal(first_logits(ours), first_logits(expected))


def test_a_tied_head_written_twice_is_no_leftover(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "qwen3")
    before = first_logits(load_model(directory))
    change_tensors(
        directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]})
    )
    assert torch.equal(first_logits(load_model(directory)), before)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), "layers.2.mlp.up_proj"),
        (lambda t: t.pop("lm_head.weight"), "lm_head"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(128)}),
            "q_proj.bias",
        ),
        (lambda t: t.update({"model.norm.weight": np.ones(63, dtype=np.float32)}), "model.norm"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(64, dtype=np.int32)}),
            "model.norm.weight.*I32",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    llama: Path, change: Callable[[Tensors], object], named: str
) -> None:
    change_tensors(llama, change)
    with pytest.raises(ConfigError, match=named):
        load_model(llama)


def test_a_checkpoint_of_more_layers_than_its_config_is_refused(llama: Path) -> None:
    change_config(llama, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"9 tensors are not part of.*layers\.3"):
        load_model(llama)


@pytest.mark.parametrize("num_bytes", [0, 5, 100, 100_000])
def test_a_file_that_is_cut_short_is_refused(llama: Path, num_bytes: int) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ConfigError, match=r"model\.safetensors is (not a usable|cut short)"):
        load_model(llama)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "not a JSON object"),
        ("prfaas.json", "{}", "names no model_fingerprint"),
        ("model.safetensors.index.json", "{}", "no weight_map"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "../model.safetensors"}}',
            "not a plain file name",
        ),
    ],
)
def test_a_file_that_says_nothing_usable_is_named(
    llama: Path, name: str, content: str, named: str
) -> None:
    (llama / name).write_text(content)
    with pytest.raises(ConfigError, match=named):
        load_model(llama)


def test_a_directory_without_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no"):
        load_model(llama)


def test_the_model_fingerprint_is_the_recorded_one_or_a_hash_of_the_weights(llama: Path) -> None:
    hashed = hashlib.sha256((llama / "model.safetensors").read_bytes()).hexdigest()
    assert load_model(llama).model_fingerprint == weights_fingerprint(llama) == hashed
    (llama / "prfaas.json").write_text(json.dumps({"model_fingerprint": "abc"}))
    assert load_model(llama).model_fingerprint == "abc"


def test_pages_are_given_back_while_a_model_is_packed(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[SafetensorsFile] = []

    def release(file: SafetensorsFile) -> None:
        released.append(file)

    monkeypatch.setattr("prfaas.engine.loading.checkpoint.RELEASE_BYTES", 100_000)
    monkeypatch.setattr(SafetensorsFile, "release", release)
    load_model(llama, dtype="float32")
    size = (llama / "model.safetensors").stat().st_size
    assert len(released) > size // 200_000
