import json
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.models.checkpoint import checkpoint_files, weight_files

NAMES = ("config.json", "tokenizer.json", "model.safetensors")


def fill(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).write_text("{}")
    return directory


def index(directory: Path, *names: str) -> None:
    weight_map = {f"t{number}": name for number, name in enumerate(names)}
    text = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(text)


def test_only_files_that_serving_reads_are_taken(tmp_path: Path) -> None:
    fill(tmp_path, *NAMES, "chat_template.jinja", "README.md", "pytorch_model.bin")
    found = {path.name for path in checkpoint_files(tmp_path)}
    assert found == {*NAMES, "chat_template.jinja"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    fill(tmp_path, *NAMES)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=f"no {name}"):
        checkpoint_files(tmp_path)


def test_weights_of_another_kind_are_not_enough(tmp_path: Path) -> None:
    fill(tmp_path, "config.json", "tokenizer.json", "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        checkpoint_files(tmp_path)


def test_an_index_chooses_the_weights(tmp_path: Path) -> None:
    fill(tmp_path, "a.safetensors", "b.safetensors", "consolidated.safetensors")
    index(tmp_path, "b.safetensors", "a.safetensors", "b.safetensors")
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    fill(tmp_path, "a.safetensors")
    index(tmp_path, "a.safetensors", "b.safetensors")
    with pytest.raises(ConfigError, match=r"b\.safetensors, which is not there"):
        weight_files(tmp_path)


def test_an_index_names_no_file_elsewhere(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    fill(tmp_path, "a.safetensors")
    index(inside, "../a.safetensors")
    with pytest.raises(ConfigError, match=r"a\.safetensors"):
        weight_files(inside)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match="not a usable index"):
        weight_files(tmp_path)
