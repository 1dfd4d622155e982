"""scripts/bench/quality.py: what is scored, and how two engines are compared."""

import json
import math
from typing import ClassVar

import numpy as np
import pytest

from prfaas.engine.loader import load_model
from prfaas.engine.model import Segment
from prfaas.engine.options import EngineOptions
from prfaas.models.directory import ENVIRONMENT_VARIABLE
from prfaas.text.tokenizer import Tokenizer
from scripts.bench import quality
from scripts.bench.engine_ours import Ours
from scripts.bench.engine_peers import PeerMissingError
from tests.tiny_models import BOS_ID, VOCAB_SIZE, write_tiny_model

WINDOWS = [[0, 1, 2, 1], [0, 2, 2, 0]]


def test_a_token_is_scored_by_the_logits_before_it():
    logits = np.full((2, 3, 3), -40.0, np.float32)
    for window in range(2):
        for scored in (0, 1):
            logits[window, scored, WINDOWS[window][scored + 2]] = 0.0
    assert quality.nll(logits, WINDOWS) == pytest.approx([0.0] * 4)
    assert quality.nll(np.zeros_like(logits), WINDOWS) == pytest.approx([math.log(3)] * 4)


def test_differences_are_counted_at_every_scored_position():
    reference = np.zeros((2, 3, 3), np.float32)
    reference[:, :, 0] = 1.0
    logits = reference.copy()
    logits[1, 2, 1] = 2.5
    row = quality.compared("one", {}, logits, reference, WINDOWS)
    assert row.max_logit_difference == 2.5
    assert row.greedy_agreement == pytest.approx(5 / 6, abs=1e-5)
    assert row.perplexity_ratio == 1.0  # nothing is known of the token after the last one
    assert row.mean_logit_difference == pytest.approx(2.5 / 18, abs=1e-6)


def test_the_default_is_measured_first_then_the_other_dtypes_of_a_cpu():
    assert quality.own_dtypes()[0] == EngineOptions().weight_dtype
    assert "float32" in quality.own_dtypes()
    assert "bfloat16" not in quality.own_dtypes()


class Constant:
    """An engine whose logits are all the same, but for the first of each row."""

    about: ClassVar = {"version": "1"}

    def __init__(self, name, command, log, num_threads):
        self._first = float(command[0])

    def run(self, run, windows, num_scored, path):
        assert run == "logits"
        out = np.memmap(path, np.float32, "w+", shape=(len(windows), num_scored, VOCAB_SIZE))
        out[:, :, 0] = self._first

    def close(self):
        pass


def test_every_setting_is_beside_the_reference_and_a_missing_peer_named(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "models"))
    model = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)

    def command(peer, setup):
        if peer == "llama.cpp":
            raise PeerMissingError("not here")
        return ["0"]

    monkeypatch.setattr(quality, "EngineProcess", Constant)
    monkeypatch.setattr(quality, "peer_command", command)
    monkeypatch.setattr(quality, "ours_command", lambda setup: ["1" + "0" * ("16" in setup.dtype)])
    sizes = ["--windows", "2", "--window-tokens", "40", "--scored-tokens", "5"]
    quality.main(["--model", str(model), "--json", *sizes])
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert "without llama.cpp: not here" in output.err
    assert {row["name"]: row["max_logit_difference"] for row in report["rows"]} == {
        "transformers": 0,
        "prfaas float16": 10,
        "prfaas float32": 1,
    }
    assert report["rows"][0]["perplexity"] == pytest.approx(VOCAB_SIZE, rel=1e-3)
    assert report["scored_tokens"] == 8


def test_scored_tokens_decoded_side_by_side_have_the_logits_of_a_prefill(tmp_path):
    model = load_model(write_tiny_model(tmp_path, "llama", num_hidden_layers=1))
    ours = Ours(model, 64)
    windows = [[(7 * at + start) % VOCAB_SIZE for at in range(70)] for start in (5, 300)]
    path = tmp_path / "logits"
    ours.logits(windows, 3, str(path))
    found = np.fromfile(path, np.float32).reshape(2, 3, VOCAB_SIZE)
    for window, rows in zip(windows, found, strict=True):
        for row, num_tokens in zip(rows, (68, 69, 70), strict=True):
            kv = model.new_kv(capacity_tokens=num_tokens)
            whole = Segment(kv=kv, tokens=window[:num_tokens], num_logits=1)
            assert (model.forward([whole]).numpy()[0] == row).all()


def test_windows_begin_with_bos_and_lie_apart(tmp_path):
    tokenizer = Tokenizer.load(write_tiny_model(tmp_path, "llama", num_hidden_layers=1))
    windows = quality.windows_of(tokenizer, 3, 50)
    assert [len(window) for window in windows] == [50, 50, 50]
    assert {window[0] for window in windows} == {BOS_ID}
    assert len({tuple(window) for window in windows}) == 3
