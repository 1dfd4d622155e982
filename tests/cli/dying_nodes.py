"""A process of pd nodes with caches on disk, one of each family, that is killed over its work.

It writes a line of JSON: for each family the answers to the early prompts, all of whose pages are on
disk by then. From there on it answers the late ones, of all families at once.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from prfaas.server.pd import PdNode
from tests.server.cached_nodes import FAMILIES, GREEDY, SEEDED, Answer, ask, flush, node_on, prompt

EARLY, LATE = (1, 64, 65, 200, 450), (300, 301, 620)
"""Tokens of the prompts."""


async def answer(node: PdNode, num_tokens: int, *, salt: bytes = b"") -> Answer:
    """Return the answer to the prompt of that length: greedy for even ones, else seeded."""
    sampling = SEEDED if num_tokens % 2 else GREEDY
    return await ask(node, prompt(num_tokens, num_tokens), sampling, salt=salt)


def bits_of(answered: Answer) -> list[object]:
    """Return what no cache may change, as JSON has it."""
    return [answered.tokens, answered.first_logits.hex()]


async def work_until_killed(directory: Path) -> None:
    """Answer, say what, and go on; `directory` has the models."""
    async with AsyncExitStack() as stack:
        nodes = {
            family: await stack.enter_async_context(
                node_on(directory / family, directory / f"{family}.kv")
            )
            for family in FAMILIES
        }
        early = {}
        for family, node in nodes.items():
            answers = [await answer(node, num_tokens) for num_tokens in EARLY]
            assert not any(answered.reused for answered in answers)
            early[family] = [bits_of(answered) for answered in answers]
            flush(node)
        print(json.dumps(early), flush=True)  # noqa: T201  the parent reads it
        while True:
            async with asyncio.TaskGroup() as tasks:
                for node in nodes.values():
                    for num_tokens in LATE:
                        tasks.create_task(answer(node, num_tokens))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(work_until_killed(Path(sys.argv[1])))
