"""What GET /v1/cluster says: a node and its peers, or a scheduler's whole fleet."""

import math
from collections import Counter
from dataclasses import asdict

from prfaas.config.options import Role
from prfaas.scheduler.fleet import Member
from prfaas.scheduler.heartbeat import LinkReport
from prfaas.scheduler.view import PeerView
from prfaas.server.fleet_view import FleetView, MemberView, RoutingView
from prfaas.server.node import NodeLoad
from prfaas.server.openai.answers import Json
from prfaas.transport.link_state import LinkView


def cluster_body(role: Role, load: NodeLoad, now_s: float) -> Json:
    """Return the answer; `now_s` is of the clock that the node's ages are of."""
    if load.fleet is not None:
        return {"object": "cluster", "role": role, **_fleet(load.fleet)}
    peers = {name: _peer(load, peer, now_s) for name, peer in load.peers.items()}
    return {
        "object": "cluster",
        "role": role,
        "node": _own(load),
        **_routing(load.routing),
        "fleet": None if load.member is None else _membership(load.member),
        "peers": peers,
        "askers": {name: _link(link) for name, link in load.links.items() if name not in peers},
    }


def _own(load: NodeLoad) -> Json:
    return {
        "name": None if load.member is None else load.member.name,
        "mode": "both" if load.member is None else load.member.mode,
        "requests_running": load.num_running,
        "requests_waiting": load.num_waiting,
        "sequences_decoding": load.num_decoding,
        "queue_tokens": load.num_waiting_tokens,
        "prefill_tokens_per_s": _finite(load.prefill_tokens_per_s),
        "decode_step_s": _finite(load.decode_step_s),
        "transfers_in_flight": load.num_transfers,
        "cache_pages": dict(load.pages.items()),
    }


def _routing(routing: RoutingView | None) -> Json:
    return {} if routing is None else {"routing": {**asdict(routing)}}


def _membership(member: MemberView) -> Json:
    return {
        "scheduler": member.scheduler,
        "cluster": member.cluster,
        "state": member.state,
        "detail": member.detail,
        "conversions": member.num_conversions,
    }


def _peer(load: NodeLoad, peer: PeerView, now_s: float) -> Json:
    link = load.links.get(peer.peer)
    return {
        "state": peer.state,
        "is_usable": load.peers_usable.get(peer.peer, False),
        "heard_s_ago": None if peer.heard_s is None else max(0.0, now_s - peer.heard_s),
        "queue_tokens": peer.num_queue_tokens,
        "requests_in_flight": peer.num_inflight,
        "tokens_in_flight": peer.num_inflight_tokens,
        "bytes_in_flight": peer.num_inflight_bytes,
        "prefill_tokens_per_s": peer.tokens_per_s,
        "link_bytes_per_s": 1 / peer.byte_s if peer.byte_s else None,
        "rtt_s": _finite(peer.rtt_s),
        "link": None if link is None else _link(link),
    }


def _link(link: LinkView) -> Json:
    return {
        "streams": link.num_streams,
        "rtt_s": _finite(link.rtt_s),
        "queueing_s": _finite(link.queueing_s),
        "goodput_bytes_per_s": _finite(link.goodput_bytes_per_s),
        "utilisation": _finite(link.utilisation_fraction),
        "retransmitted": _finite(link.loss_fraction),
    }


def _fleet(fleet: FleetView) -> Json:
    return {
        "policy": fleet.policy,
        "egress_target": fleet.egress_target,
        "blocks": fleet.num_keys,
        "conversions": fleet.num_conversions,
        "clusters": {
            name: _cluster(fleet, name, tokens) for name, tokens in fleet.threshold_tokens.items()
        },
        "nodes": {member.node: _member(member) for member in fleet.members},
    }


def _cluster(fleet: FleetView, name: str, threshold_tokens: float) -> Json:
    modes = Counter(
        each.heartbeat.mode
        for each in fleet.members
        if each.heartbeat.role == "pd"
        and each.heartbeat.cluster == name
        and each.state in ("ready", "late")
    )
    return {"threshold_tokens": threshold_tokens, "modes": {**modes}}


def _member(member: Member) -> Json:
    beat = member.heartbeat
    return {
        "role": beat.role,
        "cluster": beat.cluster,
        "mode": beat.mode,
        "wanted_mode": member.wanted_mode,
        "state": member.state,
        "reason": beat.reason,
        "heard_s_ago": member.age_s,
        "requests_placed": member.num_inflight,
        "requests_active": member.num_active,
        "max_running": beat.max_running,
        "queue_tokens": member.queue_tokens,
        "prefill_tokens_per_s": _finite(beat.prefill_tokens_per_s),
        "decode_step_s": _finite(beat.decode_step_s),
        "free_pages": _finite(beat.free_pages_fraction),
        "numerics": member.numerics,
        "links": {name: _report(link) for name, link in beat.links.items()},
        "peers_usable": {**beat.peers_usable},
    }


def _report(link: LinkReport) -> Json:
    return {
        "rtt_s": _finite(link.rtt_s),
        "bytes_per_s": _finite(link.bytes_per_s),
        "retransmitted": _finite(link.retransmit_fraction),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
