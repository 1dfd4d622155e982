"""What the end of a transfer, or silence, makes of what is known of a peer. Pure."""

from dataclasses import replace
from typing import Literal, assert_never

from prfaas.scheduler.monitor import TransferRates
from prfaas.scheduler.pace import Prefill, mean_tokens_per_s, pace_of, with_prefill
from prfaas.scheduler.view import PeerState, PeerView, known_rate

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
SLOW_BACKOFF_S = 10.0
"""A peer that turned out slower than we are gets nothing for this long."""
EWMA_WEIGHT = 0.3
"""Of the newest observation of a link."""
FORGET_AFTER_S = 300.0
"""What prefills have shown of a peer that was not used for so long gives way to its own word."""

Outcome = Literal[
    "completed",
    "cancelled",
    "pool_full",
    "prompt_refused",
    "peer_down",
    "peer_incompatible",
    "peer_overloaded",
    "peer_stuck",
    "transfer_failed",
    "slower_than_local",
    "peer_lacks_prefix",
]
"""How a remote route ended; all but the first two make the prefill local, for that reason."""


def after(
    peer: PeerView, outcome: Outcome, started_s: float, now_s: float, retry_after_s: float
) -> PeerView:
    """Return the peer's view after one transfer's end."""
    match outcome:
        case "cancelled" | "pool_full" | "prompt_refused" | "peer_lacks_prefix":
            return peer
        case "completed":
            is_out = peer.state in ("incompatible", "not_ready")
            state: PeerState = peer.state if is_out else "ready"
            return replace(peer, state=state, heard_s=now_s, num_failures=0)
        case "peer_incompatible":
            return replace(peer, state="incompatible", heard_s=now_s)
        case "peer_overloaded":
            return _overloaded(peer, now_s, retry_after_s)
        case "slower_than_local":
            return _overloaded(peer, now_s, SLOW_BACKOFF_S)
        case "peer_down" | "peer_stuck" | "transfer_failed":
            return _failed(peer, started_s, now_s)
        case _:
            assert_never(outcome)


def _overloaded(peer: PeerView, now_s: float, wait_s: float) -> PeerView:
    if peer.state in ("down", "not_ready", "incompatible"):
        return peer
    wait_s = min(max(wait_s, 0.0), MAX_BACKOFF_S)
    return replace(peer, state="overloaded", heard_s=now_s, retry_at_s=now_s + wait_s)


def _failed(peer: PeerView, started_s: float, now_s: float) -> PeerView:
    """Return the view after a failure; one of a transfer older than the last failure adds nothing."""
    if peer.state == "incompatible":
        return peer
    if peer.failed_s is None or started_s >= peer.failed_s:
        peer = replace(peer, num_failures=peer.num_failures + 1, failed_s=now_s)
    state: PeerState = "not_ready" if peer.state == "not_ready" else "down"
    return replace(peer, state=state, retry_at_s=later(peer, now_s))


def later(peer: PeerView, now_s: float) -> float:
    """Return when a down peer may be tried again: twice as far off with every failure."""
    doublings = min(max(peer.num_failures, peer.num_silences, 1) - 1, 10)
    return now_s + min(FIRST_BACKOFF_S * 2.0**doublings, MAX_BACKOFF_S)


def learnt(peer: PeerView, rates: TransferRates, num_tokens: int, now_s: float) -> PeerView:
    """Return the view with what a transfer of so many tokens to compute reached.

    One that did not wait for the link says of it what it carries at least: that takes the place of less.
    """
    link, floor = peer.link_bytes_per_s, peer.link_floor_bytes_per_s
    reached = known_rate(rates.link_bytes_per_s)
    if reached is not None:
        if rates.is_link_bound:
            floor, link = None, _ewma(link, reached)
        elif link is None:
            floor = max(reached, floor or 0.0)
        else:
            link = max(link, reached)
    prefill_rate = known_rate(rates.prefill_tokens_per_s)
    if prefill_rate is not None and num_tokens > 0:
        prefills = with_prefill(peer.prefills, Prefill(num_tokens, num_tokens / prefill_rate))
        peer = replace(
            peer,
            used_s=now_s,
            prefills=prefills,
            pace=pace_of(prefills),
            prefill_tokens_per_s=mean_tokens_per_s(prefills),
        )
    return replace(
        peer,
        link_bytes_per_s=link,
        link_floor_bytes_per_s=floor,
        wire_fraction=known_rate(rates.wire_fraction) or peer.wire_fraction,
    )


def forgotten(peer: PeerView) -> PeerView:
    """Return the view without what prefills have shown."""
    return replace(
        peer, used_s=None, prefill_tokens_per_s=None, prefills=(), pace=None, excesses_s=()
    )


def _ewma(old: float | None, new: float | None) -> float | None:
    """Return the average moved towards `new`; what is unknown changes nothing."""
    new = known_rate(new)
    if new is None:
        return old
    return new if old is None else old + EWMA_WEIGHT * (new - old)
