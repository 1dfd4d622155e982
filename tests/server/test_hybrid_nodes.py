"""Two real nodes on tiny models with states: equal bits, and an answer whatever the link does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.clock import monotonic_s
from prfaas.engine.config import model_from_hf
from prfaas.server import verify
from prfaas.server.pd import PdNode, load_pd_node
from prfaas.server.verify import verify_node, verify_tokens
from prfaas.types import Request, RequestRecord, RouteName, SamplingParams, TokenLogprobs
from tests.cli.node_processes import running_node
from tests.relay import Fault
from tests.server.fleet import CountedTransfers
from tests.server.real_nodes import config, no_progress, real_nodes
from tests.tiny_configs import FAMILIES, Family, tiny_config
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
BLOCK = 64
LINEAR = [f for f in FAMILIES if any(x.states for x in model_from_hf(tiny_config(f)).layers)]
SETTINGS: dict[str, Any] = {"dtype": "float32", "block_tokens": BLOCK, "max_context_tokens": 420}


@pytest.fixture
def models(tmp_path, monkeypatch) -> Callable[[Family], Path]:
    monkeypatch.setattr(
        verify,
        "SAMPLING",
        {name: replace(s, max_tokens=5) for name, s in verify.SAMPLING.items()},
    )
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    return lambda family: write_tiny_model(tmp_path / family, family)


@pytest.mark.parametrize("family", ["kimi_linear", "bamba", "falcon_h1", "minimax"])
async def test_equal_nodes_with_states_agree_on_every_token_and_every_bit(family, models):
    model = models(family)
    async with real_nodes(model, model, **SETTINGS) as nodes:
        report = await verify_node(nodes.pd, clock=monotonic_s)
        assert [case.failure for case in report.cases if case.failure] == []
        assert report.tokens_equal
        assert report.bits_equal
        assert {case.prompt_tokens for case in report.cases} >= {1, 63, 64, 65, 197}
        for case in report.cases:
            if case.row == "remote_cached":
                boundary = (case.prompt_tokens - 1) // BLOCK * BLOCK
                assert case.tokens_reused == boundary


async def ask(
    pd: PdNode, tokens: tuple[int, ...], route: RouteName, salt: bytes
) -> tuple[list[int], RequestRecord]:
    events, record = await ask_events(pd, tokens, route, salt)
    return [token for token, _ in events], record


async def ask_events(
    pd: PdNode, tokens: tuple[int, ...], route: RouteName, salt: bytes
) -> tuple[list[tuple[int, TokenLogprobs | None]], RequestRecord]:
    """Return tokens with their log probabilities, which are compared to the last bit."""
    request = Request(
        request_id=f"{route}-{salt.hex()}",
        prompt_tokens=tokens,
        sampling=SamplingParams(max_tokens=8, seed=3, temperature=1.0, num_logprobs=3),
        cache_salt=salt,
    )
    async with pd.generate(request, force_route=route) as generation:
        drawn = [(event.token_id, event.logprobs) async for event in generation]
    return drawn, generation.record


@pytest.mark.parametrize(("percent", "salvaged_tokens"), [(1, 0), (40, 0), (95, 192)])
async def test_a_transfer_that_breaks_leaves_the_longest_state_with_all_its_kv(
    percent, salvaged_tokens, models
):
    """Of the last layer only the state at the end is behind 95 percent of the stream."""
    model = models("bamba")
    settings = SETTINGS | {"streams": 1, "transfer_snapshot_tokens": "0"}
    async with real_nodes(model, model, **settings) as nodes:
        tokens = verify_tokens(nodes.pd.tokenizer.encode, 200)
        expected, _ = await ask(nodes.pd, tokens, "local", b"local")
        answer, record = await ask(nodes.pd, tokens, "remote", b"whole")
        assert (answer, record.route) == (expected, "remote")
        nodes.relay.fault = Fault(nodes.relay.stream_bytes * percent // 100, "gone")
        answer, record = await ask(nodes.pd, tokens, "remote", b"broken")
        assert (answer, record.route) == (expected, "local")
        assert record.reason.startswith(("transfer_failed", "peer_stuck"))
        assert (record.tokens_remote, record.tokens_local) == (
            salvaged_tokens,
            200 - salvaged_tokens,
        )
        nodes.relay.fault = None


@pytest.mark.parametrize(("family", "percent"), [("kimi_linear", 80), ("gemma3", 60)])
async def test_a_transfer_that_breaks_leaves_its_last_snapshot(family, percent, models):
    """Without snapshots on the way only the prompt's end would do, which has not come."""
    model = models(family)
    salvaged = {}
    for every in ("0", "64"):
        settings = SETTINGS | {"streams": 2, "transfer_snapshot_tokens": every}
        async with real_nodes(model, model, **settings) as nodes:
            tokens = verify_tokens(nodes.pd.tokenizer.encode, 400)
            expected, _ = await ask(nodes.pd, tokens, "local", b"local")
            answer, record = await ask(nodes.pd, tokens, "remote", b"whole")
            assert (answer, record.route) == (expected, "remote")
            nodes.relay.fault = Fault(nodes.relay.stream_bytes * percent // 100, "gone")
            answer, record = await ask(nodes.pd, tokens, "remote", b"broken")
            assert (answer, record.route) == (expected, "local")
            assert record.tokens_remote + record.tokens_local == 400
            salvaged[every] = record.tokens_remote
            nodes.relay.fault = None
    assert salvaged["0"] == 0
    assert salvaged["64"] >= 128
    assert salvaged["64"] % 64 == 0


async def test_snapshots_on_the_way_change_no_answer_and_serve_other_prompts(models):
    model = models("kimi_linear")
    settings = SETTINGS | {"transfer_snapshot_tokens": "64"}
    async with real_nodes(model, model, **settings) as nodes:
        tokens = verify_tokens(nodes.pd.tokenizer.encode, 400)
        expected, _ = await ask(nodes.pd, tokens, "local", b"local")
        answer, record = await ask(nodes.pd, tokens, "remote", b"whole")
        assert (answer, record.route) == (expected, "remote")
        other = (*tokens[:200], *tokens[100:200])
        _, record = await ask(nodes.pd, other, "local", b"whole")
        assert record.tokens_reused == 192


@contextlib.asynccontextmanager
async def node_with_a_peer_process(model: Path) -> AsyncIterator[PdNode]:
    """Run a pd node here whose peer is a process of its own."""
    flags = ("--role", "prefill", "--model", str(model), "--dtype", "float32")
    with running_node(model.parent, *flags, "--max-context-tokens", "420") as peer:
        await asyncio.to_thread(peer.wait_ready)
        async with asyncio.TaskGroup() as tasks:
            own = config(model, f"127.0.0.1:{peer.port}", **SETTINGS)
            pd = load_pd_node(own, CountedTransfers(), no_progress)
            await pd.start(tasks)
            try:
                async with asyncio.timeout(60):
                    assert pd.peer is not None
                    await pd.peer.settled()
                    yield pd
            finally:
                await pd.close()


@pytest.mark.parametrize("family", LINEAR)
async def test_a_state_that_decode_made_goes_on_as_another_process_prefills(family, models):
    async with node_with_a_peer_process(models(family)) as pd:
        opening = verify_tokens(pd.tokenizer.encode, 2 * BLOCK - 4)
        said, _ = await ask(pd, opening, "local", b"chat")
        turn = (*opening, *said, *opening[:20])
        warm, record = await ask_events(pd, turn, "local", b"chat")
        assert record.tokens_reused == 2 * BLOCK  # within the answer
        there, record = await ask_events(pd, turn, "remote", b"other")
        assert (record.route, record.tokens_reused) == ("remote", 0)
        assert warm == there
