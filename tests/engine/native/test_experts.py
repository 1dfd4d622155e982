"""The choice of experts: ties by number, rows by themselves, weights as float64 has them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.ffn_spec import MoeSpec
from prfaas.engine.native.experts import choose_experts
from prfaas.errors import ConfigError

SOFTMAX = MoeSpec(num_experts=13, experts_per_token=3, intermediate_size=1)
SIGMOID = MoeSpec(
    num_experts=24,
    experts_per_token=4,
    intermediate_size=1,
    router="sigmoid",
    routed_scale=2.5,
    num_groups=6,
    groups_per_token=2,
)
TOP_SOFTMAX = replace(SOFTMAX, router="top_softmax", num_experts=8)
SPECS = [
    SOFTMAX,
    replace(SOFTMAX, is_renormalised=False),
    replace(SOFTMAX, num_experts=1, experts_per_token=1),
    SIGMOID,
    replace(SIGMOID, num_experts=6, experts_per_token=2),
    replace(SIGMOID, num_groups=1, groups_per_token=1),
    TOP_SOFTMAX,
    replace(TOP_SOFTMAX, experts_per_token=8),
]


def expected(logits_E: list[float], bias_E: list[float], spec: MoeSpec) -> list[tuple[int, float]]:
    """The choice by Python's stable sort of float32 sums, and the weights in float64."""
    x = torch.tensor(logits_E, dtype=torch.float64)
    scores = x.sigmoid() if spec.router == "sigmoid" else x.softmax(0)
    selection = [
        float(a + b)
        for a, b in zip(scores.float() if spec.router != "top_softmax" else x.float(),
                        torch.tensor(bias_E), strict=True)
    ]  # fmt: skip
    size = spec.num_experts // spec.num_groups
    groups = [sorted(selection[g * size : (g + 1) * size])[-2:] for g in range(spec.num_groups)]
    best = sorted(range(spec.num_groups), key=lambda g: -sum(groups[g]))[: spec.groups_per_token]
    open_ = [e for e in range(spec.num_experts) if e // size in best]
    chosen = sorted(open_, key=lambda e: -selection[e])[: spec.experts_per_token]
    weights = scores[chosen]
    if spec.is_renormalised or spec.router == "top_softmax":
        weights = weights / weights.sum()
    return list(zip(chosen, (weights * spec.routed_scale).tolist(), strict=True))


def rows_of(spec: MoeSpec, num_rows: int) -> Tensor:
    """Logits of few values, so that many are equal, and of equal bits after any score."""
    generator = torch.Generator().manual_seed(spec.num_experts)
    return torch.randint(-3, 4, (num_rows, spec.num_experts), generator=generator) / 2


@pytest.mark.parametrize("spec", SPECS)
def test_the_best_experts_are_chosen_and_of_equals_the_first(spec: MoeSpec) -> None:
    logits_TE = rows_of(spec, 60)
    chosen_TK, weights_TK = choose_experts(logits_TE, None, spec)
    for row, logits_E in enumerate(logits_TE.tolist()):
        wanted = expected(logits_E, [0.0] * spec.num_experts, spec)
        assert chosen_TK[row].tolist() == [expert for expert, _ in wanted]
        assert weights_TK[row].tolist() == pytest.approx([w for _, w in wanted], rel=1e-5)


def test_a_bias_joins_the_choice_and_not_the_weights() -> None:
    spec = replace(SIGMOID, num_groups=1, groups_per_token=1)
    logits_TE, bias_E = rows_of(spec, 20), torch.arange(24) % 5 / 4.0
    chosen_TK, weights_TK = choose_experts(logits_TE, bias_E, spec)
    for row, logits_E in enumerate(logits_TE.tolist()):
        wanted = expected(logits_E, bias_E.tolist(), spec)
        assert chosen_TK[row].tolist() == [expert for expert, _ in wanted]
        assert weights_TK[row].tolist() == pytest.approx([w for _, w in wanted], rel=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spec", SPECS)
def test_a_rows_bits_are_its_own(spec: MoeSpec, threads: int) -> None:
    wide = torch.randn(1200, spec.num_experts + 3, generator=torch.Generator().manual_seed(0))
    logits_TE = wide[:, : spec.num_experts]
    torch.set_num_threads(threads)
    try:
        chosen_TK, weights_TK = choose_experts(logits_TE, None, spec)
    finally:
        torch.set_num_threads(1)
    for row in (0, 1, 7, 8, 599, 1199):
        chosen_1K, weights_1K = choose_experts(logits_TE[row : row + 1].clone(), None, spec)
        assert torch.equal(chosen_1K[0], chosen_TK[row])
        assert torch.equal(weights_1K[0], weights_TK[row])


@settings(max_examples=50)
@given(st.integers(0, 12), st.sampled_from([SOFTMAX, replace(SOFTMAX, router="sigmoid")]))
def test_a_score_that_is_no_number_is_seen_in_the_weights(place: int, spec: MoeSpec) -> None:
    logits_TE = rows_of(spec, 1)
    logits_TE[0, place] = float("nan")
    chosen_TK, weights_TK = choose_experts(logits_TE, None, spec)
    assert weights_TK.isnan().any()
    assert 0 <= int(chosen_TK.min()) <= int(chosen_TK.max()) < spec.num_experts


@pytest.mark.parametrize("spec", SPECS)
def test_no_expert_is_chosen_twice_where_none_can_be_wanted(spec: MoeSpec) -> None:
    logits_TE = rows_of(spec, 20)
    bias_E = torch.full((spec.num_experts,), float("-inf"))
    chosen_TK, _ = choose_experts(logits_TE, bias_E, spec)
    for chosen in chosen_TK.tolist():
        assert len(set(chosen)) == spec.experts_per_token
        assert all(0 <= expert < spec.num_experts for expert in chosen)


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"experts_per_token": 14}, "14 experts a token, of 13"),
        ({"experts_per_token": 0}, "0 experts a token, of 13"),
        ({"num_groups": 2}, "13 experts are not in 2 equal groups"),
        ({"num_groups": 0}, "13 experts are not in 0 equal groups"),
        ({"num_groups": 13, "groups_per_token": 14}, "14 of 13 groups"),
        ({"num_groups": 13, "groups_per_token": 2}, "3 experts a token, of 2"),
    ],
)
def test_a_choice_that_there_is_not_is_refused(changes: dict[str, Any], numbers: str) -> None:
    with pytest.raises(ConfigError, match=numbers):
        replace(SOFTMAX, **changes)


def test_no_rows_are_no_rows() -> None:
    chosen_TK, weights_TK = choose_experts(torch.empty(0, 13), None, SOFTMAX)
    assert chosen_TK.shape == weights_TK.shape == (0, 3)
