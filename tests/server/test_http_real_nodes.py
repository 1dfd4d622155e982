"""The HTTP face over real nodes: a tiny model, a prefill peer, and the answers that must agree."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from prfaas.cache.options import CacheOptions
from prfaas.config.options import HttpOptions, ModelOptions, NodeConfig, Role
from prfaas.engine.options import EngineOptions
from prfaas.scheduler.options import SchedulerOptions
from prfaas.server.app import serve
from prfaas.server.listening import bind_socket
from prfaas.server.pd import load_pd_node
from prfaas.transport.options import TransportOptions
from tests.server.http_face import (
    CHAT,
    blocking_client,
    chat_text,
    finish_reasons,
    parse_events,
    raw_chat,
    reset,
    until,
)
from tests.server.real_face import holds_nothing, node_running
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

CONTEXT_TOKENS = 600


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "gemma3")


def config_of(model_dir: Path, role: Role, peer: str | None = None) -> NodeConfig:
    return NodeConfig(
        role=role,
        model=ModelOptions(model=str(model_dir)),
        http=HttpOptions(port=0),
        engine=EngineOptions(
            dtype="float32", threads=1, chunk_tokens=64, max_context_tokens=CONTEXT_TOKENS
        ),
        cache=CacheOptions(ram_bytes=16 << 20, block_tokens=16),
        transport=TransportOptions(peer=peer),
        scheduler=SchedulerOptions(threshold_tokens=100),
    )


async def test_answers_agree_whole_streamed_cold_warm_and_remote(model_dir):
    prompt = "The quick brown fox jumps over the lazy dog. " * 12
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 24,
        "seed": 5,
    }
    async with (
        node_running(config_of(model_dir, "prefill")) as prefill,
        node_running(config_of(model_dir, "pd", f"127.0.0.1:{prefill.port}")) as pair,
        node_running(config_of(model_dir, "pd")) as alone,
    ):
        await until(lambda: any(pair.node.load().peers_usable.values()))
        path = "/v1/chat/completions"
        _, cold = await alone.post(path, body)
        _, warm = await alone.post(path, body)
        streamed = await alone.stream(path, body)
        status, remote = await pair.post(path, {**body, "cache_salt": "a"})
        _, again = await pair.post(path, {**body, "cache_salt": "a"})
        await until(lambda: holds_nothing(alone) and holds_nothing(pair) and holds_nothing(prefill))
    assert status == 200
    answers = [b["choices"][0]["message"]["content"] for b in (cold, warm, remote, again)]
    assert len(answers[0]) > 0
    assert answers == [answers[0]] * 4
    assert chat_text(streamed) == answers[0]
    stories = [body["usage"]["prfaas"] for body in (cold, warm, remote, again)]
    assert [story["route"] for story in stories] == ["local", "local", "remote", "local"]
    assert stories[0]["tokens_reused"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert stories[2]["tokens_remote"] > 100
    assert stories[2]["bytes_received"] > 0
    for body in (cold, warm, remote, again):
        story = body["usage"]["prfaas"]
        parts = (story["tokens_reused"], story["tokens_local"], story["tokens_remote"])
        assert sum(parts) == body["usage"]["prompt_tokens"]
        assert story["ttft_s"] > 0


async def test_several_seeded_choices_differ_and_agree_in_both_modes(model_dir):
    fields: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1, "max_tokens": 12}
    async with node_running(config_of(model_dir, "pd")) as face:
        _, whole = await face.chat(**fields)
        events = await face.stream_chat(**fields)
        _, other = await face.chat(**{**fields, "seed": 8})
        await until(lambda: holds_nothing(face))
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) > 1
    assert [chat_text(events, index) for index in range(3)] == texts
    assert sorted(finish_reasons(events)) == [0, 1, 2]
    assert all(len(reasons) == 1 for reasons in finish_reasons(events).values())
    assert [choice["message"]["content"] for choice in other["choices"]] != texts


async def test_a_stop_string_ends_the_work_of_the_engine(model_dir):
    async with node_running(config_of(model_dir, "pd")) as face:
        _, free = await face.chat(temperature=0, max_tokens=40)
        text = free["choices"][0]["message"]["content"]
        stop = text[8:11]
        _, stopped = await face.chat(temperature=0, max_tokens=400, stop=stop)
        events = await face.stream_chat(temperature=0, max_tokens=400, stop=stop)
        await until(lambda: holds_nothing(face))
    expected = text[: text.index(stop)]
    assert stopped["choices"][0]["message"]["content"] == expected
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert chat_text(events) == expected
    assert stopped["usage"]["completion_tokens"] <= 40


async def test_top_logprobs_of_a_single_candidate_are_numbers(model_dir):
    async with node_running(config_of(model_dir, "pd")) as face:
        status, body = await face.chat(logprobs=True, top_logprobs=20, top_k=1, max_tokens=6)
        banned, _ = await face.chat(logit_bias={"5": -100}, logprobs=True, max_tokens=3)
    assert (status, banned) == (200, 200)
    choice = body["choices"][0]
    entries = choice["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert spelled.decode(errors="replace") == choice["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 20
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # top_k 1 draws the likeliest


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_context_is_filled_to_the_last_token_and_no_further(model_dir, is_stream):
    async with node_running(config_of(model_dir, "pd")) as face:
        for num_tokens, status in [(CONTEXT_TOKENS - 1, 200), (CONTEXT_TOKENS, 400)]:
            body = {"model": "tiny", "prompt": [7] * num_tokens, "max_tokens": 1}
            async with face.session.post(
                face.url + "/v1/completions", json={**body, "stream": is_stream}
            ) as response:
                assert response.status == status, await response.text()
        await until(lambda: holds_nothing(face))


async def test_a_client_that_leaves_frees_its_pages_and_the_next_answer_is_right(model_dir):
    loop = asyncio.get_running_loop()
    async with node_running(config_of(model_dir, "pd")) as face:
        _, before = await face.chat(temperature=0, max_tokens=8)
        for is_stream in (True, False):
            client = blocking_client(face.port)
            await loop.sock_sendall(
                client, raw_chat(face.port, stream=is_stream, max_tokens=500, ignore_eos=True)
            )
            await until(lambda: face.node.load().num_running)
            reset(client)
            await until(lambda: holds_nothing(face) and not face.lifecycle.num_inside)
        _, after = await face.chat(temperature=0, max_tokens=8)
    assert after["choices"] == before["choices"]


async def test_many_at_once_are_all_answered_as_if_alone(model_dir):
    config = config_of(model_dir, "pd")
    config = replace(config, engine=replace(config.engine, max_batch_sequences=3))

    def fields(number: int) -> dict[str, Any]:
        content = f"Question {number}: " + "word " * (number * 7)
        return {
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 10,
        }

    async with node_running(config) as face:
        alone = [await face.chat(**fields(number)) for number in range(8)]
        async with asyncio.TaskGroup() as tasks:
            together = [tasks.create_task(face.chat(**fields(number))) for number in range(8)]
        await until(lambda: holds_nothing(face))
    for (_, one), task in zip(alone, together, strict=True):
        assert task.result()[1]["choices"] == one["choices"]


async def test_a_stop_that_is_cut_short_ends_a_real_stream_with_an_error_event(model_dir):
    config = config_of(model_dir, "pd")
    with bind_socket("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    config = replace(config, http=HttpOptions(port=port, drain_timeout_s=0.05))
    is_ready = asyncio.Event()
    body = {**CHAT, "stream": True, "max_tokens": 550, "ignore_eos": True}
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(load_pd_node, config, on_ready=lambda *_: is_ready.set()))
        await is_ready.wait()
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with session.post(url, json=body) as response:
            assert response.status == 200
            os.kill(os.getpid(), signal.SIGTERM)
            events = parse_events((await response.read()).decode())
    assert events[-1]["error"]["code"] == "engine_error"
    assert chat_text(events[:-1])
