"""What routing, peers and a fleet look like in a scrape."""

from collections.abc import Mapping

from prfaas.scheduler.fleet import Member
from prfaas.scheduler.heartbeat import Heartbeat, Mode
from prfaas.scheduler.standing import NodeState
from prfaas.scheduler.view import PeerView
from prfaas.server.fleet_metrics import routing_families
from prfaas.server.fleet_view import FleetView, MemberView, RoutingView
from prfaas.server.node import NodeLoad
from prfaas.transport.link_state import LinkState


def read(load: NodeLoad) -> Mapping[tuple[str, ...], float]:
    """(name, label values...) -> value."""
    return {
        (sample.name.removeprefix("prfaas_"), *sample.labels.values()): sample.value
        for family in routing_families(load)
        for sample in family.samples
    }


def member(
    node: str,
    state: NodeState = "ready",
    mode: Mode = "both",
    *,
    cluster: str = "eu",
    queue: int = 0,
) -> Member:
    return Member(
        heartbeat=Heartbeat(node=node, role="pd", cluster=cluster, mode=mode, epoch=1),
        numerics="",
        state=state,
        wanted_mode=None,
        age_s=float(queue),
        num_inflight=0,
        num_active=2,
        queue_tokens=queue,
    )


def test_a_node_without_peers_or_fleet_tells_of_its_engine_alone():
    told = read(NodeLoad(num_waiting_tokens=7, num_decoding=2))
    assert told == {("queue_tokens",): 7, ("sequences_decoding",): 2}


def test_a_peers_link_is_used_by_the_share_of_what_it_carries():
    peer = PeerView(
        peer="p:1",
        link_bytes_per_s=2.0**20,
        goodput_bytes_per_s=2.0**18,
        prefill_tokens_per_s=1000.0,
        num_queue_tokens=50,
        num_inflight=1,
        num_inflight_tokens=20,
    )
    told = read(NodeLoad(peers={"p:1": peer}, links={"asker": LinkState().view()}))
    assert told["egress_utilisation_ratio", "p:1"] == 0.25
    assert told["egress_utilisation_ratio", "asker"] == 0
    assert told["peer_link_bytes_per_second", "p:1"] == 2**20
    unknown = NodeLoad(peers={"p:1": PeerView(peer="p:1")}, links={"p:1": LinkState().view()})
    assert read(unknown)["egress_utilisation_ratio", "p:1"] == 0
    assert ("peer_link_bytes_per_second", "p:1") not in read(unknown)
    assert told["peer_prefill_tokens_per_second", "p:1"] == 1000
    assert told["peer_queue_tokens", "p:1"] == 50
    assert told["peer_inflight_requests", "p:1"] == 1
    assert told["peer_inflight_tokens", "p:1"] == 20


def test_t_share_and_mode_are_what_is_in_force():
    told = read(
        NodeLoad(
            routing=RoutingView(
                policy="predictive", threshold_tokens=640, egress_target=0.6, prefill_share=0.25
            ),
            member=MemberView(
                scheduler="s:1",
                name="n:1",
                cluster="eu",
                mode="decode",
                state="lost",
                num_conversions=3,
            ),
        )
    )
    assert told["threshold_tokens", "eu"] == 640
    assert told["egress_target_ratio",] == 0.6
    assert told["prefill_share_ratio",] == 0.25
    assert told["fleet_joined",] == 0
    modes = {key[1]: value for key, value in told.items() if key[0] == "node_mode"}
    assert modes == {"prefill": 0, "decode": 1, "both": 0}
    assert told["conversions_total",] == 3


def test_a_fleet_is_counted_by_state_and_by_the_modes_that_are_of_use():
    fleet = FleetView(
        members=(
            member("a", mode="decode", queue=1),
            member("b", mode="decode", queue=2),
            member("c", mode="prefill", queue=4),
            member("d", "dead", mode="prefill", queue=8),
            member("e", cluster="us"),
        ),
        threshold_tokens={"eu": 900.0, "us": 512.0},
        num_keys=12,
        num_conversions=1,
    )
    told = read(NodeLoad(fleet=fleet))
    assert told["fleet_nodes", "pd", "ready"] == 4
    assert told["fleet_nodes", "pd", "dead"] == 1
    assert told["fleet_nodes", "prefill", "ready"] == 0
    assert told["fleet_modes", "eu", "decode"] == 2
    assert told["fleet_modes", "eu", "prefill"] == 1
    assert told["fleet_modes", "us", "both"] == 1
    assert told["fleet_queue_tokens", "pd"] == 15
    assert told["fleet_active_requests", "pd"] == 10
    assert told["fleet_oldest_heartbeat_seconds",] == 8
    assert told["fleet_blocks",] == 12
    assert told["threshold_tokens", "eu"] == 900
    assert ("queue_tokens",) not in told  # a scheduler has no engine
