"""The metrics of routing, peers and the fleet, made at each scrape from what the node says of itself."""

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from prfaas.scheduler.heartbeat import Mode
from prfaas.scheduler.standing import NodeState
from prfaas.server.fleet_view import FleetView
from prfaas.server.node import NodeLoad

Family = CounterMetricFamily | GaugeMetricFamily


def routing_families(load: NodeLoad) -> Iterator[Family]:
    """Yield the families, with samples for what there is: an engine, peers, a fleet."""
    yield from _routing(load)
    yield from _engine(load)
    yield from _peers(load)
    yield from _membership(load)
    yield from _fleet(load.fleet)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"prfaas_{name}", text, labels=labels)


def _routing(load: NodeLoad) -> Iterator[Family]:
    threshold = _gauge(
        "threshold_tokens", "t: longer uncached prompts are prefilled elsewhere.", "cluster"
    )
    share = _gauge("prefill_share_ratio", "Of the steps that decode, those that may carry prefill.")
    target = _gauge("egress_target_ratio", "Of a link, what planned KV may fill.")
    if load.routing is not None:
        cluster = "default" if load.member is None else load.member.cluster
        threshold.add_metric([cluster], load.routing.threshold_tokens)
        share.add_metric([], load.routing.prefill_share)
        target.add_metric([], load.routing.egress_target)
    if load.fleet is not None:
        for cluster, tokens in load.fleet.threshold_tokens.items():
            threshold.add_metric([cluster], tokens)
        target.add_metric([], load.fleet.egress_target)
    yield from (threshold, share, target)


def _engine(load: NodeLoad) -> Iterator[Family]:
    queue = _gauge("queue_tokens", "Prompt tokens that the engine has not computed.")
    decoding = _gauge("sequences_decoding", "Sequences that have one token to compute.")
    rate = _gauge("engine_prefill_tokens_per_second", "Of the engine, of late.")
    step = _gauge("engine_decode_step_seconds", "Of the engine's steps that only decode, of late.")
    if load.fleet is None:
        queue.add_metric([], load.num_waiting_tokens)
        decoding.add_metric([], load.num_decoding)
        if load.prefill_tokens_per_s is not None:
            rate.add_metric([], load.prefill_tokens_per_s)
        if load.decode_step_s is not None:
            step.add_metric([], load.decode_step_s)
    yield from (queue, decoding, rate, step)


def _peers(load: NodeLoad) -> Iterator[Family]:
    queue = _gauge("peer_queue_tokens", "Prompt tokens that wait there, as it last said.", "peer")
    inflight = _gauge("peer_inflight_requests", "Prefills that this node has asked it for.", "peer")
    tokens = _gauge("peer_inflight_tokens", "Their tokens.", "peer")
    rate = _gauge("peer_prefill_tokens_per_second", "Of its prefill, as far as is known.", "peer")
    capacity = _gauge("peer_link_bytes_per_second", "What the link from it carries.", "peer")
    used = _gauge("egress_utilisation_ratio", "Of a link's capacity, what KV takes.", "peer")
    for name, peer in load.peers.items():
        queue.add_metric([name], peer.num_queue_tokens)
        inflight.add_metric([name], peer.num_inflight)
        tokens.add_metric([name], peer.num_inflight_tokens)
        if peer.tokens_per_s is not None:
            rate.add_metric([name], peer.tokens_per_s)
        if peer.byte_s:
            capacity.add_metric([name], 1 / peer.byte_s)
            used.add_metric([name], min(1.0, (peer.goodput_bytes_per_s or 0.0) * peer.byte_s))
    for name, link in load.links.items():
        if name not in load.peers or not load.peers[name].byte_s:
            used.add_metric([name], link.utilisation_fraction)
    yield from (queue, inflight, tokens, rate, capacity, used)


def _membership(load: NodeLoad) -> Iterator[Family]:
    joined = _gauge("fleet_joined", "1: the scheduler hears this node.")
    mode = _gauge("node_mode", "1 for the mode that the node has.", "mode")
    conversions = CounterMetricFamily(
        "prfaas_conversions", "Modes that nodes were asked to take (scheduler) or took (node)."
    )
    if load.member is not None:
        joined.add_metric([], load.member.state == "joined")
        for each in get_args(Mode):
            mode.add_metric([each], each == load.member.mode)
        conversions.add_metric([], load.member.num_conversions)
    if load.fleet is not None:
        conversions.add_metric([], load.fleet.num_conversions)
    yield from (joined, mode, conversions)


def _fleet(fleet: FleetView | None) -> Iterator[Family]:
    nodes = _gauge("fleet_nodes", "Nodes of the fleet.", "role", "state")
    modes = _gauge(
        "fleet_modes", "Usable pd nodes by mode, N_p : N_d of each cluster.", "cluster", "mode"
    )
    queue = _gauge("fleet_queue_tokens", "Prompt tokens that wait for their prefill.", "role")
    active = _gauge("fleet_active_requests", "Requests at nodes.", "role")
    age = _gauge("fleet_oldest_heartbeat_seconds", "Since the node heard least lately was heard.")
    blocks = _gauge("fleet_blocks", "Blocks of KV that some node has.")
    if fleet is not None:
        by_state = Counter((each.heartbeat.role, each.state) for each in fleet.members)
        for role in ("prefill", "pd"):
            mine = [each for each in fleet.members if each.heartbeat.role == role]
            for state in get_args(NodeState):
                nodes.add_metric([role, state], by_state[role, state])
            queue.add_metric([role], sum(each.queue_tokens for each in mine))
            active.add_metric([role], sum(each.num_active for each in mine))
        for cluster in sorted(fleet.threshold_tokens):
            usable = [
                each.heartbeat
                for each in fleet.members
                if each.state in ("ready", "late") and each.heartbeat.cluster == cluster
            ]
            by_mode = Counter(each.mode for each in usable if each.role == "pd")
            for name in get_args(Mode):
                modes.add_metric([cluster, name], by_mode[name])
        if fleet.members:
            age.add_metric([], max(each.age_s for each in fleet.members))
        blocks.add_metric([], fleet.num_keys)
    yield from (nodes, modes, queue, active, age, blocks)
