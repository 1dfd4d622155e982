"""`prfaas model` shows what is here and explains what is not."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prfaas.cli.main import main
from prfaas.models.manifest import Manifest, write_manifest
from tests.tiny_models import write_tiny_model

CONFIGS = Path(__file__).parents[2] / "configs" / "models"


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


def rows(*arguments: str) -> dict[str, str]:
    """Return the first line of each label that `inspect` prints."""
    found: dict[str, str] = {}
    for line in model("inspect", *arguments).stdout.splitlines():
        found.setdefault(line[:12].strip(), line[13:])
    return found


def test_inspect_shows_the_layers_and_what_has_to_move(models):
    install(models, "tiny")
    shown = rows("tiny")
    assert shown["family"] == "gemma3_text"
    assert shown["context"] == "16,384 tokens"
    assert shown["layers"] == "7: 2 x (2 gqa window 16, 1 gqa), 1 gqa window 16"
    assert shown["template"] == "none: plain transcript"
    # Two layers, K and V of one head of 32, two bytes each.
    assert shown["KVCache"] == f"{2 * 2 * 32 * 2:,} bytes for each token, bfloat16"
    assert rows("tiny", "--kv-dtype", "float32")["KVCache"] == "512 bytes for each token, float32"
    assert "unsupported" not in shown


def test_inspect_marks_lengths_beyond_the_context(models):
    install(models, "tiny")
    shown = rows("tiny")
    marked = [label for label, value in shown.items() if "longer than the context" in value]
    assert [label for label in shown if label.startswith("at ")] == [
        "at 1,024",
        "at 8,192",
        "at 32,768",
        "at 131,072",
    ]
    assert marked == ["at 32,768", "at 131,072"]


def test_inspect_needs_a_config_and_nothing_else(models, tmp_path):
    config = (CONFIGS / "kimi-linear-48b.json").read_bytes()
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_bytes(config)
    from_directory = model("inspect", str(tmp_path / "alone"))
    from_file = model("inspect", str(CONFIGS / "kimi-linear-48b.json"))
    assert from_directory.exit_code == from_file.exit_code == 0
    assert from_directory.stdout == from_file.stdout
    assert "6 x (3 kda, 1 mla), 2 kda, 1 mla" in from_file.stdout
    assert list(models.iterdir()) == []  # nothing was linked or converted


def test_inspect_says_the_same_in_json():
    facts = json.loads(model("inspect", str(CONFIGS / "internal-1t.json"), "--json").stdout)
    assert facts["kv_bytes"]["1024"] / 2**20 == pytest.approx(190.8, abs=0.05)
    assert facts["kv_bytes"]["8192"] / 2**20 == pytest.approx(308.9, abs=0.05)
    assert sorted(facts["kv_bytes"], key=int) == ["1024", "8192", "32768", "131072"]
    assert facts["kv_bytes"]["131072"] == facts["constant_bytes"] + 131_072 * 17_280
    assert facts["bytes_per_token"] == 17_280
    assert facts["break_even_tokens"] == pytest.approx(10_553, abs=1)
    assert (facts["layers"].count("kda"), facts["layers"].count("mla")) == (42, 15)
    assert [(group["kind"], len(group["layers"])) for group in facts["groups"]] == [
        ("full", 15),
        ("state", 42),
    ]
    assert facts["groups"][1]["states"] == [
        {"name": "conv", "shape": [3, 24_576], "dtype": "activation"},
        {"name": "recurrent", "shape": [64, 128, 128], "dtype": "float32"},
    ]
    assert facts["unsupported"] == []
    assert "num_hidden_layers" in facts["uncertain"]


def test_inspect_of_dense_attention_has_no_constant_and_no_break_even():
    arguments = ("inspect", str(CONFIGS / "minimax-m2.5.json"), "--json", "--kv-dtype", "float32")
    facts = json.loads(model(*arguments).stdout)
    assert (facts["constant_bytes"], facts["break_even_tokens"]) == (0, 0)
    assert facts["kv_bytes"]["1024"] == 2 * 248 * 2**20
    assert facts["kv_dtype"] == "float32"


UNSURE = (CONFIGS / "kimi-linear-48b.json").read_text().replace('"_uncertain"', '"_was"')


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (UNSURE.replace("{", '{"_uncertain": ["a"],', 1), "_uncertain=['a'] is not an object"),
        ('{"model_type": "zamba2"}', "model_type 'zamba2' is not supported"),
        ('{"model_type": "llama"}', "hidden_size"),
        ("[]", "holds a JSON list"),
        ("{", "cannot read"),
    ],
)
def test_inspect_refuses_what_it_cannot_read_in_one_line(tmp_path, text, named):
    (tmp_path / "config.json").write_text(text)
    result = model("inspect", str(tmp_path))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert named in line


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
