"""The runner over torch's own kernels: what it promises of work and memory does not need equal bits."""

import pytest

from tests.engine.places import PLACES, Place, tiny_on
from tests.engine.running import (
    GREEDY,
    SEEDED,
    Node,
    block_of,
    plain_answer,
    preempting_node,
    prefill_and_ship,
    prompt_of,
)
from tests.tiny_models import Family

FEW: tuple[Family, ...] = ("gemma3", "kimi_linear", "falcon_h1")
every_place = pytest.mark.parametrize("place", PLACES)
few_families = pytest.mark.parametrize("family", FEW)


def rounds_little(place: Place) -> bool:
    """Whether a tiny model's drawn tokens are the same however its rows were batched."""
    return place.packing == "torch-f32"


@every_place
@few_families
def test_a_batch_of_choices_answers_as_each_alone(place: Place, family: Family) -> None:
    model = tiny_on(place, family)
    node = Node(model)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 70, 150))]
    for seed, prompt in enumerate(prompts):
        node.submit(f"r{seed}", prompt, SEEDED, num_choices=2)
    results = node.run()
    for seed, prompt in enumerate(prompts):
        for choice in range(2):
            tokens = results[f"r{seed}"].tokens(choice)
            assert len(tokens) == SEEDED.max_tokens
            if rounds_little(place):
                assert tokens == plain_answer(model, prompt, SEEDED, choice)


@every_place
@few_families
def test_a_prompt_that_was_answered_is_a_hit(place: Place, family: Family) -> None:
    node = Node(tiny_on(place, family))
    prompt = prompt_of(3 * 64 + 9)
    first, again = node.answer(prompt), node.answer(prompt)
    assert first.num_computed == len(prompt)
    assert again.num_computed <= 64 + 9
    if rounds_little(place):
        assert again.tokens() == first.tokens()


@every_place
@few_families
def test_a_peers_pages_take_the_place_of_the_prompt(place: Place, family: Family) -> None:
    model = tiny_on(place, family)
    prompt = prompt_of(150)
    first, _, receiver, landed = prefill_and_ship(model, prompt, GREEDY)
    result = receiver.answer(prompt, table=landed, forced=(tuple(first.tokens()),))
    assert (result.error, result.num_computed) == (None, 0)
    if rounds_little(place):
        assert [*first.tokens(), *result.tokens()] == plain_answer(model, prompt)


@every_place
@few_families
def test_preempted_sequences_go_on_from_pages(place: Place, family: Family) -> None:
    model = tiny_on(place, family)
    node = preempting_node(model, num_sequences=1.5, num_tokens=90, block_tokens=block_of(model))
    prompts = [prompt_of(70, seed) for seed in range(3)]
    for seed, prompt in enumerate(prompts):
        node.submit(f"r{seed}", prompt)
    results = node.run()
    for seed, prompt in enumerate(prompts):
        tokens = results[f"r{seed}"].tokens()
        assert len(tokens) == GREEDY.max_tokens
        if rounds_little(place):
            assert tokens == plain_answer(model, prompt)
