"""An answer that one node began and another ends has the tokens that one node alone gives it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.server.directions import Directions
from prfaas.server.verify import verify_tokens
from prfaas.types import Request, RequestRecord, SamplingParams, TokenEvent
from tests.server.real_nodes import RealNodes, real_nodes
from tests.tiny_configs import Family
from tests.tiny_models import write_tiny_model

SAMPLING = SamplingParams(
    max_tokens=12,
    seed=17,
    temperature=1.0,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    num_logprobs=2,
)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Family], Path]:
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    return lambda family: write_tiny_model(tmp_path / family, family)


async def answer(
    nodes: RealNodes,
    asked: Request,
    directions: Directions,
    drawn_tokens: tuple[tuple[int, ...], ...] = (),
) -> tuple[list[list[TokenEvent]], RequestRecord]:
    """Every choice's events; each answer shares no cached block with any other."""
    salt = f"{directions.prefill_at} {[*map(len, drawn_tokens)]}"
    fresh = replace(asked, request_id=salt, cache_salt=salt.encode())
    events: list[list[TokenEvent]] = [[] for _ in range(asked.num_choices)]
    async with nodes.pd.generate(
        fresh, directions=directions, drawn_tokens=drawn_tokens
    ) as generation:
        async for event in generation:
            events[event.choice_index].append(replace(event, request_id=""))
    return events, generation.record


@pytest.mark.parametrize(
    ("family", "block_tokens"),
    [
        ("qwen3", 16),
        ("gemma3", 16),
        pytest.param("kimi_linear", 64, marks=pytest.mark.slow),
    ],
)
async def test_tokens_of_another_node_are_continued_as_if_it_had_gone_on(
    family, block_tokens, models
):
    """Two choices, drawn at temperature 1 with penalties and logprobs, cut anywhere, prefilled anywhere."""
    model = models(family)
    async with real_nodes(model, model, block_tokens=block_tokens) as nodes:
        tokens = verify_tokens(nodes.pd.tokenizer.encode, 100)
        asked = Request(request_id="", prompt_tokens=tokens, sampling=SAMPLING, num_choices=2)
        here = Directions(reason="idle")
        there = Directions(reason="cluster", prefill_at=f"127.0.0.1:{nodes.relay.port}")
        whole, _ = await answer(nodes, asked, here)
        assert [len(events) for events in whole] == [12, 12]
        for directions, all_cuts in ((here, [(1, 9), (7, 0)]), (there, [(5, 11)])):
            for cuts in all_cuts:
                drawn = tuple(
                    tuple(event.token_id for event in events[:cut])
                    for events, cut in zip(whole, cuts, strict=True)
                )
                rest, record = await answer(nodes, asked, directions, drawn)
                assert record.route == ("local" if directions is here else "remote")
                for events, cut, gone_on in zip(whole, cuts, rest, strict=True):
                    assert gone_on == events[cut:]
