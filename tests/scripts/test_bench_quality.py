"""scripts/bench/quality.py: what is scored, and how two engines are compared."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from prfaas.engine.options import EngineOptions
from prfaas.models.directory import ENVIRONMENT_VARIABLE
from prfaas.text.tokenizer import Tokenizer
from scripts.bench import quality
from scripts.bench.engine_peers import PeerMissingError, ours_command
from tests.tiny_models import BOS_ID, write_tiny_model

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


@pytest.mark.slow
def test_the_json_has_every_setting_beside_the_reference(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "models"))
    model = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)

    def command(peer, setup):  # the reference needs seconds to be imported
        if peer == "llama.cpp":
            raise PeerMissingError("not here")
        return ours_command(replace(setup, dtype="float32"))

    monkeypatch.setattr(quality, "peer_command", command)
    monkeypatch.setattr(quality, "own_dtypes", lambda: ["float16"])
    sizes = ["--windows", "2", "--window-tokens", "40", "--scored-tokens", "5"]
    quality.main(["--model", str(model), "--threads", "1", "--json", *sizes])
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert "without llama.cpp: not here" in output.err
    [reference, row] = report["rows"]
    assert (reference["name"], row["name"]) == ("transformers", "prfaas float16")
    assert reference["max_logit_difference"] == 0
    assert 0 < row["max_logit_difference"] < 0.1
    assert row["perplexity"] == pytest.approx(reference["perplexity"], rel=0.01)
    assert report["scored_tokens"] == 8


def test_windows_begin_with_bos_and_lie_apart(tmp_path):
    tokenizer = Tokenizer.load(write_tiny_model(tmp_path, "llama", num_hidden_layers=1))
    windows = quality.windows_of(tokenizer, 3, 50)
    assert [len(window) for window in windows] == [50, 50, 50]
    assert {window[0] for window in windows} == {BOS_ID}
    assert len({tuple(window) for window in windows}) == 3
