"""The largest logit, found from 8 bits a weight: always the one that all logits give."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine import greedy_head
from prfaas.engine.greedy_head import MAX_ROWS, GreedyHead, lowest_equal
from prfaas.engine.linear import Packing, PanelLinear, pack
from prfaas.engine.model import Model, Segment
from prfaas.engine.native.int8 import Int8Panels, round_panels
from prfaas.engine.native.product import PANEL_OUTPUTS, product
from prfaas.engine.numerics import numerics_fingerprint
from tests.engine.running import GREEDY, SEEDED, Node, plain_answer, prompt_of, tiny

PACKINGS = st.sampled_from(["fma-fp16", "fma-f32"])


def head_of(num_ids: int, num_inputs: int, seed: int, *, has_outliers: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight_VD = torch.randn(num_ids, num_inputs, generator=generator) * 0.05
    if has_outliers:
        weight_VD[:, :3] *= 20.0
    return weight_VD


def packed(weight_VD: Tensor, packing: Packing = "fma-fp16") -> PanelLinear:
    head = pack(weight_VD, packing)
    assert isinstance(head, PanelLinear)
    return head


def packed_head(model: Model) -> PanelLinear:
    assert isinstance(model.lm_head, PanelLinear)
    return model.lm_head


def expected_ids(head: PanelLinear, x_MD: Tensor, scale: float = 1.0) -> list[int]:
    """Return what the logits say that the model gives."""
    ids: list[int] = head(x_MD).mul_(scale).numpy().argmax(axis=1).tolist()
    return ids


def near_rows(weight_VD: Tensor, num_rows: int, seed: int, noise: float) -> Tensor:
    """Return rows that point to random rows of the head."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, len(weight_VD), (num_rows,), generator=generator)
    rows = weight_VD[ids] * 40.0
    return rows + torch.randn(rows.shape, generator=generator) * noise


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    num_ids=st.sampled_from([1, 17, 64, 203, 1008]),
    num_inputs=st.sampled_from([5, 48, 160, 640]),
    num_rows=st.integers(1, 9),
    noise=st.sampled_from([0.0, 0.5, 2.0, 20.0]),
    has_outliers=st.booleans(),
    packing=PACKINGS,
)
def test_the_largest_is_that_of_all_logits(
    seed, num_ids, num_inputs, num_rows, noise, has_outliers, packing
):
    weight_VD = head_of(num_ids, num_inputs, seed, has_outliers=has_outliers)
    head, x_MD = packed(weight_VD, packing), near_rows(weight_VD, num_rows, seed + 1, noise)
    assert GreedyHead(head).largest(x_MD) == expected_ids(head, x_MD)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    change=st.sampled_from([0.0, 2.0**-24, 2.0**-12, 2.0**-9]),
    weight_power=st.integers(-20, 13),
    row_power=st.integers(-40, 40),
    scale=st.sampled_from([1.0, 1 / 6, 0.25, 30.0, 1e-30, 1e30]),
    packing=PACKINGS,
)
def test_ids_that_8_bits_cannot_tell_apart_are_told_apart(
    seed, change, weight_power, row_power, scale, packing
):
    generator = torch.Generator().manual_seed(seed)
    weight_VD = torch.randn(208, 96, generator=generator)
    twins = torch.randperm(208, generator=generator)[:12]
    weight_VD[twins] = weight_VD[0] * (1.5 + change * torch.randn(12, 96, generator=generator))
    weight_VD *= 2.0**weight_power
    x_MD = (weight_VD[:1] + 0.1 * weight_VD[1:4]) / weight_VD[0].norm() * 2.0**row_power
    head = packed(weight_VD, packing)
    found = GreedyHead(head, logits_scale=scale).largest(x_MD)
    logits_MV = head(x_MD).mul_(scale)
    if logits_MV.isfinite().all():
        assert found == expected_ids(head, x_MD, scale)
    else:
        assert found is None


def test_logits_below_zero_have_a_largest_among_the_ids_there_are():
    weight_VD = head_of(37, 64, 8).abs()  # behind id 36 the last panel has zeros
    head, x_MD = packed(weight_VD), -torch.rand(3, 64) - 0.1
    assert GreedyHead(head).largest(x_MD) == expected_ids(head, x_MD)


def test_of_equal_logits_the_smallest_id_is_the_largest_ones():
    weight_VD = head_of(304, 64, 0)
    weight_VD[[290, 17, 130]] = weight_VD[5] * 2.0
    x_MD = weight_VD[17:18] * 10.0
    assert GreedyHead(packed(weight_VD)).largest(x_MD) == [17]


def test_logits_that_scaling_makes_equal_are_equal():
    weight_VD = head_of(128, 256, 6) * 0.1
    weight_VD[[5, 90]] = 0.0
    weight_VD[[5, 90], 0] = 14.0
    weight_VD[90, 1] = 1.0  # a logit of 14 and one float more: a sixth of both is the same float
    x_MD = torch.zeros(1, 256)
    x_MD[:, 0], x_MD[:, 1] = 1.0, 2.0**-20
    head = packed(weight_VD)
    assert GreedyHead(head).largest(x_MD) == [90]
    assert GreedyHead(head, logits_scale=1 / 6).largest(x_MD) == [5]


@settings(max_examples=300, deadline=None)
@given(
    value=st.floats(-(2.0**100), 2.0**100, width=32),
    scale=st.floats(2.0**-100, 2.0**100, width=32),
    steps=st.integers(1, 40),
)
def test_no_float_below_the_floor_is_scaled_as_high(value, scale, steps):
    floor, factor = np.array([value], np.float32), np.float32(scale)
    with np.errstate(over="ignore", under="ignore"):
        scaled = floor * factor
        assume(np.isfinite(scaled))
        below = lowest_equal(floor, factor)
        assert below <= floor
        for _ in range(steps):
            below = np.nextafter(below, np.float32(-np.inf))
        assert below * factor < scaled


def test_few_ids_are_left_to_the_head(monkeypatch):
    weight_VD = head_of(20_000, 128, 2)
    head, x_MD = packed(weight_VD), near_rows(weight_VD, 4, 3, 0.5)
    scored: list[int] = []

    def counting(x_MD: Tensor, panels_QDP: Tensor, num_outputs: int) -> Tensor:
        scored.append(num_outputs)
        return product(x_MD, panels_QDP, num_outputs)

    monkeypatch.setattr(greedy_head, "product", counting)
    assert GreedyHead(head).largest(x_MD) == expected_ids(head, x_MD)
    assert len(scored) == 1
    assert scored[0] <= 8 * PANEL_OUTPUTS


@pytest.mark.parametrize("value", [0.0, 3e-23, 1e30, float("nan"), float("inf")])
def test_a_row_that_proves_nothing_is_left_to_the_head(value):
    x_MD = torch.ones(3, 64)
    x_MD[1] = value
    assert GreedyHead(packed(head_of(128, 64, 4))).largest(x_MD) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_have_no_largest(value):
    weight_VD = head_of(128, 64, 4)
    weight_VD[70, 3] = value
    assert GreedyHead(packed(weight_VD, "fma-f32")).largest(torch.ones(1, 64)) is None


def test_many_rows_or_candidates_are_left_to_the_head(monkeypatch):
    weight_VD = head_of(256, 64, 5)
    weight_VD[32:200] = weight_VD[32]  # all are the largest for a row like them
    greedy = GreedyHead(packed(weight_VD))
    rows_MD = weight_VD[[40] * (MAX_ROWS + 1)] * 10.0
    assert greedy.largest(rows_MD) is None
    assert greedy.largest(rows_MD[1:]) == [32] * MAX_ROWS
    monkeypatch.setattr(greedy_head, "MAX_PANELS", 8)
    assert greedy.largest(rows_MD[:1]) is None
    assert greedy.largest(weight_VD[:1] * 10.0) == [0]


@pytest.fixture
def gemma(monkeypatch):
    model = tiny("gemma3", "float16")
    monkeypatch.setattr(model, "greedy_head", GreedyHead(packed_head(model)))
    return model


def test_greedy_answers_are_the_same_with_and_without_it(gemma, monkeypatch):
    found: list[int] = []
    largest = GreedyHead.largest

    def noting(self: GreedyHead, x_MD: Tensor) -> list[int] | None:
        ids = largest(self, x_MD)
        found.extend(ids or [])
        return ids

    monkeypatch.setattr(GreedyHead, "largest", noting)
    node = Node(gemma)
    prompts = [prompt_of(length, seed=length) for length in (5, 20, 40)]
    for index, prompt in enumerate(prompts):
        node.submit(f"r{index}", prompt, GREEDY)
    results = node.run()
    for index, prompt in enumerate(prompts):
        assert results[f"r{index}"].tokens() == plain_answer(gemma, prompt, GREEDY)
    assert len(found) > len(prompts)


def test_a_model_gives_logits_where_its_greedy_head_cannot_tell(gemma, monkeypatch):
    segment = Segment(kv=gemma.new_kv(capacity_tokens=8), tokens=[5, 6, 7], num_logits=1)
    monkeypatch.setattr(GreedyHead, "largest", lambda *_: None)
    logits = gemma.largest([segment])
    again = Segment(kv=gemma.new_kv(capacity_tokens=8), tokens=[5, 6, 7], num_logits=1)
    assert torch.equal(logits, gemma.forward([again]))


def test_one_of_another_head_is_not_used(gemma):
    fingerprint = numerics_fingerprint(gemma)
    assert gemma.greedy_head is not None
    gemma.greedy_head = GreedyHead(packed(gemma.embed_tokens.weight * 1.5))
    assert numerics_fingerprint(gemma) == fingerprint
    assert gemma.greedy_head is None


def test_one_whose_bounds_do_not_hold_is_not_used(gemma, monkeypatch):
    def careless(panels_QKP: Tensor, num_outputs: int) -> Int8Panels:
        panels = round_panels(panels_QKP, num_outputs)
        return replace(panels, errors_QP=panels.errors_QP * 0.05)

    monkeypatch.setattr(greedy_head, "round_panels", careless)
    gemma.greedy_head = GreedyHead(packed_head(gemma))
    numerics_fingerprint(gemma)
    assert gemma.greedy_head is None


def test_one_who_wants_more_than_the_largest_gets_all_logits(gemma):
    wanting_more = [
        replace(GREEDY, num_logprobs=2),
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, logit_bias=((7, 50.0),)),
        SEEDED,
    ]
    prompts = [prompt_of(length, seed=length) for length in (5, 20)]
    for sampling in wanting_more:
        node = Node(gemma)
        node.submit("greedy", prompts[0], GREEDY)
        node.submit("more", prompts[1], sampling)
        results = node.run()
        assert results["greedy"].tokens() == plain_answer(gemma, prompts[0], GREEDY)
        assert results["more"].tokens() == plain_answer(gemma, prompts[1], sampling)
