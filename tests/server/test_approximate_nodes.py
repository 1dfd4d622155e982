"""Real engines of unequal numerics: an approximate peer's KV never passes for this node's own."""

from collections.abc import Sequence

import pytest

from prfaas.server.verify import verify_tokens
from prfaas.types import Request, RequestRecord, RouteName, SamplingParams
from tests.server.real_nodes import RealNodes, real_nodes
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
NUM_TOKENS = 100
"""Not a whole number of blocks: what is drawn ends the prompt's last block, too."""
SEEDED = SamplingParams(max_tokens=40, seed=5, temperature=0.9)


async def ask(
    nodes: RealNodes,
    name: str,
    route: RouteName,
    prompt: Sequence[int],
    *,
    num_choices: int = 1,
    salt: bytes = b"",
) -> tuple[list[list[int]], RequestRecord]:
    """Return each choice's tokens and the record."""
    asked = Request(
        request_id=name,
        prompt_tokens=tuple(prompt),
        sampling=SEEDED,
        num_choices=num_choices,
        cache_salt=salt,
    )
    drawn: list[list[int]] = [[] for _ in range(num_choices)]
    async with nodes.pd.generate(asked, force_route=route) as generation:
        async for event in generation:
            drawn[event.choice_index].append(event.token_id)
    return drawn, generation.record


@pytest.mark.parametrize("family", ["gemma3", "llama"])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_nothing_that_builds_on_approximate_kv_is_found_as_exact(
    family, num_choices, tmp_path, monkeypatch
):
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    model = write_tiny_model(tmp_path / family, family)
    async with real_nodes(model, model, is_approximate=True) as nodes:
        prompt = verify_tokens(nodes.pd.tokenizer.encode, NUM_TOKENS)
        # The prompt's own blocks are there with exact bits, so that a chain could go on from them.
        await ask(nodes, "exact", "local", prompt[:98])
        drawn, record = await ask(nodes, "remote", "remote", prompt, num_choices=num_choices)
        assert (record.route, record.exact) == ("remote", False)
        assert record.tokens_remote > 0
        cache = nodes.pd._cache
        for tokens in drawn:
            conversation = (*prompt, *tokens)
            exact = cache.lookup(cache.block_keys(conversation, b""), len(conversation))
            hit_tokens = exact.hit_tokens
            exact.release()
            assert hit_tokens <= NUM_TOKENS
            _, record = await ask(nodes, "next turn", "local", conversation)
            assert (record.tokens_reused > NUM_TOKENS) == (not record.exact)
            nodes.pd._cache.check()
