"""Clients that leave between prefill and decode, and what is said of a transfer: nothing stays, no secret shows."""

import asyncio
import json
import logging
import secrets
from typing import Any

import pytest
import structlog

from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.wire import FrameType
from tests.frame_scanner import Spot
from tests.relay import Fault
from tests.server.fleet import Fleet, fleet, request, until
from tests.server.scripted_engine import HYBRID

pytestmark = pytest.mark.usefixtures("no_leaks")
NUM_TOKENS = 150
NUM_CLIENTS = 200
AT_ONCE = 10


async def leave(nodes: Fleet, variant: int) -> None:
    """Take the peer's first token, and leave before this node's engine makes the second."""
    asked = request(NUM_TOKENS, variant=variant, max_tokens=50)
    # A route of its own choice may be local, where the gate is closed.
    async with nodes.pd.generate(asked, force_route="remote") as generation:
        async for _ in generation:
            break
        if variant % 3 == 0:  # when everything has come, not when some of it is on its way
            await until(lambda: nodes.pd.load().num_transfers == 0)


@pytest.mark.slow
async def test_two_hundred_clients_that_leave_between_prefill_and_decode_pin_no_page():
    # A machine that stands still must not end a transfer: no engine computes here while the gate is closed.
    async with fleet(layout=HYBRID, max_transfers=AT_ONCE, stall_timeout_s=30.0) as nodes:
        most_in_flight = 0

        async def watch() -> None:
            nonlocal most_in_flight
            while True:
                most_in_flight = max(most_in_flight, nodes.prefill.node.load().num_transfers)
                await asyncio.sleep(0.002)

        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            for start in range(0, NUM_CLIENTS, AT_ONCE):
                nodes.pd_engine.gate.clear()
                async with asyncio.TaskGroup() as clients:
                    for variant in range(start, start + AT_ONCE):
                        clients.create_task(leave(nodes, variant))
                nodes.pd_engine.gate.set()
                await until(lambda: not nodes.pd_cache.counts().num_tables)
                # The peer hears later that they left: till then it has no room for as many.
                await until(lambda: not nodes.prefill.node.load().num_transfers)
            watching.cancel()
        await nodes.at_rest()
        assert most_in_flight > 1  # as prfaas_transfers_in_flight shows it
        outcomes = [outcome for _, outcome in nodes.prefill_metrics.outcomes]
        assert len(outcomes) >= NUM_CLIENTS
        assert "expired" not in outcomes  # the lease is for those who cannot say that they leave
        pool = nodes.prefill_cache.counts()
        assert (pool.num_referenced, pool.num_transfer, pool.num_tables) == (0, 0, 0)
        answer = await nodes.ask(request(NUM_TOKENS, variant=1_000))
        assert answer.record.route == "remote"


async def test_neither_key_nor_capability_is_ever_logged(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    drawn: list[str] = []
    draw = secrets.token_hex

    def remember(num_bytes: int) -> str:
        drawn.append(draw(num_bytes))
        return drawn[-1]

    monkeypatch.setattr(secrets, "token_hex", remember)
    key = ClusterKey(b"a key that nobody may see")
    entries: list[Any] = []
    with structlog.testing.capture_logs() as logs:
        async with fleet(pd_key=key, prefill_key=key, stall_timeout_s=0.4) as nodes:
            peer = nodes.pd.peer
            assert peer is not None
            for number, kind in enumerate(("cut", "flip", "gone", "black_hole")):
                nodes.relay.fault = Fault(0, kind, Spot(FrameType.PAGE, "in_payload", 2))
                await nodes.ask(request(NUM_TOKENS, variant=number), "remote")
                nodes.relay.fault = None
                nodes.relay.cut_streams()
                peer.doubt()
                await until(lambda: peer.is_usable)
        entries += logs
    text = json.dumps(entries, default=repr) + caplog.text
    assert "transfer.received" in text
    capabilities = [secret for secret in drawn if len(secret) == 32]
    told = {entry.get("transfer_id") for entry in entries}
    untold = {secret for secret in capabilities if secret not in told}
    assert len(untold) >= 4
    assert not [secret for secret in untold if secret in text]
    assert "nobody may see" not in text
