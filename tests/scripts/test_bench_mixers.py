"""scripts/bench/mixers.py: what it measures, and the JSON that it writes."""

import json

import pytest
import torch

from prfaas.engine.config import model_from_hf
from scripts.bench import mixers
from scripts.bench.mixer_families import FAMILIES, SHARED


def test_every_linear_mixer_latent_attention_and_windows_are_measured() -> None:
    kinds = {
        family.name.split("-")[0]: model_from_hf(SHARED | family.config).layers[family.layer]
        for family in FAMILIES
    }
    assert kinds.pop("swa").window_tokens == 512
    assert {name: spec.mixer for name, spec in kinds.items()} == {
        name: name for name in ("gdn", "kda", "lightning", "mamba2", "shortconv", "mla")
    }


def test_a_family_left_out_at_transformers_says_why() -> None:
    for family in FAMILIES:
        assert (family.attribute is not None and family.most_tokens is None) != bool(
            family.left_out
        )


@pytest.mark.slow
def test_the_json_names_rates_and_growth(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    mixers.main(
        [
            *("--mixers", "lightning-ring"),
            *("--tokens", "70", "512"),
            *("--chunk-tokens", "64"),
            *("--runs", "1", "--threads", "1", "--json"),
        ]
    )
    assert torch.get_num_threads() == before
    report = json.loads(capsys.readouterr().out)
    assert report["threads"] == 1
    assert [row["tokens"] for row in report["rows"]] == [70, 512]
    assert all(row["prfaas_tokens_per_s"] > 0 for row in report["rows"])
    assert all(row["transformers_left_out"] for row in report["rows"])
    [decode] = report["decode"]
    assert decode["grid_ms_per_token"] > 0
    assert decode["strict_ms_per_token"] > 0
    [growth] = report["growth"]
    assert (growth["tokens"], growth["longer_tokens"]) == (64, 512)
    assert growth["growth"] > 0
