"""How a transfer that did not come through ended, in the words of the router."""

from prfaas.errors import (
    IncompatiblePeer,
    Overloaded,
    PromptRefused,
    TransferError,
    TransferTimeout,
)
from prfaas.scheduler.router import Outcome

PEER_IS_WELL: frozenset[Outcome] = frozenset(
    {"pool_full", "peer_overloaded", "prompt_refused", "slower_than_local", "peer_lacks_prefix"}
)
"""What ends a transfer and is no sign that something is wrong with the peer."""


class PoolFull(TransferError):
    """There is no room here for what would come."""


class LacksPrefix(TransferError):
    """The peer has less of the prompt than is cached here."""


class TooSlow(TransferError):
    """A local prefill is predicted to end before the transfer does."""


_OUTCOMES: tuple[tuple[type[TransferError | Overloaded], Outcome], ...] = (
    (Overloaded, "peer_overloaded"),
    (PromptRefused, "prompt_refused"),
    (IncompatiblePeer, "peer_incompatible"),
    (PoolFull, "pool_full"),
    (TooSlow, "slower_than_local"),
    (LacksPrefix, "peer_lacks_prefix"),
    (TransferTimeout, "peer_stuck"),
)


def outcome_of(error: TransferError | Overloaded, *, is_accepted: bool) -> Outcome:
    """Return what a transfer that raised `error` ended with; `is_accepted` says that the peer had taken it."""
    for kind, outcome in _OUTCOMES:
        if isinstance(error, kind):
            return outcome
    return "transfer_failed" if is_accepted else "peer_down"
