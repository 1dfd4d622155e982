"""Tiny Kimi Linear nodes with a cache on disk on both sides: prompts that grow, codecs with and without loss, a link that kills at random."""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from prfaas.transport.coding import may_lose
from prfaas.types import Request, RequestRecord, RouteName, SamplingParams
from tests.relay import Fault
from tests.server.cached_nodes import prompt
from tests.server.fleet import until
from tests.server.real_nodes import RealNodes, real_nodes
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
BLOCK = 64
LENGTHS = (100, 230, 330)
KINDS = ("cut", "gone", "flip", "half_close", "twice")


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    first_logits: bytes | None
    record: RequestRecord


async def ask(
    nodes: RealNodes, tokens: list[int], route: RouteName, salt: str, number: int
) -> Answer:
    asked = Request(
        request_id=f"{salt}-{number}-{len(tokens)}",
        prompt_tokens=tuple(tokens),
        sampling=SamplingParams(max_tokens=6, seed=3, temperature=1.0),
        cache_salt=salt.encode(),
    )
    async with nodes.pd.generate(asked, force_route=route, return_logits=True) as generation:
        drawn = [event.token_id async for event in generation]
    record = generation.record
    assert record.tokens_reused + record.tokens_local + record.tokens_remote == len(tokens)
    return Answer(drawn, generation.first_logits, record)


async def ask_through_kills(nodes: RealNodes, draw: random.Random) -> list[tuple[Answer, Answer]]:
    """Return (answer through a bad link, answer of this node alone) for prompts that each begin alike.

    Both nodes have a part of each prompt, not always the same one.
    """
    peer, answers = nodes.pd.peer, []
    assert peer is not None
    for number, length in enumerate(LENGTHS):
        tokens = prompt(length)
        kind = draw.choice(KINDS) if number % 2 else "cut"
        nodes.relay.fault = Fault(draw.randrange(20_000), kind)
        answer = await ask(nodes, tokens, "remote", "grows", number)
        nodes.relay.fault = None
        alone = await ask(nodes, tokens, "local", f"alone{number}", number)
        assert alone.record.tokens_reused == 0
        answers.append((answer, alone))
        peer.doubt()
        await until(lambda: peer.is_usable)
        await nodes.at_rest()
    return answers


@pytest.mark.parametrize("codec", ["zstd", "int8", "auto-lossy"])
async def test_prompts_that_grow_through_random_kills_are_as_exact_as_their_codec(
    codec, tmp_path, monkeypatch
):
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    model = write_tiny_model(tmp_path / "kimi_linear", "kimi_linear")
    dirs = (tmp_path / "pd", tmp_path / "prefill")
    settings: dict[str, Any] = {
        "dtype": "float32",
        "block_tokens": BLOCK,
        "max_context_tokens": 350,
    }
    settings |= {"transfer_snapshot_tokens": "64", "streams": 2}
    async with real_nodes(model, model, cache_dirs=dirs, kv_codec=codec, **settings) as nodes:
        answers = await ask_through_kills(nodes, random.Random(sum(codec.encode())))
    assert any(answer.record.tokens_reused for answer, _ in answers)
    assert any(answer.record.tokens_remote for answer, _ in answers)
    for answer, alone in answers:
        assert alone.record.exact
        record = answer.record
        if answer.record.exact:
            assert (answer.tokens, answer.first_logits) == (alone.tokens, alone.first_logits)
        if not may_lose(codec):
            assert record.exact
        elif record.route == "remote":
            assert not record.exact
    if not may_lose(codec):
        return
    async with real_nodes(model, model, cache_dirs=dirs, kv_codec="raw", **settings) as nodes:
        for number, (length, (_, alone)) in enumerate(zip(LENGTHS, answers, strict=True)):
            again = await ask(nodes, prompt(length), "local", "grows", number)
            assert again.record.exact  # what was lossy is on disk, under another key
            assert (again.tokens, again.first_logits) == (alone.tokens, alone.first_logits)
