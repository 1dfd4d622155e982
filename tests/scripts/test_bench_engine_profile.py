"""scripts/bench/engine_profile.py: parts that add up to the whole, and the JSON that it writes."""

import json

import pytest
import torch

from prfaas.models.directory import ENVIRONMENT_VARIABLE
from scripts.bench import engine_profile
from tests.tiny_models import write_tiny_model


def test_parts_add_up_to_the_whole():
    totals = {
        "mixer": (6.0, 5.0),
        "projections": (12.0, 2.0),
        "attention": (6.0, 1.5),
        "feed-forward": (6.0, 3.0),
        "head": (1.0, 4.0),
    }
    parts = {name: ms for name, _, ms in engine_profile.parts_of(totals, 14.0)}
    assert parts == {
        "mixer: projections": 2.0,
        "mixer: attention": 1.5,
        "mixer: rest": 1.5,
        "embedding": 0.0,
        "feed-forward": 3.0,
        "head": 4.0,
        "norms, residuals, rest": 2.0,
    }
    assert sum(parts.values()) == 14.0


@pytest.mark.slow
def test_every_part_of_a_model_is_seen(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "models"))
    model = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=2)
    before = torch.get_num_threads()
    sizes = ["--context", "16", "--batch", "2", "--chunk-tokens", "64", "--runs", "2"]
    engine_profile.main(["--model", str(model), "--threads", "1", "--json", *sizes])
    assert torch.get_num_threads() == before
    report = json.loads(capsys.readouterr().out)
    decode, prefill = report["profiles"]
    assert (decode["name"], prefill["name"]) == ("decode, batch 2", "prefill, chunk of 64")
    calls = {part["name"]: part["calls"] for part in decode["parts"]}
    assert calls["mixer: projections"] == 4
    assert calls["mixer: attention"] == calls["feed-forward"] == 2
    assert calls["head"] == calls["embedding"] == 1
    for found in (decode, prefill):
        whole = sum(part["ms"] for part in found["parts"])
        assert whole == pytest.approx(found["profiled_ms"], rel=0.01)
        operators = {operator["name"]: operator["calls"] for operator in found["operators"]}
        assert operators["kernel: attention"] == 2
        assert operators["kernel: product"] >= 8
    assert report["limit_ms"] > 0
