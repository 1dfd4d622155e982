"""Replayed nodes through a bad link: a wrong or missing byte would change the answer, and none does."""

import asyncio
from typing import Any

import pytest

from prfaas.transport.wire import FrameType
from prfaas.types import RequestRecord
from tests.frame_scanner import TLS_DATA, Spot
from tests.relay import Fault
from tests.server.fleet import CountedTransfers, until
from tests.server.real_nodes import RealNodes
from tests.server.replay_nodes import replay_nodes
from tests.server.test_replay_nodes import ask
from tests.transport.certificates import Certificates

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]
NUM_TOKENS = 320
STALL_S = 0.6
PAGES = [Spot(FrameType.PAGE, "in_header"), Spot(FrameType.PAGE, "in_payload", 9)]
SENT = [
    *PAGES,
    Spot(FrameType.FIRST_TOKENS, "before"),
    Spot(FrameType.END, "in_payload"),
]
SAID = [
    Spot(FrameType.ATTACH, "before"),
    Spot(FrameType.ATTACH, "in_payload"),
    Spot(FrameType.ACK, "in_header"),
]
RECORDS = [Spot(TLS_DATA, "in_header"), Spot(TLS_DATA, "in_payload", 2)]
GOES_ON = ("cut", "half_close", "flip", "twice", "again", "delay", "hold")
ENDS = ("gone", "black_hole", "swallow")


@pytest.fixture(autouse=True)
def _no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is a frame of its own however fast the streams are, so that faults find their places."""
    monkeypatch.setattr("prfaas.transport.sending.RUN_S", 0.0)


def cases(guard: str) -> list[Fault]:
    """Every kind of fault at places of every kind of frame, a third of them under a key; fewer where only TLS records are seen."""
    if guard == "tls":
        return [Fault(0, kind, at, seconds=0.02) for kind in GOES_ON for at in RECORDS]
    sent = [Fault(0, kind, at) for kind in ("cut", "half_close", "flip", "again") for at in SENT]
    sent += [
        Fault(0, kind, at, seconds=0.02) for kind in ("twice", "delay", "hold") for at in PAGES
    ]
    said = [Fault(0, kind, at, direction="up") for kind in ("cut", "flip", "again") for at in SAID]
    words = [Fault(0, kind, SAID[1], direction="up") for kind in ("flip", "again")]
    said += [Fault(0, "cut", PAGES[1], then=word) for word in words]
    sent.append(Fault(0, "slow", PAGES[0]))
    every = [*sent, *said, *(Fault(0, kind, at) for kind in ENDS for at in PAGES[1:])]
    return [fault for n, fault in enumerate(every) if (n % 3 == 0) == (guard == "key")]


def security(guard: str, tmp_path: Any) -> dict[str, Any]:
    if guard == "key":
        key = tmp_path / "cluster.key"
        key.write_text("k" * 32)
        key.chmod(0o600)
        return {"cluster_key_file": str(key)}
    if guard == "tls":
        files = Certificates(tmp_path)
        cert, private = files.issue("peer")
        return {
            "of_prefill": {"tls_cert": cert, "tls_key": private},
            "of_pd": {"tls_ca": files.authority},
        }
    return {}


async def well_again(nodes: RealNodes) -> None:
    """Return once the link is whole, its streams are open again, and nobody holds anything."""
    nodes.relay.fault = None
    peer = nodes.pd.peer
    assert peer is not None
    peer.doubt()
    streams = peer.client.streams
    await until(lambda: peer.is_usable and streams.num_open >= streams.num_idle)
    await nodes.at_rest()
    await until(lambda: not nodes.prefill.load().num_transfers)
    assert nodes.pd.load().num_transfers == 0


def check_record(record: RequestRecord, fault: Fault) -> None:
    assert record.tokens_reused + record.tokens_local + record.tokens_remote == NUM_TOKENS
    if record.route == "local":
        assert record.reason.partition(":")[0] in (
            "transfer_failed",
            "peer_stuck",
            "peer_down",
        ), fault
    elif fault.kind in ("gone", "black_hole"):
        pytest.fail(f"{fault} hurt nobody")


@pytest.mark.parametrize("guard", ["open", "key", "tls"])
async def test_whatever_the_link_does_the_answer_is_the_local_one(guard, tmp_path):
    settings = security(guard, tmp_path)
    async with replay_nodes(stall_timeout_s=STALL_S, lease_s=1.0, streams=2, **settings) as nodes:
        local, _ = await ask(nodes, "local", "local", num_tokens=NUM_TOKENS, salt="local")
        if guard == "tls":
            nodes.relay.is_opaque = True
            await nodes.relay.cut_all()
        await well_again(nodes)
        routes = []
        for number, fault in enumerate(cases(guard)):
            nodes.relay.fault = fault
            drawn, record = await ask(
                nodes, f"hurt-{number}", "remote", num_tokens=NUM_TOKENS, salt=f"{number}"
            )
            assert drawn == local, fault
            if record.route == "remote":  # else a loaded machine may have stalled before its place
                await nodes.relay.hurt()
            check_record(record, fault)
            routes.append(record.route)
            await well_again(nodes)
        assert routes.count("remote") > len(routes) // 2
        metrics = nodes.pd._metrics
        assert isinstance(metrics, CountedTransfers)
        told = [outcome for _, outcome in metrics.outcomes]
        assert told.count("completed") == routes.count("remote")
        assert len(told) == len(routes)


async def test_requests_at_once_through_faults_are_all_answered_as_if_alone():
    """Transfers share streams one after the other: what breaks one of them must not touch the next."""
    async with replay_nodes(streams=3) as nodes:
        local, _ = await ask(nodes, "local", "local", num_tokens=NUM_TOKENS, salt="local")
        for number, kind in enumerate(("cut", "flip", "half_close", "hold")):
            for at in (Spot(FrameType.PAGE, "in_payload", 4), Spot(FrameType.END, "before")):
                await well_again(nodes)
                nodes.relay.fault = Fault(0, kind, at, seconds=0.02)
                async with asyncio.TaskGroup() as tasks:
                    asking = [
                        tasks.create_task(
                            ask(
                                nodes,
                                f"{kind}-{at}-{one}",
                                "remote",
                                num_tokens=NUM_TOKENS,
                                salt=f"{number}-{at}-{one}",
                            )
                        )
                        for one in range(4)
                    ]
                for task in asking:
                    drawn, record = task.result()
                    assert drawn == local
                    assert record.route == "remote"
        await well_again(nodes)
