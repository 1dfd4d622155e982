"""What a node tells about how it routes, and a scheduler about its fleet: values for metrics and /v1/cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prfaas.scheduler.fleet import Member
    from prfaas.scheduler.heartbeat import Mode
    from prfaas.scheduler.policies import PolicyName

MemberState = Literal["joining", "joined", "lost", "refused", "untrusted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingView:
    """How one node routes now."""

    policy: PolicyName
    threshold_tokens: float
    """t as it is now."""
    egress_target: float
    prefill_share: float = 1.0
    """Of the engine's steps in which sequences decode, those that may carry prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """One node's place in its fleet."""

    scheduler: str
    name: str
    cluster: str
    mode: Mode
    state: MemberState
    detail: str = ""
    """Why it is not joined."""
    num_conversions: int = 0
    """Modes that it has taken because the scheduler wanted it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """A scheduler's fleet."""

    members: tuple[Member, ...] = ()
    threshold_tokens: Mapping[str, float] = field(default_factory=dict)
    """t by cluster."""
    policy: PolicyName = "predictive"
    egress_target: float = 0.7
    num_keys: int = 0
    """Blocks that some node has."""
    num_conversions: int = 0
    """Modes that it has asked nodes to take."""
