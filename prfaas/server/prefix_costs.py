"""Whether to wait for a peer that has less of a prompt's prefix than this node. Pure."""

from prfaas.cache.spec import CacheLayout
from prfaas.scheduler.view import PeerView
from prfaas.server.places import bytes_of_places, places_of_snapshots


def least_work_s(
    peer: PeerView,
    layout: CacheLayout,
    *,
    num_tokens: int,
    have_tokens: int,
    peer_hit_tokens: int,
    snapshot_tokens: int,
) -> float | None:
    """Return the least that a peer needs for a prompt with no other before it; None while that is unknown.

    It computes all behind its own hit, whatever we have. What we lack of full attention, and snapshots on
    the way, cross the link meanwhile; windows and states at the prompt's end only afterwards.
    """
    num_bytes = layout.bytes_needed(num_tokens, have_tokens)
    num_streamed_bytes = layout.streamed_bytes(num_tokens, have_tokens)
    snapshots = places_of_snapshots(layout, num_tokens, have_tokens, snapshot_tokens)
    computed_s = peer.work_s(
        num_tokens=num_tokens - peer_hit_tokens,
        num_kv_bytes=num_streamed_bytes + bytes_of_places(layout, snapshots),
    )
    if computed_s is None:
        return None
    return computed_s + (num_bytes - num_streamed_bytes) * peer.byte_s


def is_worth_waiting(work_s: float | None, local_estimate_s: float | None) -> bool:
    """Return whether a peer that needs at least `work_s` may end first; unknown is no reason to leave it."""
    return work_s is None or local_estimate_s is None or work_s <= local_estimate_s
