"""Two real nodes on tiny models with states: equal bits, and an answer whatever the link does."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.clock import monotonic_s
from prfaas.errors import ConfigError
from prfaas.server import verify
from prfaas.server.pd import load_pd_node
from prfaas.server.verify import verify_node, verify_tokens
from prfaas.types import Request, RequestRecord, RouteName, SamplingParams
from tests.relay import Fault
from tests.server.fleet import CountedTransfers
from tests.server.real_nodes import RealNodes, config, no_progress, real_nodes
from tests.tiny_configs import Family
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
BLOCK = 64
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


@pytest.mark.parametrize(
    ("family", "numerics"),
    [("kimi_linear", "grid"), ("bamba", "grid"), ("falcon_h1", "grid"), ("minimax", "strict")],
)
async def test_equal_nodes_with_states_agree_on_every_token_and_every_bit(family, numerics, models):
    model = models(family)
    async with real_nodes(model, model, numerics=numerics, **SETTINGS) as nodes:
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
    nodes: RealNodes, tokens: tuple[int, ...], route: RouteName, salt: bytes
) -> tuple[list[int], RequestRecord]:
    request = Request(
        request_id=f"{route}-{salt.hex()}",
        prompt_tokens=tokens,
        sampling=SamplingParams(max_tokens=8, seed=3, temperature=1.0),
        cache_salt=salt,
    )
    async with nodes.pd.generate(request, force_route=route) as generation:
        drawn = [event.token_id async for event in generation]
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
        expected, _ = await ask(nodes, tokens, "local", b"local")
        answer, record = await ask(nodes, tokens, "remote", b"whole")
        assert (answer, record.route) == (expected, "remote")
        nodes.relay.fault = Fault(nodes.relay.stream_bytes * percent // 100, "gone")
        answer, record = await ask(nodes, tokens, "remote", b"broken")
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
            expected, _ = await ask(nodes, tokens, "local", b"local")
            answer, record = await ask(nodes, tokens, "remote", b"whole")
            assert (answer, record.route) == (expected, "remote")
            nodes.relay.fault = Fault(nodes.relay.stream_bytes * percent // 100, "gone")
            answer, record = await ask(nodes, tokens, "remote", b"broken")
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
        expected, _ = await ask(nodes, tokens, "local", b"local")
        answer, record = await ask(nodes, tokens, "remote", b"whole")
        assert (answer, record.route) == (expected, "remote")
        other = (*tokens[:200], *tokens[100:200])
        _, record = await ask(nodes, other, "local", b"whole")
        assert record.tokens_reused == 192


def test_blocks_off_the_chunk_grid_are_refused_before_anything_is_served(models):
    wrong = config(models("minimax"), **(SETTINGS | {"block_tokens": 16}))
    with pytest.raises(ConfigError, match=r"cache\.block_tokens = 16 .* 64"):
        load_pd_node(wrong, CountedTransfers(), no_progress)
