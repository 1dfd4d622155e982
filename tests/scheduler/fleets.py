"""Fleets for tests: heartbeats with few words, and nodes that keep saying them."""

from collections import Counter
from typing import Any

from prfaas.scheduler.fleet import Fleet
from prfaas.scheduler.heartbeat import Heartbeat
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.placing import NoNode, Placement, Wanted
from prfaas.scheduler.rebalancer import RebalanceOptions
from prfaas.scheduler.standing import FleetLimits

OPTIONS = SchedulerOptions(policy="static", threshold_tokens=4096)
TOKEN_BYTES = 1000


def kv_bytes(num_tokens: int, held_tokens: int) -> int:
    return TOKEN_BYTES * (num_tokens - held_tokens)


def beat(node: str = "a:1", **changes: Any) -> Heartbeat:
    values: dict[str, Any] = {
        "node": node,
        "role": "pd",
        "cluster": "east",
        "epoch": 1,
        "max_running": 8,
        "prefill_tokens_per_s": 10_000.0,
        "decode_step_s": 0.02,
    }
    return Heartbeat(**(values | changes))


def prefill_beat(node: str = "p:1", **changes: Any) -> Heartbeat:
    values: dict[str, Any] = {
        "role": "prefill",
        "cluster": "prfaas",
        "mode": "prefill",
        "decode_step_s": None,
        "prefill_tokens_per_s": 40_000.0,
    }
    return beat(node, **(values | changes))


def want(num_tokens: int = 1000, **changes: Any) -> Wanted:
    values: dict[str, Any] = {"num_tokens": num_tokens, "kv_bytes": kv_bytes}
    return Wanted(**(values | changes))


def fleet_of(
    *heartbeats: Heartbeat,
    options: SchedulerOptions = OPTIONS,
    limits: FleetLimits | None = None,
    rebalance: RebalanceOptions | None = None,
    now_s: float = 0.0,
) -> Fleet:
    fleet = Fleet(options, limits=limits, rebalance=rebalance)
    for heartbeat in heartbeats:
        assert fleet.heard(heartbeat, now_s, numerics="n")
    return fleet


def placed(fleet: Fleet, request_id: str, wanted: Wanted, now_s: float = 0.0) -> Placement:
    answer = fleet.place(request_id, wanted, now_s)
    assert isinstance(answer, Placement), answer
    return answer


def spread(
    fleet: Fleet, num: int, wanted: Wanted, now_s: float = 0.0, first: int = 0
) -> Counter[str]:
    """Place so many alike, r0 or r<first> and on; return how many each node got."""
    return Counter(placed(fleet, f"r{first + i}", wanted, now_s).decode_at for i in range(num))


def refused(fleet: Fleet, wanted: Wanted, now_s: float = 0.0) -> str:
    answer = fleet.place("refused", wanted, now_s)
    assert isinstance(answer, NoNode), answer
    return answer.reason


def state(fleet: Fleet, node: str, now_s: float) -> str:
    return next(member.state for member in fleet.members(now_s) if member.node == node)
