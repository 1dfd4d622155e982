"""Which peers a node has: those it was given, those that are named, those in use."""

import asyncio

import pytest

from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.router import Router
from prfaas.server.peers import Peers, parse_peers
from tests.server.fleet import IDENTITY, OPTIONS

pytestmark = pytest.mark.usefixtures("no_leaks")
GIVEN, NAMED, OTHER = "127.0.0.1:9", "[::1]:9", "127.0.0.1:11"


def test_peers_are_separated_by_commas_and_each_counts_once():
    assert [*map(str, parse_peers(f"{GIVEN}, {NAMED},{GIVEN}"))] == [GIVEN, NAMED]
    assert parse_peers(None) == ()
    with pytest.raises(ValueError, match="is not host:port"):
        parse_peers(f"{GIVEN},")


async def test_peers_come_when_they_are_named_and_go_when_nobody_names_or_uses_them():
    router = Router(peers=(), options=SchedulerOptions())
    async with asyncio.TaskGroup() as tasks:
        peers = Peers(
            parse_peers(GIVEN),
            options=OPTIONS,
            identity=IDENTITY,
            router=router,
            clock=asyncio.get_running_loop().time,
            spawn=tasks.create_task,
        )
        assert peers.first is peers.get(GIVEN)
        peers.keep([NAMED, "no address"])
        other = peers.ensure(OTHER)
        assert peers.ensure(OTHER) is other
        assert {*router.peers} == {peer.name for peer in peers.all} == {GIVEN, NAMED, OTHER}
        with other.in_use():
            peers.keep([])
            assert {*router.peers} == {GIVEN, OTHER}
        peers.keep([])
        assert [peer.name for peer in peers.all] == [*router.peers] == [GIVEN]
        again = peers.ensure(OTHER)
        assert again is not other
        await again.settled()
        assert again.state == "down", "nobody is there"
        peers.stop()
        peers.keep([NAMED])
        assert {peer.name for peer in peers.all} == {GIVEN, OTHER}
    await peers.close()
