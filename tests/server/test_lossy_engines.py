"""Real engines behind a lossy codec: answers differ a little and say so, and what builds on them does, too."""

import json
from dataclasses import replace

import pytest

from prfaas.cli.verify import verdict
from prfaas.clock import monotonic_s
from prfaas.server import verify
from prfaas.server.verify import verify_node, verify_tokens
from prfaas.types import Request, SamplingParams
from tests.server.real_nodes import real_nodes
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
NUM_TOKENS = 100
BOUND = {"fp16": 0.05, "int8": 1.0, "fp8": 3.0}
"""On logits; those of these models spread over some tens."""


@pytest.fixture(autouse=True)
def short_answers(tmp_path, monkeypatch):
    sampling = {name: replace(s, max_tokens=5) for name, s in verify.SAMPLING.items()}
    monkeypatch.setattr(verify, "SAMPLING", sampling)
    monkeypatch.setattr(verify, "LONG_TOKENS", 300)
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))


@pytest.mark.parametrize(
    ("family", "codec", "block_tokens"),
    [
        ("gemma3", "fp16", 16),
        ("llama", "fp8", 16),
        ("kimi_linear", "int8", 64),
    ],
)
async def test_verify_says_by_how_much_a_lossy_codec_differs(family, codec, block_tokens, tmp_path):
    model = write_tiny_model(tmp_path / family, family)
    settings = {"kv_codec": codec, "block_tokens": block_tokens}
    async with real_nodes(model, model, **settings) as nodes:
        report = await verify_node(nodes.pd, clock=monotonic_s)
        assert [case.failure for case in report.cases if case.failure] == []
        assert report.has_passed
        assert (report.codec, report.exact, report.bits_equal) == (codec, False, False)
        assert report.max_logit_difference is not None
        assert 0 < report.max_logit_difference < BOUND[codec]
        assert 0 < report.greedy_agreement <= 1
        remote = [case for case in report.cases if case.row == "remote"]
        assert not any(case.exact for case in remote)
        assert all(case.bits_equal for case in remote)  # the peer's own logits
        told = json.loads(json.dumps(report.to_json()))
        assert (told["codec"], told["exact"]) == (codec, False)
        assert f"codec {codec}, exact: false" in verdict(report)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
async def test_an_answer_drawn_on_lossy_kv_is_no_exact_prefix(family, tmp_path):
    model = write_tiny_model(tmp_path / family, family)
    async with real_nodes(model, model, kv_codec="int8") as nodes:
        prompt = verify_tokens(nodes.pd.tokenizer.encode, NUM_TOKENS)
        sampling = SamplingParams(max_tokens=40, seed=5, temperature=0.9)
        # The prompt's own blocks are there with exact bits, so that a chain could go on from them.
        drawn: list[int] = []
        for name, route, tokens in (
            ("exact", "local", prompt[:98]),
            ("lossy", "remote", prompt),
        ):
            asked = Request(request_id=name, prompt_tokens=tokens, sampling=sampling)
            async with nodes.pd.generate(asked, force_route=route) as generation:  # type: ignore[arg-type]
                drawn = [event.token_id async for event in generation]
            assert generation.record.exact == (route == "local")
        conversation = (*prompt, *drawn)
        cache = nodes.pd._cache
        table = cache.lookup(cache.block_keys(conversation, b""), len(conversation))
        assert table.hit_tokens <= NUM_TOKENS
        table.release()
        asked = Request(request_id="next", prompt_tokens=conversation, sampling=sampling)
        async with nodes.pd.generate(asked, force_route="local") as generation:
            assert [event async for event in generation]
        assert generation.record.tokens_reused > NUM_TOKENS
        assert not generation.record.exact
