"""What a node says of itself each second; values only, on the wire and in the scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

NodeRole = Literal["prefill", "pd"]
"""prefill: a PrfaaS node. pd: a node of a local PD cluster."""
Mode = Literal["prefill", "decode", "both"]
"""What a pd node does for others: PD-P, PD-D, or all of it by itself. A prefill node is always `prefill`."""

PERIOD_S = 1.0
"""Between two heartbeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """The way from one peer, as the node that pulls from it sees it; None is unknown."""

    rtt_s: float | None = None
    bytes_per_s: float | None = None
    """Goodput that transfers have reached."""
    retransmit_fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One node's word about itself."""

    node: str
    """Its advertised address, "host:port": its name everywhere."""
    role: NodeRole
    cluster: str
    mode: Mode = "both"
    epoch: int
    """Grows with each life of the node's process."""
    is_ready: bool = True
    reason: str = ""
    """Why it is not ready."""
    is_draining: bool = False
    num_running: int = 0
    """Sequences in the engine's batch."""
    num_waiting: int = 0
    """Requests that were taken and are not in the batch."""
    max_running: int = 1
    """Sequences that the batch has room for."""
    num_waiting_tokens: int = 0
    """Prompt tokens that are admitted or queued and not computed."""
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    """Of late, with the batch that there was."""
    free_pages_fraction: float = 1.0
    """Of the pool, free or only cached."""
    free_kv_bytes: int | None = None
    """What these pages hold."""
    links: Mapping[str, LinkReport] = field(default_factory=dict)
    """By the node at the other end."""
    peers_usable: Mapping[str, bool] = field(default_factory=dict)
    """Peer -> whether this node's own router would send a prefill there now."""
