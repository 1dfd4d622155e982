"""scripts/bench/mixers.py: what it measures, and the JSON that it writes."""

import json
import math

import pytest
import torch

from prfaas.engine.config import model_from_hf
from scripts.bench import mixers
from scripts.bench.mixer_families import FAMILIES, SHARED
from scripts.bench.mixer_sequential import convolved, decayed, delta, routed, sequential


def test_every_linear_mixer_latent_attention_and_windows_are_measured() -> None:
    kinds = {
        family.name.split("-")[0]: model_from_hf(SHARED | family.config).layers[family.layer]
        for family in FAMILIES
        if family.part == "mixer"
    }
    assert kinds.pop("swa").window_tokens == 512
    assert {name: spec.mixer for name, spec in kinds.items()} == {
        name: name for name in ("gdn", "kda", "lightning", "mamba2", "shortconv", "mla")
    }


def test_every_recurrence_and_the_experts_are_walked_token_by_token() -> None:
    for family in FAMILIES:
        walked = sequential(family)
        has_states = bool(model_from_hf(SHARED | family.config).layers[family.layer].states)
        assert (walked is not None) == (has_states or family.part == "ffn"), family.name
        if walked is not None:
            y_TD = walked(torch.randn(3, SHARED["hidden_size"]))
            assert y_TD.shape == (3, SHARED["hidden_size"])
            assert y_TD.isfinite().all()


def test_the_delta_rule_replaces_what_a_key_had() -> None:
    v = torch.randn(3, 2, dtype=torch.float64)
    keys = torch.eye(4, dtype=torch.float64)[[0, 1, 0], None]
    ones = torch.ones(3, 1, 4, dtype=torch.float64)
    out = delta(keys, keys, v[:, None], ones, torch.ones(3, 1, dtype=torch.float64))
    assert torch.allclose(out[:, 0], v)  # each key gives back its own latest value


def test_a_decayed_state_is_the_sum_over_all_tokens_so_far() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 2, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    decay = torch.rand(5, 2, generator=generator, dtype=torch.float64)
    expected = torch.zeros(5, 2, 3, dtype=torch.float64)
    for t in range(5):
        for i in range(t + 1):
            weight = decay[i + 1 : t + 1].prod(0) * (q[t] * k[i]).sum(1)
            expected[t] += weight[:, None] * v[i]
    assert torch.allclose(decayed(q, k, v, decay), expected)


def test_a_convolution_sees_what_came_before_it_alone() -> None:
    x_TD = torch.tensor([[1.0], [10.0], [100.0]])
    assert convolved(x_TD, torch.tensor([[2.0, 3.0]])).flatten().tolist() == [3.0, 32.0, 320.0]


def test_a_token_goes_to_its_best_experts_by_weight() -> None:
    x_TD = torch.tensor([[1.0, 0.0]])
    router = torch.tensor([[0.0, 0.0], [5.0, 0.0], [5.0, 0.0]])
    gate_up = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    experts = [(gate_up, torch.full((2, 1), float(scale))) for scale in (100, 1, 3)]
    silu = 1 / (1 + math.exp(-1))
    assert torch.allclose(routed(x_TD, router, experts, 2), torch.full((1, 2), 2 * silu))


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
    assert all(row["sequential_tokens_per_s"] > 0 for row in report["rows"])
    [decode] = report["decode"]
    assert decode["ms_per_token"] > 0
    [growth] = report["growth"]
    assert (growth["tokens"], growth["longer_tokens"]) == (64, 512)
    assert growth["growth"] > 0
