"""A server is compared as its clients see it: equal models pass, another one is found out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from prfaas.cache.options import CacheOptions
from prfaas.config.options import HttpOptions, ModelOptions, NodeConfig
from prfaas.engine.options import EngineOptions
from prfaas.errors import ConfigError, TransferError
from prfaas.server.verify_through import compare_answers, run_verify_through
from tests.server.real_face import node_running
from tests.server.real_nodes import no_progress
from tests.tiny_models import write_tiny_model

CONTEXT_TOKENS = 300


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("models")
    return [write_tiny_model(place / f"tiny{seed}", "qwen3", seed=seed) for seed in (0, 1)]


def config_of(model_dir: Path, context_tokens: int = CONTEXT_TOKENS) -> NodeConfig:
    return NodeConfig(
        role="pd",
        model=ModelOptions(model=str(model_dir), served_model_name="tiny"),
        http=HttpOptions(port=0),
        engine=EngineOptions(
            dtype="float32", threads=1, chunk_tokens=64, max_context_tokens=context_tokens
        ),
        cache=CacheOptions(ram_bytes=16 << 20, block_tokens=16),
    )


async def test_a_server_of_the_same_model_answers_alike_cold_and_from_its_cache(model_dirs):
    async with node_running(config_of(model_dirs[0])) as face:
        report = await run_verify_through(
            config_of(model_dirs[0]), f"http://127.0.0.1:{face.port}", progress=no_progress
        )
    assert report.has_passed
    assert {case.sampling for case in report.cases} == {"greedy", "seeded"}
    longest = [case for case in report.cases if case.prompt_tokens > 100]
    assert {(case.row, case.tokens_reused > 0) for case in longest} == {
        ("cold", False),
        ("cached", True),
    }


async def test_a_server_of_other_weights_is_found_out(model_dirs):
    async with node_running(config_of(model_dirs[1], 60)) as face:
        report = await run_verify_through(
            config_of(model_dirs[0], 60), f"http://127.0.0.1:{face.port}", progress=no_progress
        )
    assert not report.has_passed
    assert all(case.difference is not None for case in report.cases if not case.is_equal)


async def test_a_length_beyond_the_context_and_a_server_that_is_not_there_are_errors(model_dirs):
    with pytest.raises(ConfigError, match="prompt of 299 tokens"):
        await run_verify_through(
            config_of(model_dirs[0]),
            "http://127.0.0.1:9",
            progress=no_progress,
            more_lengths=[299],
        )
    with pytest.raises(TransferError, match=r"127\.0\.0\.1:9"):
        await run_verify_through(
            config_of(model_dirs[0]), "http://127.0.0.1:9", progress=no_progress
        )


def answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "text": "ab",
        "logprobs": {"token_logprobs": [-0.5, -1.25]},
        "finish_reason": "length",
    }
    story = {
        "route": "remote",
        "reason": "long",
        "tokens_reused": 0,
        "tokens_remote": 7,
        "bytes_received": 10,
        "exact": True,
    }
    return {"choices": [choice | changes], "usage": {"prfaas": story}}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, None),
        ({"text": "ac"}, "choices[0].text: \"'ab'\" here"),
        (
            {"logprobs": {"token_logprobs": [-0.5, -1.2500000001]}},
            "token_logprobs[1]: '-1.25' here",
        ),
        ({"logprobs": {"token_logprobs": [-0.5]}}, "token_logprobs: '[-0.5, -1.25]' here"),
        ({"finish_reason": "stop"}, "finish_reason"),
        ({"more": 1}, "choices[0]"),
    ],
)
def test_the_first_difference_is_named(changes, difference):
    case = compare_answers(answer()["choices"], answer(**changes), 7, "greedy", "cold")
    assert case.is_equal == (difference is None)
    if difference is not None:
        assert case.difference is not None
        assert difference.replace("\"'ab'\"", "'ab'") in case.difference


def test_an_answer_without_a_story_is_an_error():
    with pytest.raises(TransferError, match="usage"):
        compare_answers([], {"choices": []}, 7, "greedy", "cold")
