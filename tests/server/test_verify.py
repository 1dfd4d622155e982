"""Two real nodes on tiny models: verify finds equality where there is one, and only there."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.clock import monotonic_s
from prfaas.errors import ConfigError, TransferError
from prfaas.server import verify
from prfaas.server.verify import (
    NUM_TOKENS,
    prompt_lengths,
    run_verify,
    verify_node,
    verify_tokens,
)
from prfaas.types import Request, SamplingParams
from tests.server.fleet import until
from tests.server.real_nodes import config, no_progress, real_nodes
from tests.server.scripted_engine import DENSE, HYBRID
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
FAMILIES = ["gemma3", "llama"]
DRAWN_TOKENS = 5


@pytest.fixture
def models(tmp_path, monkeypatch) -> Callable[..., Path]:
    monkeypatch.setattr(
        verify,
        "SAMPLING",
        {name: replace(s, max_tokens=DRAWN_TOKENS) for name, s in verify.SAMPLING.items()},
    )
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    return lambda family, seed=0: write_tiny_model(tmp_path / f"{family}-{seed}", family, seed)


@pytest.mark.parametrize("family", FAMILIES)
async def test_equal_nodes_agree_on_every_token_and_every_bit(family, models):
    model = models(family)
    async with real_nodes(model, model) as nodes:
        pd = nodes.pd
        seen = []
        report = await verify_node(
            pd, clock=monotonic_s, on_case=lambda case, done, total: seen.append((done, total))
        )
        assert [case.failure for case in report.cases if case.failure] == []
        assert report.tokens_equal
        assert report.bits_equal
        assert seen == [(index + 1, len(report.cases)) for index in range(len(report.cases))]
        assert {case.prompt_tokens for case in report.cases} >= {1, 15, 16, 17, 53}
        cached = [case for case in report.cases if case.row == "remote_cached"]
        assert all(case.tokens_reused > 0 for case in cached if case.prompt_tokens > 16)
        assert json.loads(json.dumps(report.to_json()))["bits_equal"] is True


async def test_prompts_of_more_lengths_are_tried_if_the_context_takes_them(models):
    model = models("llama")
    async with real_nodes(model, model) as nodes:
        report = await verify_node(nodes.pd, clock=monotonic_s, more_lengths=(37,))
        assert sum(case.prompt_tokens == 37 for case in report.cases) == 4
        assert report.bits_equal
        limit = nodes.pd.max_context_tokens
        with pytest.raises(ConfigError, match=f"{limit} tokens.*context of {limit}"):
            await verify_node(nodes.pd, clock=monotonic_s, more_lengths=(limit,))


async def test_a_peer_with_other_weights_is_refused(models):
    async with real_nodes(models("gemma3"), models("gemma3", 1)) as nodes:
        pd = nodes.pd
        with pytest.raises(TransferError, match=r"incompatible.*model_fingerprint"):
            await verify_node(pd, clock=monotonic_s)


async def test_a_peer_that_lies_about_its_model_is_found_out_by_its_bits(models):
    async with real_nodes(models("llama"), models("llama", 1)) as nodes:
        pd = nodes.pd
        nodes.prefill.service._identity = pd.identity
        assert pd.peer is not None
        pd.peer.doubt()
        await until(lambda: pd.peer is not None and pd.peer.state == "up")
        report = await verify_node(pd, clock=monotonic_s)
        assert not report.bits_equal
        assert not report.tokens_equal
        assert all(case.failure is None for case in report.cases)
        assert all(case.max_logit_difference for case in report.cases)


async def test_rows_that_did_not_go_remote_are_failures_however_equal(models):
    model = models("qwen3")
    async with real_nodes(model, model) as nodes:
        pd = nodes.pd
        assert pd.peer is not None
        await pd.peer.settled()
        service = nodes.prefill.service
        service._options = replace(service._options, max_transfers=0)
        report = await verify_node(pd, clock=monotonic_s)
        assert all(case.tokens_equal for case in report.cases)
        assert not report.tokens_equal
        assert not report.bits_equal
        assert all(case.failure and "local" in case.failure for case in report.cases)


async def test_verify_runs_from_a_configuration_and_names_an_absent_peer(models):
    model = models("llama")
    with pytest.raises(TransferError, match=r"127\.0\.0\.1:9 is down"):
        await run_verify(config(model, "127.0.0.1:9"), progress=no_progress)
    with pytest.raises(TransferError, match="no peer"):
        await run_verify(config(model), progress=no_progress)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_penalties_bias_and_logprobs_travel_with_the_prompt(family, models, temperature):
    model = models(family)
    async with real_nodes(model, model) as nodes:
        pd = nodes.pd
        answers = []
        for route in ("local", "remote"):
            sampling = SamplingParams(
                max_tokens=12,
                seed=99,
                temperature=temperature,
                top_p=0.9,
                top_k=40,
                presence_penalty=0.7,
                frequency_penalty=0.3,
                repetition_penalty=1.3,
                logit_bias=((7, 2.0), (9, -100.0)),
                num_logprobs=3,
            )
            asked = Request(
                request_id=f"{route}-{family}",
                prompt_tokens=verify_tokens(pd.tokenizer.encode, 200),
                sampling=sampling,
                num_choices=3,
                cache_salt=route.encode(),
            )
            async with pd.generate(asked, force_route=route) as generation:
                events = [event async for event in generation]
            assert generation.record.route == route
            answers.append(
                sorted((e.choice_index, i, e.token_id, e.logprobs, e.finish_reason)
                       for i, e in enumerate(events))
            )  # fmt: skip
        local, remote = ([(choice, *rest) for choice, _, *rest in answer] for answer in answers)
        assert local == remote


def test_lengths_lie_around_a_block_beyond_each_window_and_within_the_context():
    assert prompt_lengths(DENSE, 10_000) == [1, 7, 8, 9, 29, 4133]
    assert prompt_lengths(HYBRID, 10_000) == [1, 7, 8, 9, 29, 35, 4133]
    assert prompt_lengths(HYBRID, 100) == [1, 7, 8, 9, 29, 35, 100 - NUM_TOKENS - 1]
