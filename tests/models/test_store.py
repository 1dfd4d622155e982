import json
import os
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.models.manifest import Manifest, read_manifest, write_manifest
from prfaas.models.store import installed, remove, resolve
from prfaas.models.weights import identify_weights
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import write_tiny_model

READY = {"config.json", "tokenizer.json", "model.safetensors", "prfaas.json"}


class Stages(list[str]):
    """A progress that keeps each stage's name once."""

    def __call__(self, stage: str, _done: int, _total: int) -> None:
        if stage not in self:
            self.append(stage)


def fingerprint(directory: Path) -> str:
    manifest = read_manifest(directory)
    assert manifest is not None
    return manifest.model_fingerprint


def test_a_gguf_file_is_converted_once(root: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny model.gguf")
    first, second = Stages(), Stages()
    directory = resolve(str(path), first)
    assert {file.name for file in directory.iterdir()} >= READY
    assert directory.is_relative_to(root)
    assert resolve(str(path), second) == directory
    assert first == ["Building the tokenizer", "Converting the weights"]
    assert second == []


def test_a_gguf_file_that_changed_is_converted_again(root: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    before = fingerprint(resolve(str(path)))
    write_tiny_gguf(path, seed=1)
    os.utime(path, ns=(1, 1))
    assert fingerprint(resolve(str(path))) != before
    assert len(list((root / ".converted").iterdir())) == 1


def test_two_gguf_files_of_one_name_do_not_share_a_directory(root: Path, tmp_path: Path) -> None:
    found = []
    for seed in range(2):
        (tmp_path / str(seed)).mkdir()
        path = write_tiny_gguf(tmp_path / str(seed) / "tiny.gguf", seed=seed)
        found.append(fingerprint(resolve(str(path))))
    assert found[0] != found[1]


def test_a_hugging_face_directory_is_left_alone_and_hashed_once(root: Path, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "tiny", "qwen3")
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    first, second = Stages(), Stages()
    directory = resolve(str(source), first)
    assert first == ["Hashing the weights"]
    assert resolve(str(source), second) == directory
    assert second == []
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    assert {file.name for file in directory.iterdir()} == {*before, "prfaas.json"}
    for name, data in before.items():
        assert (directory / name).read_bytes() == data
    assert fingerprint(directory) == identify_weights(
        [source / "model.safetensors"], lambda _done: None
    )


def test_a_directory_that_changed_is_hashed_again(root: Path, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "tiny", "qwen3")
    before = fingerprint(resolve(str(source)))
    write_tiny_model(source, "qwen3", seed=1)
    os.utime(source / "model.safetensors", ns=(1, 1))
    assert fingerprint(resolve(str(source))) != before
    (source / "chat_template.jinja").write_text("new")
    assert (resolve(str(source)) / "chat_template.jinja").read_text() == "new"


def test_one_model_has_one_identity_however_it_is_given(root: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    converted = resolve(str(path))
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in READY - {"prfaas.json"}:
        (copy / name).write_bytes((converted / name).read_bytes())
    assert fingerprint(resolve(str(copy))) == fingerprint(converted)


def ready(root: Path, name: str) -> Path:
    directory = write_tiny_model(root / name, "llama")
    write_manifest(directory, Manifest(model_fingerprint="f" * 64, source={"kind": "hub"}))
    return directory


def test_a_fetched_name_is_its_directory(root: Path) -> None:
    root.mkdir(mode=0o700)
    plain, repo = ready(root, "x"), ready(root, "owner--x")
    assert resolve("x") == plain
    assert resolve("owner/x") == repo
    assert resolve(str(plain)) == plain


def test_a_fetched_model_of_an_older_format_is_made_again_from_its_file(root: Path) -> None:
    directory = root / "tiny"
    directory.mkdir(parents=True, mode=0o700)
    write_tiny_gguf(directory / "source.gguf")
    write_manifest(directory, Manifest(model_fingerprint="f", source={}))
    fields = json.loads((directory / "prfaas.json").read_text())
    (directory / "prfaas.json").write_text(json.dumps(fields | {"format_version": 0}))
    assert resolve("tiny") == directory
    assert {file.name for file in directory.iterdir()} >= {*READY, "source.gguf"}
    assert len(fingerprint(directory)) == 64


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "not the name of a model"),
        ("a\0b", "not the name of a model"),
        ("../evil", "neither a fetched model nor a GGUF file"),
        ("a/b", "neither a fetched model nor a GGUF file"),
        ("/no/such/file.gguf", "neither a fetched model nor a GGUF file"),
        ("x" * 300, "cannot use|neither"),
        ("x/" * 3000, "cannot use|neither"),
        ("gemma-3-270m", "not here yet: run `prfaas model fetch gemma-3-270m`"),
    ],
)
def test_what_is_no_model_is_a_clear_error(root: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(name)
    assert len(str(caught.value)) < 1000
    assert not root.exists()


def test_a_file_that_is_no_gguf_and_a_directory_that_is_no_checkpoint_are_named(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"notes\.txt is not a usable GGUF"):
        resolve(str(tmp_path / "notes.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty is no Hugging Face checkpoint"):
        resolve(str(tmp_path / "empty"))
    assert not list(root.glob(".partial*"))
    assert not list(root.glob(".converted/*"))


def test_fetched_models_are_listed_by_name_and_removed(root: Path, tmp_path: Path) -> None:
    assert installed() == []
    root.mkdir(mode=0o700)
    ready(root, "b")
    ready(root, "owner--a")
    resolve(str(write_tiny_model(tmp_path / "linked", "llama")))
    assert [model.name for model in installed()] == ["b", "owner/a"]
    assert installed()[0].num_bytes == sum(file.stat().st_size for file in (root / "b").iterdir())
    remove("owner/a")
    assert [model.name for model in installed()] == ["b"]
    with pytest.raises(ConfigError, match="no fetched model 'owner/a'"):
        remove("owner/a")


def test_removing_follows_no_link_and_leaves_the_directory(root: Path, tmp_path: Path) -> None:
    root.mkdir(mode=0o700)
    outside = write_tiny_model(tmp_path / "outside", "llama")
    (root / "link").symlink_to(outside)
    for name in ("link", "..", "../outside", "."):
        with pytest.raises(ConfigError):
            remove(name)
    assert (outside / "config.json").exists()
