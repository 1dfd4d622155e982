"""`prfaas profile` writes what plans, simulations and nodes read, and says early what is wrong."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prfaas.cli.main import main
from prfaas.cli.profile import write_file
from prfaas.config.profiles import read_kv_layout, read_profile
from prfaas.errors import ConfigError
from tests.cli.node_processes import free_port
from tests.config.plan_files import PLAN, UNSET, WORKLOAD, changed, toml
from tests.tiny_models import write_tiny_model

SMALL = (
    *("--threads", "1", "--cache-ram", "32MiB", "--kv-ram-bytes", "64MiB", "--seconds", "0.1"),
    *("--max-context-tokens", "200", "--max-batch-sequences", "2", "--chunk-tokens", "64"),
)


@pytest.fixture
def environment(tmp_path, monkeypatch) -> None:
    """A models directory of its own, and thread counts that the command may set."""
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def profile(path: Path, *arguments: str) -> Result:
    return run("profile", "-o", str(path), *arguments)


def test_a_measured_file_feeds_plans_and_simulations(tmp_path, environment):
    model, path = write_tiny_model(tmp_path / "tiny", "gemma3"), tmp_path / "here.toml"
    done = profile(path, "--model", str(model), *SMALL, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [row["tokens"] for row in report["prefill"]][:2] == [64, 128]
    assert [row["batch"] for row in report["decode"]] == [1, 2]
    found = read_profile(path)
    assert found.name == "tiny"
    for row in report["prefill"]:
        assert found.prefill_s(row["tokens"]) == pytest.approx(row["seconds"], rel=1e-4)
        assert found.kv_bytes(row["tokens"]) == row["kv_bytes"]
        layout = read_kv_layout(path, 64)
        assert layout is not None
        assert layout.bytes_needed(row["tokens"]) == row["transfer_bytes"]

    plan = changed(changed(PLAN, "compare", UNSET), "published", UNSET)
    plan["profiles"] = dict.fromkeys(("local", "prfaas"), "here.toml")
    plan["min_decode_tokens_per_s"] = 0.001
    plan["deployments"] = {"a": {"kind": "prfaas", "prfaas_gpus": 1, "local_gpus": 2}}
    (tmp_path / "workload.toml").write_text(toml(WORKLOAD))
    (tmp_path / "plan.toml").write_text(toml(plan))
    planned = run("plan", str(tmp_path / "plan.toml"), "--json")
    assert planned.exit_code == 0, planned.output
    figures = json.loads(planned.stdout)
    assert figures["deployments"]["a"]["lambda_max_rps"] > 0
    assert set(figures["provenance"]["a"].values()) == {"independent"}
    simulated = run(
        "simulate", str(tmp_path / "plan.toml"), "--rate", "0.001", "--requests", "20", "--json"
    )
    assert simulated.exit_code == 0, simulated.output

    again = profile(path, "--model", str(model), *SMALL)
    assert again.exit_code == 2
    assert f"{path} exists; --force replaces it" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--model", "nowhere"), 2, "'nowhere' is neither a fetched model nor a GGUF file"),
        (("--peer", "nowhere"), 2, "--peer: expected host:port"),
        (("--peer", "192.0.2.1:9"), 2, "--allow-plaintext"),
        (("--seconds", "0"), 2, "--seconds"),
        (("--seconds", "nan"), 2, "nan is not a finite number"),
        (("--chunk-tokens", "100"), 2, "--chunk-tokens: 100 is no multiple of the block"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tmp_path, environment, arguments, status, says):
    done = profile(tmp_path / "p.toml", *arguments)
    assert done.exit_code == status
    assert says in done.stderr
    assert "Traceback" not in done.output
    assert list(tmp_path.glob("*p.toml*")) == []


def test_a_peer_that_is_not_there_is_said_before_the_model_is_loaded(tmp_path, environment):
    address = f"127.0.0.1:{free_port()}"
    done = profile(tmp_path / "p.toml", "--model", "nowhere", "--peer", address)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith(f"prfaas: peer {address}")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (".", "is a directory"),
        ("nowhere/p.toml", "there is no directory"),
        ("old.toml", "exists; --force replaces it"),
    ],
)
def test_a_file_that_cannot_be_written_is_said_first(tmp_path, environment, name, says):
    (tmp_path / "old.toml").write_text("kept")
    done = profile(tmp_path / name, "--model", "nowhere")
    assert done.exit_code == 2
    assert says in done.stderr
    assert (tmp_path / "old.toml").read_text() == "kept"


def test_a_replayed_engine_is_not_measured(tmp_path, environment, monkeypatch):
    monkeypatch.setenv("PRFAAS_ENGINE", "replay")
    monkeypatch.setenv("PRFAAS_PROFILE", "p.toml")
    done = profile(tmp_path / "p.toml")
    assert done.exit_code == 2
    assert "profile measures a model" in done.stderr


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "p.toml"
    write_file(path, "one")
    write_file(path, "two")
    assert path.read_text() == "two"
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"^cannot write .*p\.toml: Is a directory$"):
        write_file(path, "three")
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.toml"]
