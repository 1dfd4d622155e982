"""A node joins a fleet, tells how it is and what it caches, obeys, and leaves."""

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import pytest
import structlog

from prfaas.cache.changes import CacheSnapshot, Changes
from prfaas.config.load import load_config
from prfaas.config.options import NodeConfig
from prfaas.errors import IncompatiblePeer, Overloaded, TransferError, UntrustedPeer
from prfaas.scheduler.heartbeat import LinkReport, Mode
from prfaas.scheduler.view import PeerView
from prfaas.server import member as member_module
from prfaas.server.heartbeat_messages import (
    HeartbeatMessage,
    HeartbeatReply,
    encode_heartbeat,
    parse_heartbeat,
)
from prfaas.server.member import MAX_CHANGED_KEYS, Member, Membership, member_of
from prfaas.server.node import NodeLoad
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.handshake import Identity
from tests.server.fleet import until
from tests.server.fleet_nodes import NODE_IDENTITY, PATIENT, SchedulerHost
from tests.server.scripted_engine import HYBRID

ME = Membership(scheduler="127.0.0.1:8200", name="n:1", role="pd", cluster="eu", max_running=4)
CALM = HeartbeatReply(is_known=True, wants_snapshot=False, mode=None, peers=(), period_s=0.01)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Log:
    """A change log whose cache the test fills."""

    def __init__(self) -> None:
        self.epoch = 7
        self.sequence = 0
        self.keys: list[bytes] = []
        self._untold: list[bytes] = []

    def add(self, *keys: bytes) -> None:
        self.keys += keys
        self._untold += keys

    def take(self, max_keys: int) -> Changes | None:
        taken, self._untold = self._untold[:max_keys], self._untold[max_keys:]
        if not taken:
            return None
        self.sequence += 1
        return Changes(epoch=self.epoch, sequence=self.sequence, added=tuple(taken))

    def snapshot(self) -> CacheSnapshot:
        self.sequence += bool(self._untold)
        self._untold.clear()
        return CacheSnapshot(epoch=self.epoch, sequence=self.sequence, keys=tuple(self.keys))


class Node:
    def __init__(self) -> None:
        self.identity: Identity = NODE_IDENTITY
        self.layout = HYBRID
        self.max_context_tokens = 2048
        self.is_ready = (True, "")
        self.changes: Any = Log()
        self.mode: Mode = "both"
        self.kept: list[list[str]] = []

    def set_mode(self, mode: Mode) -> None:
        self.mode = mode

    def keep_peers(self, names: Iterable[str]) -> None:
        self.kept.append(list(names))

    def load(self) -> NodeLoad:
        return NodeLoad(
            num_running=3,
            num_waiting=2,
            num_waiting_tokens=500,
            prefill_tokens_per_s=800.0,
            decode_step_s=0.02,
            pages={"free": 2, "cached": 4, "referenced": 2},
            peers={"p:1": PeerView(peer="p:1", rtt_s=0.01, link_bytes_per_s=1e6)},
            peers_usable={"p:1": True},
        )


class Scheduler:
    """Answers heartbeats by a script, the last word of which it repeats."""

    def __init__(self, *answers: HeartbeatReply | Exception) -> None:
        self.answers = itertools.chain(answers, itertools.repeat(answers[-1]))
        self.heard: list[HeartbeatMessage] = []
        self.left: list[tuple[str, int]] = []
        self.is_closed = False

    async def heartbeat(self, message: HeartbeatMessage) -> HeartbeatReply:
        self.heard.append(message)
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def leave(self, node: str, epoch: int, _ours: Identity) -> None:
        self.left.append((node, epoch))

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch):
    for name in ("FIRST_BEAT_S", "HURRY_S", "FIRST_BACKOFF_S", "MAX_BACKOFF_S", "REFUSED_S"):
        monkeypatch.setattr(member_module, name, 0.001)


@contextlib.asynccontextmanager
async def running(node: Node, scheduler: Any) -> AsyncIterator[Member]:
    member = Member(node, ME, epoch=7, make_client=lambda: scheduler)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(member.run())
        try:
            yield member
        finally:
            task.cancel()
            await asyncio.wait({task})
            await member.leave()


async def test_a_heartbeat_says_how_the_node_is():
    node, scheduler = Node(), Scheduler(CALM)
    async with running(node, scheduler):
        await until(lambda: bool(scheduler.heard))
    beat = scheduler.heard[0].heartbeat
    assert (beat.node, beat.role, beat.cluster, beat.mode, beat.epoch) == (
        "n:1",
        "pd",
        "eu",
        "both",
        7,
    )
    assert (beat.num_running, beat.num_waiting, beat.max_running) == (3, 2, 4)
    assert (beat.num_waiting_tokens, beat.prefill_tokens_per_s, beat.decode_step_s) == (
        500,
        800.0,
        0.02,
    )
    assert beat.free_pages_fraction == 0.75
    assert beat.free_kv_bytes == 6 * node.layout.page_bytes
    assert beat.links == {"p:1": LinkReport(rtt_s=0.01, bytes_per_s=1e6)}
    assert beat.peers_usable == {"p:1": True}
    assert scheduler.heard[0].max_context_tokens == 2048


async def test_what_is_no_number_is_unknown_to_the_scheduler():
    node, scheduler = Node(), Scheduler(CALM)
    peer = PeerView(peer="p:1", rtt_s=math.inf, link_bytes_per_s=math.nan)
    load = replace(node.load(), prefill_tokens_per_s=math.nan, peers={"p:1": peer})
    node.load = lambda: load  # type: ignore[method-assign]
    async with running(node, scheduler):
        await until(lambda: bool(scheduler.heard))
    beat = parse_heartbeat(encode_heartbeat(scheduler.heard[0])).heartbeat
    assert beat.prefill_tokens_per_s is None
    assert beat.links == {"p:1": LinkReport()}


async def test_what_the_scheduler_wants_is_done():
    wish = replace(CALM, mode="decode", peers=("n:1", "p:1", "p:2"))
    node, scheduler = Node(), Scheduler(wish, CALM)
    async with running(node, scheduler):
        await until(lambda: len(scheduler.heard) > 1)
    assert node.mode == "decode"
    assert node.kept[0] == ["p:1", "p:2"]  # itself is no peer
    assert scheduler.heard[1].heartbeat.mode == "decode"


async def test_changes_of_the_cache_are_told_once_and_again_only_if_nobody_heard():
    node = Node()
    node.changes.add(key(1), key(2))
    scheduler = Scheduler(TransferError("gone"), CALM)
    async with running(node, scheduler):
        await until(lambda: len(scheduler.heard) > 1)
        node.changes.add(key(3))
        await until(lambda: scheduler.heard[-1].changes is None and len(scheduler.heard) > 3)
    told = [message.changes for message in scheduler.heard if message.changes is not None]
    assert [changes.sequence for changes in told] == [1, 1, 2]
    assert [changes.added for changes in told] == [(key(1), key(2)), (key(1), key(2)), (key(3),)]


async def test_more_changes_than_a_message_takes_come_one_message_after_the_other():
    node = Node()
    node.changes.add(*map(key, range(2 * MAX_CHANGED_KEYS + 5)))
    scheduler = Scheduler(replace(CALM, period_s=1000.0))
    async with running(node, scheduler):
        await until(lambda: len(scheduler.heard) == 3)
    sizes = [len(message.changes.added) for message in scheduler.heard if message.changes]
    assert sizes == [MAX_CHANGED_KEYS, MAX_CHANGED_KEYS, 5]


async def test_a_snapshot_is_sent_when_asked_for_until_it_is_heard():
    node = Node()
    node.changes.add(key(1))
    wants = replace(CALM, wants_snapshot=True)
    scheduler = Scheduler(wants, TransferError("gone"), CALM)
    async with running(node, scheduler):
        await until(lambda: len(scheduler.heard) > 1)
        node.changes.add(key(2))
        await until(lambda: len(scheduler.heard) > 3)
    first, lost, again, *later = scheduler.heard
    assert first.changes is not None
    assert lost.snapshot is not None
    assert again.snapshot is not None
    assert set(again.snapshot.keys) >= {key(1)}
    assert all(message.snapshot is None for message in later)
    assert all(message.changes is None for message in (lost, again))


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (TransferError("nobody there"), "lost"),
        (Overloaded("too many"), "lost"),
        (UntrustedPeer("no key"), "untrusted"),
        (IncompatiblePeer("model differs: 'a' here, 'b' there"), "refused"),
    ],
)
async def test_a_node_keeps_trying_and_says_once_why_it_has_to(error, state):
    node, scheduler = Node(), Scheduler(error, error, error, CALM, error)
    with structlog.testing.capture_logs() as events:
        async with running(node, scheduler) as member:
            await until(lambda: member.state == "joined")
            await until(lambda: member.state == state)
            await until(lambda: len(scheduler.heard) > 8)
    assert [event["event"] for event in events] == ["fleet.lost", "fleet.joined", "fleet.lost"]
    assert (events[0]["state"], events[0]["detail"]) == (state, str(error))


async def test_a_node_that_drains_says_so_at_once_and_leaves_at_the_end():
    node, scheduler = Node(), Scheduler(replace(CALM, period_s=1000.0))
    async with running(node, scheduler) as member:
        await until(lambda: member.state == "joined")
        member.drain()
        await until(lambda: len(scheduler.heard) == 2)
        assert scheduler.heard[1].heartbeat.is_draining
        assert not scheduler.left
    assert scheduler.left == [("n:1", 7)]
    assert scheduler.is_closed


async def test_a_node_that_was_never_heard_leaves_without_a_word():
    scheduler = Scheduler(TransferError("nobody there"))
    async with running(Node(), scheduler):
        await until(lambda: bool(scheduler.heard))
    assert not scheduler.left
    assert scheduler.is_closed


@pytest.mark.parametrize("cluster_key", [None, ClusterKey(b"k" * 32)])
async def test_a_real_scheduler_knows_the_node_and_what_it_caches(cluster_key):
    host, node = SchedulerHost(cluster_key, PATIENT), Node()
    node.changes.add(key(1), key(2))
    node.changes.take(10)  # told to a scheduler that is gone
    async with asyncio.TaskGroup() as tasks:
        await host.start(tasks)
        try:
            async with running(node, host.client(cluster_key)) as member:
                await until(lambda: host.node.driver.num_keys == 2)
                assert member.state == "joined"
                assert [each.heartbeat.node for each in host.node.members()] == ["n:1"]
            assert host.node.members() == ()
        finally:
            await host.close()


def config(**flags: object) -> NodeConfig:
    return load_config(flags=flags, environ={})


def test_a_node_is_a_member_by_its_settings():
    assert Membership.of(config()) is None
    assert member_of(Node(), config(role="prefill")) is None
    joins = {"scheduler": "127.0.0.1:8200", "cluster": "eu"}
    assert Membership.of(config(**joins, max_batch_sequences="3")) == replace(
        ME, name="127.0.0.1:8000", max_running=3
    )
    assert Membership.of(
        config(**joins, role="prefill", max_transfers="5", advertise="gpu-1:9")
    ) == replace(ME, name="gpu-1:9", role="prefill", max_running=5)
    member = member_of(Node(), config(**joins))
    assert member is not None
    assert member.state == "joining"
