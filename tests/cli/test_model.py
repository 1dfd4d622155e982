"""`prfaas model` shows what is here and explains what is not."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prfaas.cli.main import main
from prfaas.models.manifest import Manifest, write_manifest
from tests.tiny_models import write_tiny_model


@pytest.fixture
def models(tmp_path, monkeypatch):
    """An empty models directory."""
    path = tmp_path / "models"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(path))
    return path


def model(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["model", *arguments])


def install(models: Path, name: str) -> Path:
    """Put a tiny model where a fetch of `name` would."""
    directory = write_tiny_model(models / name.replace("/", "--"), "gemma3")
    write_manifest(directory, Manifest(model_fingerprint="f" * 64, source={"kind": "test"}))
    return directory


def test_an_empty_directory_lists_what_can_be_fetched(models):
    result = model("list")
    assert result.exit_code == 0
    assert "prfaas model fetch gemma-3-270m" in result.stdout
    assert "prfaas model fetch smollm2-135m-instruct" in result.stdout
    assert str(models) in result.stderr


def test_a_model_is_listed_with_its_size_and_place(models):
    directory = install(models, "owner/tiny")
    num_bytes = sum(file.stat().st_size for file in directory.iterdir())
    (line,) = [line for line in model("list").stdout.splitlines() if "owner/tiny" in line]
    assert line.split() == ["owner/tiny", f"{num_bytes / 1e6:,.1f}", "MB", str(directory)]


def test_a_model_that_is_here_is_not_fetched_again(models):
    directory = install(models, "gemma-3-270m")
    result = model("fetch", "gemma-3-270m")
    assert result.exit_code == 0
    assert result.stdout == f"{directory}\n"
    assert "Gemma Terms of Use" in result.stderr


def test_quiet_says_where_the_model_is_and_nothing_else(models):
    directory = install(models, "gemma-3-270m")
    result = model("fetch", "--quiet", "gemma-3-270m")
    assert (result.stdout, result.stderr) == (f"{directory}\n", "")


def test_path_names_the_directory_of_a_name(models):
    assert model("path", "tiny").exit_code == 2
    directory = install(models, "tiny")
    assert model("path", "tiny").stdout == f"{directory}\n"


def test_inspect_shows_the_layers_and_what_has_to_move(models):
    install(models, "tiny")
    rows = dict(line.split(maxsplit=1) for line in model("inspect", "tiny").stdout.splitlines()[:6])
    assert rows["family"] == "gemma3_text"
    assert rows["context"] == "16,384 tokens"
    assert rows["layers"] == "7, 2 of full attention, 5 with a window of 16 tokens"
    assert rows["template"] == "none: plain transcript"
    # Two layers, K and V of one head of 32, four bytes each.
    assert rows["KVCache"] == f"{2 * 2 * 32 * 4:,} bytes for each token, float32"


def test_inspect_shows_no_length_beyond_the_context(models):
    install(models, "tiny")
    lengths = [
        line.split()[1].rstrip(":")
        for line in model("inspect", "tiny").stdout.splitlines()
        if line.strip().startswith("at ")
    ]
    assert lengths == ["1,024", "4,096", "8,192"]


def test_a_removed_model_is_gone(models):
    directory = install(models, "tiny")
    assert model("remove", "tiny").exit_code == 0
    assert not directory.exists()
    assert model("remove", "tiny").exit_code == 2


@pytest.mark.parametrize("name", ["no-such-model", "../evil", "a/b/c", ""])
def test_a_name_that_cannot_be_fetched_is_one_line(models, name):
    result = model("fetch", name)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("prfaas: ")
