"""Equal prompts that come at once: one is computed, and every answer's story says what it cost."""

import asyncio

import pytest

from tests.engine.running import prompt_of
from tests.server.cached_nodes import BLOCK, ModelOf, ask, ask_cold, model_of, node_on

__all__ = ["model_of"]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["kimi_linear", "gemma3"])
async def test_equal_prompts_at_once_are_computed_once_and_say_so(family, model_of: ModelOf):
    prompt = prompt_of(300)
    model = model_of(family)
    async with node_on(model, None) as node:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(node, prompt)) for _ in range(4)]
        answers = [task.result() for task in asked]
        cold = await ask_cold(node, prompt)
    assert {answer.bits == cold.bits for answer in answers} == {True}
    tail = len(prompt) - (len(prompt) - 1) // BLOCK * BLOCK
    costs = sorted(answer.record.tokens_local for answer in answers)
    assert costs == [tail, tail, tail, len(prompt)]
    for answer in answers:
        record = answer.record
        assert record.tokens_local + record.tokens_reused == len(prompt)
