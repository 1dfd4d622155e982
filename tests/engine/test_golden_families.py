"""Every family's logits are transformers' on the same weights, however they are computed here."""

from functools import cache
from typing import Literal

import pytest
import torch
from torch import Tensor

from prfaas.engine.mixer_spec import GdnSpec, KdaSpec
from prfaas.engine.model import Model
from tests.engine.golden import (
    BLOCK_TOKENS,
    NUM_TOKENS,
    Run,
    import_pages,
    load,
    pages_of,
    reference_logits,
    tokens_of,
)
from tests.tiny_configs import FAMILIES, Family

pytestmark = pytest.mark.slow

Dtype = Literal["float16", "float32"]

TOLERANCES: dict[Dtype, float] = {
    "float32": 3e-5,
    # Weights are rounded to 11 bits; logits are about 1, at most 5.
    "float16": 5e-2,
}
"""How far logits may be from transformers' float32 ones."""
DELTA_RULE_TOLERANCE = 2e-4
"""The same in float32 for GDN and KDA. A few tokens of these weights are that badly conditioned: there
transformers' own float32 logits are 8.5e-5 off its float64 ones."""
WITHOUT_ORACLE: tuple[Family, ...] = ("ring",)
"""transformers takes Ring 2.5 for a Ling 3 (models.md §0)."""
KNOWN = [family for family in FAMILIES if family not in WITHOUT_ORACLE]
CUTS = (1, 50, 64, 113, 150, 151)
NUM_STEPS = 10


@cache
def reference(family: Family) -> Tensor:
    return reference_logits(family, tokens_of())


@cache
def prefilled(family: Family) -> Tensor:
    return Run(tiny(family)).forward(tokens_of())


@cache
def tiny(family: Family) -> Model:
    return load(family)


def tolerance_of(family: Family, dtype: Dtype = "float32") -> float:
    has_delta_rule = any(isinstance(x, GdnSpec | KdaSpec) for x in tiny(family).config.layers)
    if dtype == "float32" and has_delta_rule:
        return DELTA_RULE_TOLERANCE
    return TOLERANCES[dtype]


def has_states(family: Family) -> bool:
    return any(layer.states for layer in tiny(family).config.layers)


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_prefill_gives_transformers_logits(family: Family, dtype: Dtype) -> None:
    logits = Run(load(family, dtype)).forward(tokens_of())
    assert_near(logits, reference(family)[-1], tolerance_of(family, dtype))


@pytest.mark.parametrize("family", KNOWN)
def test_every_step_gives_transformers_logits(family: Family) -> None:
    """Over the ends of two blocks."""
    first, count = BLOCK_TOKENS - 4, 2 * BLOCK_TOKENS + 2
    run = Run(tiny(family))
    logits = run.pieces(tokens_of()[:count], range(first, count))
    assert_near(logits, reference(family)[first - 1 : count], tolerance_of(family))


@pytest.mark.parametrize("family", KNOWN)
def test_ten_greedy_steps_after_a_prompt_are_transformers(family: Family) -> None:
    prompt = tokens_of()[:150]
    run = Run(tiny(family))
    first = run.forward(prompt)
    drawn, logits = run.greedy(first, NUM_STEPS)
    theirs = reference_logits(family, prompt + drawn)[len(prompt) - 1 :]
    assert_near(torch.cat([first[None], logits]), theirs, tolerance_of(family))
    assert theirs[:-1].argmax(1).tolist() == drawn


@pytest.mark.parametrize("family", FAMILIES)
def test_any_cut_and_single_tokens_give_the_bits_of_the_whole(family: Family) -> None:
    tokens, whole = tokens_of(), prefilled(family)
    assert torch.equal(Run(tiny(family)).pieces(tokens, CUTS)[-1], whole)
    steps = Run(tiny(family)).pieces(tokens, range(150, NUM_TOKENS))
    assert torch.equal(steps[-1], whole)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", [2 * BLOCK_TOKENS, 150])
def test_ten_greedy_steps_after_an_import_are_those_without(
    family: Family, num_tokens: int
) -> None:
    model, prompt = tiny(family), tokens_of()[:num_tokens]
    source, target = (Run(model) for _ in range(2))
    first = source.forward(prompt)
    pages = pages_of(source.kv)
    import_pages(target.kv, pages, num_tokens)
    assert pages_of(target.kv) == pages
    drawn, logits = source.greedy(first, NUM_STEPS)
    drawn_there, logits_there = target.greedy(first, NUM_STEPS)
    assert drawn_there == drawn
    assert torch.equal(logits_there, logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_vary(family: Family) -> None:
    model = tiny(family)
    answers = set()
    for seed in range(3):
        run = Run(model)
        answers.add(tuple(run.greedy(run.forward(tokens_of(seed)[:100]), NUM_STEPS)[0]))
    assert len(answers) == 3
    assert max(len(set(answer)) for answer in answers) > 3
