"""The largest logit, found from integers: always the one that all logits give."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine import greedy_head
from prfaas.engine.greedy_head import GreedyHead
from prfaas.engine.linear import is_available, pack, padded_rows
from prfaas.engine.model import Segment
from prfaas.engine.numerics import numerics_fingerprint
from tests.engine.running import GREEDY, SEEDED, Node, plain_answer, prompt_of, tiny

pytestmark = pytest.mark.skipif(not is_available("fbgemm-fp16"), reason="the head is of fbgemm")


def head_of(num_ids: int, num_inputs: int, seed: int, *, has_outliers: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight_VD = torch.randn(num_ids, num_inputs, generator=generator) * 0.05
    if has_outliers:
        weight_VD[:, :3] *= 20.0
    return weight_VD


def greedy_of(weight_VD: Tensor) -> GreedyHead:
    return GreedyHead(weight_VD, pack(weight_VD, "fbgemm-fp16"))


def near_rows(weight_VD: Tensor, num_rows: int, seed: int, noise: float) -> Tensor:
    """Return rows that point to random rows of the head, padded as the head asks."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, len(weight_VD), (num_rows,), generator=generator)
    rows = weight_VD[ids] * 40.0
    rows = rows + torch.randn(rows.shape, generator=generator) * noise
    return torch.cat([rows, rows[:1].expand(padded_rows(num_rows, "fbgemm-fp16") - num_rows, -1)])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    num_ids=st.sampled_from([64, 208, 1008]),
    num_inputs=st.sampled_from([48, 64, 160, 640]),
    num_rows=st.integers(1, 9),
    noise=st.sampled_from([0.0, 0.5, 2.0, 20.0]),
    has_outliers=st.booleans(),
)
def test_the_largest_is_that_of_all_logits(
    seed, num_ids, num_inputs, num_rows, noise, has_outliers
):
    weight_VD = head_of(num_ids, num_inputs, seed, has_outliers=has_outliers)
    x_TD = near_rows(weight_VD, num_rows, seed + 1, noise)
    expected = pack(weight_VD, "fbgemm-fp16")(x_TD)[:num_rows].numpy().argmax(axis=1)
    assert greedy_of(weight_VD).largest(x_TD, num_rows) == expected.tolist()


def test_of_equal_logits_the_smallest_id_is_the_largest_ones():
    weight_VD = head_of(304, 64, 0)
    weight_VD[[290, 17, 130]] = weight_VD[5] * 2.0
    x_TD = (weight_VD[17] * 10.0).expand(3, -1).contiguous()
    assert greedy_of(weight_VD).largest(x_TD, 1) == [17]


@pytest.mark.parametrize("max_candidates", [0, 256])
def test_logits_that_scaling_makes_equal_are_equal(monkeypatch, max_candidates):
    monkeypatch.setattr(greedy_head, "MAX_CANDIDATES", max_candidates)
    weight_VD = head_of(128, 256, 6) * 0.1
    weight_VD[[5, 90]] = 0.0
    weight_VD[[5, 90], 0] = 14.0
    weight_VD[90, 1] = 1.0  # a logit of 14 and one float more: a sixth of both is the same float
    x_TD = torch.zeros(3, 256)
    x_TD[:, 0], x_TD[:, 1] = 1.0, 2.0**-20
    head = pack(weight_VD, "fbgemm-fp16")
    assert GreedyHead(weight_VD, head).largest(x_TD, 1) == [90]
    assert GreedyHead(weight_VD, head, logits_scale=1 / 6).largest(x_TD, 1) == [5]


def test_candidates_have_the_bits_of_the_head():
    weight_VD = head_of(9008, 640, 1)  # more than a shard, and than fbgemm's 512 inputs
    head, greedy = pack(weight_VD, "fbgemm-fp16"), greedy_of(weight_VD)
    for num_rows in (3, 6, 9, 12):
        x_TD = torch.randn(num_rows, 640, generator=torch.Generator().manual_seed(num_rows))
        for num_ids in (1, 15, 16, 50):
            ids = torch.arange(num_ids) * 173
            assert torch.equal(greedy.score(x_TD, ids), head(x_TD)[:, ids])


def test_few_ids_are_left_to_the_head(monkeypatch):
    weight_VD = head_of(20_000, 128, 2)
    x_TD = near_rows(weight_VD, 4, 3, 0.5)
    scored: list[int] = []
    score = GreedyHead.score

    def counting(self: GreedyHead, x_TD: Tensor, ids_N: Tensor) -> Tensor:
        scored.append(len(ids_N))
        return score(self, x_TD, ids_N)

    monkeypatch.setattr(GreedyHead, "score", counting)
    assert greedy_of(weight_VD).largest(x_TD, 4) is not None
    assert len(scored) == 1
    assert scored[0] < 100


@pytest.mark.parametrize("value", [0.0, 3e-23, float("nan"), float("inf")])
def test_a_row_that_proves_nothing_is_left_to_the_head(value):
    greedy = greedy_of(head_of(128, 64, 4))
    assert greedy.largest(torch.full((3, 64), value), 1) is None


def test_a_row_with_many_candidates_gets_all_logits_and_the_others_do_not(monkeypatch):
    monkeypatch.setattr(greedy_head, "MAX_CANDIDATES", 8)
    weight_VD = head_of(128, 64, 5)
    weight_VD[32:64] = weight_VD[32]  # all are the largest for a row like them
    head, sizes = pack(weight_VD, "fbgemm-fp16"), []

    def noting(x_TD: Tensor) -> Tensor:
        sizes.append(len(x_TD))
        return head(x_TD)

    x_TD = weight_VD[[3, 40, 100, 101, 50, 7]] * 10.0
    assert GreedyHead(weight_VD, noting).largest(x_TD, 6) == [3, 32, 100, 101, 32, 7]
    assert sizes == [padded_rows(2, "fbgemm-fp16")]


@pytest.fixture
def gemma(monkeypatch):
    model = tiny("gemma3", "float16")
    monkeypatch.setattr(model, "greedy_head", GreedyHead(model.embed_tokens.weight, model.lm_head))
    return model


def test_greedy_answers_are_the_same_with_and_without_it(gemma, monkeypatch):
    found: list[int] = []
    largest = GreedyHead.largest

    def noting(self: GreedyHead, x_TD: Tensor, num_rows: int) -> list[int] | None:
        ids = largest(self, x_TD, num_rows)
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


def test_one_with_other_bits_is_not_used(gemma):
    fingerprint = numerics_fingerprint(gemma)
    assert gemma.greedy_head is not None
    gemma.greedy_head = greedy_of(gemma.embed_tokens.weight * 1.5)
    assert numerics_fingerprint(gemma) == fingerprint
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
