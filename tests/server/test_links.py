"""The links of two nodes show in their metrics, and the router knows the round trip."""

from prfaas.clock import monotonic_s
from prfaas.server.links import MAX_LINKS, Links
from prfaas.transport.ports import SocketPort
from tests.server.fleet import fleet, request
from tests.transport.channels import channel, warm


async def test_both_ends_of_a_link_are_seen_while_streams_are_open():
    async with fleet(streams=3) as nodes:
        await nodes.ask(request(150))
        assert nodes.pd.peer is not None
        nodes.pd.peer.links.sample()
        nodes.prefill.node.service._links.sample()
        (ours,) = nodes.pd.load().links.values()
        (theirs,) = nodes.prefill.node.load().links.values()
        assert ours.num_streams >= 3
        assert theirs.num_streams >= 3
        assert ours.rtt_s is not None
        nodes.pd.peer._tell_router()
        assert nodes.pd._router.peer(nodes.pd.peer.name).rtt_s == ours.rtt_s


async def test_links_that_are_told_apart_are_bounded_and_gone_ones_forgotten():
    async with channel(streams=1) as (service, client):
        await warm(client)
        (port,) = client.open_ports()
        assert isinstance(port, SocketPort)
        names = [f"host-{number}" for number in range(MAX_LINKS + 5)]
        links = Links(lambda: [(name, port) for name in names], clock=monotonic_s)
        links.sample()
        assert set(links.views) == set(names[:MAX_LINKS])
        del names[:]
        links.sample()
        assert not links.views
        assert service.channel.open_ports()
