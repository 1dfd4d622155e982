"""Real engines through a bad link: the answer is the local answer, and nothing stays held."""

import pytest

from prfaas.server.verify import verify_tokens
from prfaas.types import Request, RequestRecord, RouteName, SamplingParams
from tests.relay import Fault
from tests.server.fleet import until
from tests.server.real_nodes import RealNodes, real_nodes
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
NUM_TOKENS = 200


async def ask(
    nodes: RealNodes, name: str, route: RouteName, *, num_events: int | None = None
) -> tuple[list[tuple[int, int]], RequestRecord]:
    """Return (choice, token) pairs and the record; leave after `num_events` of them."""
    asked = Request(
        request_id=name,
        prompt_tokens=verify_tokens(nodes.pd.tokenizer.encode, NUM_TOKENS),
        sampling=SamplingParams(max_tokens=8, seed=5, temperature=0.9),
        num_choices=2,
        cache_salt=name.encode(),
    )
    drawn: list[tuple[int, int]] = []
    async with nodes.pd.generate(asked, force_route=route) as generation:
        if num_events != 0:
            async for event in generation:
                drawn.append((event.choice_index, event.token_id))
                if len(drawn) == num_events:
                    break
    return sorted(drawn, key=lambda pair: pair[0]), generation.record


async def test_cut_and_damaged_transfers_give_the_local_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    model = write_tiny_model(tmp_path / "llama", "llama")
    async with real_nodes(model, model, stall_timeout_s=4.0) as nodes:
        local, _ = await ask(nodes, "local", "local")
        whole, record = await ask(nodes, "whole", "remote")
        assert record.route == "remote"
        assert whole == local
        length = nodes.relay.stream_bytes
        salvaged = []
        for index, (kind, fraction) in enumerate(
            [("gone", 0.5), ("black_hole", 0.5), ("gone", 0.9)]
        ):
            nodes.relay.fault = Fault(int(length * fraction), kind)
            drawn, record = await ask(nodes, f"hurt-{index}", "remote")
            assert record.route == "local"
            assert record.reason.startswith(("transfer_failed", "peer_stuck"))
            assert record.tokens_reused + record.tokens_local + record.tokens_remote == NUM_TOKENS
            assert drawn == local
            salvaged.append(record.tokens_remote)
            nodes.relay.fault = None
            await until(lambda: nodes.pd.peer is not None and nodes.pd.peer.is_usable)
            whole, record = await ask(nodes, f"whole-{index}", "remote")
            assert (whole, record.route) == (local, "remote")
        assert salvaged[0] > 0
        assert salvaged[2] > salvaged[0]


async def test_clients_that_leave_real_engines_leave_nothing_held(tmp_path, monkeypatch):
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    model = write_tiny_model(tmp_path / "gemma3", "gemma3")
    async with real_nodes(model, model) as nodes:
        for index in range(12):
            await ask(nodes, f"left-{index}", "remote", num_events=index % 6)
        await nodes.at_rest()
        whole, record = await ask(nodes, "whole", "remote")
        assert record.route == "remote"
        assert whole == (await ask(nodes, "local", "local"))[0]
