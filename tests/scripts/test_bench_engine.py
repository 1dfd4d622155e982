"""scripts/bench/engine.py: who is measured in what order, in which process, and the JSON that it writes."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import ConfigError
from prfaas.models.directory import ENVIRONMENT_VARIABLE
from scripts.bench import engine, engine_peers
from scripts.bench.engine_pipe import EngineProcess
from tests.tiny_models import write_tiny_model

ROOT = Path(__file__).parents[2]
PLAIN_ENGINE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from scripts.bench.engine_pipe import serve

class Plain:
    about = {{"version": "1"}}
    count = 0

    def step(self):
        self.count += 1
        print("libraries print, too")

    def count_is(self, count):
        assert self.count == count

serve(Plain)
"""


class Scripted:
    """An engine that takes the time it is told, and notes when it was asked."""

    def __init__(self, name: str, asked: list[tuple[str, str]], seconds: list[float]) -> None:
        self.name = name
        self._asked = asked
        self._seconds = iter(seconds)

    def run(self, run: str, *arguments: object, repeat: int = 1) -> float:
        self._asked.append((self.name, run))
        is_counted = run in ("prefill", "step")
        return next(self._seconds) if is_counted else 0.0


@pytest.fixture
def plain(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(PLAIN_ENGINE)
    process = EngineProcess("plain", [sys.executable, str(script)], tmp_path / "log", 1)
    yield process
    process.close()


def wait_until_stopped(process: EngineProcess) -> None:
    """Return once the kernel says so; a signal takes a moment."""
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.001)


def test_an_engine_is_stopped_while_nobody_asks_it(plain):
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    assert plain.about == {"version": "1"}
    wait_until_stopped(plain)
    assert plain.run("step", repeat=3) > 0
    wait_until_stopped(plain)
    plain.run("count_is", 3)


def test_what_an_engine_said_when_it_failed_is_told(plain):
    with pytest.raises(RuntimeError, match="AssertionError"):
        plain.run("count_is", 1)


def test_every_peer_runs_right_after_prfaas_and_ratios_are_of_such_pairs():
    asked: list[tuple[str, str]] = []
    ours: Any = Scripted("prfaas", asked, [9.0, 1.0, 2.0, 4.0, 8.0])
    slow: Any = Scripted("slow", asked, [9.0, 3.0, 8.0])
    fast: Any = Scripted("fast", asked, [9.0, 1.0, 2.0])
    task = engine.Task(name="prefill", context_tokens=8, batch=1, num_rounds=2, num_steps=1)
    row = engine.measure(task, range(100), ours, [slow, fast])
    assert [name for name, _ in asked[3:]] == ["prfaas", "slow", "prfaas", "fast"] * 2
    assert row.ratio_vs == {"slow": 2.5, "fast": 0.375}
    assert row.ratio_range_vs == {"slow": (2.0, 3.0), "fast": (0.25, 0.5)}
    assert row.tokens_per_s == {"prfaas": 2.7, "slow": 1.5, "fast": 5.3}


def test_a_batch_counts_every_sequence_of_every_step_and_is_let_go():
    asked: list[tuple[str, str]] = []
    ours: Any = Scripted("prfaas", asked, [9.0, 2.0])
    task = engine.Task(name="decode", context_tokens=8, batch=4, num_rounds=1, num_steps=16)
    row = engine.measure(task, range(100), ours, [])
    assert row.tokens_per_s == {"prfaas": 32.0}
    assert [run for _, run in asked] == ["begin", "step", "step", "end"]


@pytest.mark.parametrize("peer", ["llama.cpp", "vllm"])
def test_a_missing_peer_comes_with_what_installs_it_apart_from_prfaas(peer, tmp_path):
    with pytest.raises(engine_peers.PeerMissingError) as caught:
        engine_peers.python_of(peer, tmp_path)
    message = str(caught.value)
    assert f"-m venv {tmp_path / peer}" in message
    assert f"{tmp_path / peer / 'bin' / 'python'} -m pip install" in message


def test_an_unknown_model_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="no-such-model"):
        engine.main(["--model", "no-such-model", "--no-peers"])


@pytest.mark.slow
def test_a_run_without_peers_measures_all_tasks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "models"))
    model = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    engine.main(
        [
            *("--model", str(model), "--threads", "1", "--rounds", "1"),
            *("--peer", "llama.cpp", "--peers-dir", str(tmp_path)),
            *("--prefill", "70", "--chunk-tokens", "64"),
            *("--decode-batch", "1", "3", "--decode-context", "8", "--decode-steps", "2"),
            *("--decode-after", "20", "--json"),
        ]
    )
    report = json.loads(capsys.readouterr().out)
    assert " exact " in report["engines"]["prfaas"]["numerics"]
    assert "pip install" in report["missing"]["llama.cpp"]
    found = [(row["name"], row["context_tokens"], row["batch"]) for row in report["rows"]]
    assert found == [("prefill", 70, 1), ("decode", 8, 1), ("decode", 8, 3), ("decode", 20, 1)]
    assert all(row["tokens_per_s"]["prfaas"] > 0 for row in report["rows"])
