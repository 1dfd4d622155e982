"""Experts are read in each form that checkpoints have."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from prfaas.engine.loader import load_model
from prfaas.errors import ConfigError
from tests.engine.test_loader import change_tensors, first_logits
from tests.tiny_models import write_tiny_model


def test_experts_in_one_tensor_are_those_in_many(tmp_path: Path) -> None:
    many = write_tiny_model(tmp_path / "many", "qwen3_5_moe")
    one = write_tiny_model(tmp_path / "one", "qwen3_5_moe")
    tensors = load_file(one / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors[prefix + "gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[prefix + "down_proj"] = down
    save_file(tensors, one / "model.safetensors")
    assert torch.equal(first_logits(load_model(one)), first_logits(load_model(many)))


def test_mxfp4_experts_are_refused_by_name(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "gpt_oss")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    change_tensors(directory, lambda t: t.update({f"{name}_blocks": t.pop(name).astype(np.uint8)}))
    with pytest.raises(ConfigError, match=r"gate_up_proj_blocks' holds MXFP4 weights"):
        load_model(directory)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "kimi_linear")
    change_tensors(
        directory, lambda t: t.pop("model.layers.1.block_sparse_moe.experts.7.w3.weight")
    )
    with pytest.raises(ConfigError, match=r"no tensor .*experts\.7\.w3"):
        load_model(directory)
