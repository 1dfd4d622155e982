"""When a transfer may send: the egress budget that all share, and the credit that each has. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass

from prfaas.errors import ProtocolError

PATIENCE_S = 2.0
"""A piece that has waited this long goes before every piece that came later."""
MAX_WAIT_S = 0.1
"""Who waits asks again after this at the latest: those ahead may have gone."""
MIN_WAIT_S = 1e-4
"""Below this a wait is rounding; the bucket keeps what flows in meanwhile."""
ABSENT_AFTER_S = 1.0
"""Who is this late in asking again has lost its place."""


@dataclass(slots=True)
class _Waiting:
    """The piece that one transfer wants to send."""

    num_bytes: int
    since_s: float
    rank: tuple[float, float, int]
    """(due by, transfer's first ask, its number): the least goes first."""
    asked_s: float
    """When it asked last; a live transfer asks again within MAX_WAIT_S."""


class EgressBudget:
    """A token bucket that transfers take from in a fair order.

    In any span of t seconds at most rate * t + max(burst, largest piece) bytes are granted; while
    pieces wait and their owners ask when told to, no budget is lost. Of pieces that wait, the one due
    first goes first, then that of the oldest transfer. A piece is due by its transfer's deadline, but
    not before it came and at most PATIENCE_S after: so transfers without a deadline take turns,
    and none waits for pieces that came more than PATIENCE_S after its own.

    Args:
        rate_bytes_per_s: of all transfers together; None grants everything at once.
        burst_bytes: what an idle budget saves up; full at the start.
    """

    def __init__(self, rate_bytes_per_s: float | None, burst_bytes: int) -> None:
        if (rate_bytes_per_s is not None and rate_bytes_per_s <= 0) or burst_bytes < 1:
            raise ValueError(f"a budget of {rate_bytes_per_s} bytes/s, burst {burst_bytes} bytes")
        self.rate_bytes_per_s = rate_bytes_per_s
        self.burst_bytes = burst_bytes
        self._balance_bytes = float(burst_bytes)
        """Negative after a piece larger than the burst, until that is paid."""
        self._updated_s: float | None = None
        self._waiting: dict[Hashable, _Waiting] = {}
        self._first_asks: dict[Hashable, tuple[float, int]] = {}
        self._num_transfers = 0

    @property
    def num_waiting(self) -> int:
        """Transfers that were told to wait and have not been granted their piece since."""
        return len(self._waiting)

    def ask(
        self, transfer: Hashable, num_bytes: int, *, now_s: float, deadline_s: float | None = None
    ) -> float:
        """Return 0.0 and count the bytes as sent, or the seconds after which to ask again.

        Whoever waits must ask again then, or say `done`; asking earlier is harmless. A transfer
        has one place in the order: its streams may ask each for itself, and take turns with it.

        Args:
            transfer: who asks; known until `done`.
            num_bytes: of the piece, at least 1. More than the burst is granted once the bucket is
                full, and paid off after.
            now_s: never goes back.
            deadline_s: when the transfer should have ended, on the same clock; None is no haste.
        """
        if num_bytes < 1:
            raise ValueError(f"a piece of {num_bytes} bytes")
        if self.rate_bytes_per_s is None:
            return 0.0
        self._refill(now_s, self.rate_bytes_per_s)
        own = self._place(transfer, num_bytes, now_s, deadline_s)
        ahead = sum(w.num_bytes for w in self._waiting.values() if w.rank < own.rank)
        needed = ahead + num_bytes if ahead else min(num_bytes, self.burst_bytes)
        if self._balance_bytes >= needed:
            self._balance_bytes -= num_bytes
            self._waiting.pop(transfer, None)
            return 0.0
        self._waiting[transfer] = own
        missing_s = (needed - self._balance_bytes) / self.rate_bytes_per_s
        return max(MIN_WAIT_S, min(MAX_WAIT_S, missing_s))

    def done(self, transfer: Hashable) -> None:
        """Forget a transfer, its place included; unknown ones are ignored."""
        self._waiting.pop(transfer, None)
        self._first_asks.pop(transfer, None)

    def check(self) -> None:
        """Re-derive what holds between the counters; AssertionError names what is wrong."""
        assert self._balance_bytes <= self.burst_bytes, "more saved than the burst"
        assert self._waiting.keys() <= self._first_asks.keys(), "an unknown transfer waits"
        ranks = [waiting.rank for waiting in self._waiting.values()]
        assert len(set(ranks)) == len(ranks), "two transfers share a place"

    def _refill(self, now_s: float, rate: float) -> None:
        if self._updated_s is not None:
            assert now_s >= self._updated_s, "time went back"
            earned = (now_s - self._updated_s) * rate
            self._balance_bytes = min(float(self.burst_bytes), self._balance_bytes + earned)
        self._updated_s = now_s
        for transfer in [t for t, w in self._waiting.items() if now_s - w.asked_s > ABSENT_AFTER_S]:
            del self._waiting[transfer]

    def _place(
        self, transfer: Hashable, num_bytes: int, now_s: float, deadline_s: float | None
    ) -> _Waiting:
        """Return the transfer's place: the one it has, or where it comes in now."""
        if transfer not in self._first_asks:
            self._first_asks[transfer] = (now_s, self._num_transfers)
            self._num_transfers += 1
        waiting = self._waiting.get(transfer)
        since_s = now_s if waiting is None else waiting.since_s
        due_s = since_s + PATIENCE_S
        if deadline_s is not None:
            due_s = min(due_s, max(since_s, deadline_s))
        rank = (due_s, *self._first_asks[transfer])
        return _Waiting(num_bytes, since_s, rank, asked_s=now_s)


class CreditAccount:
    """What one transfer may have in flight: sent, and not yet acknowledged as taken."""

    def __init__(self, credit_bytes: int) -> None:
        if credit_bytes < 0:
            raise ValueError(f"a credit of {credit_bytes} bytes")
        self.credit_bytes = credit_bytes
        self._in_flight_bytes = 0

    @property
    def in_flight_bytes(self) -> int:
        """Bytes spent and not returned; 0 <= it <= credit_bytes, always."""
        return self._in_flight_bytes

    @property
    def free_bytes(self) -> int:
        """What try_spend can take now."""
        return self.credit_bytes - self._in_flight_bytes

    def try_spend(self, num_bytes: int) -> bool:
        """Count bytes as in flight and return True, or change nothing and return False.

        Raises:
            ProtocolError: more than the whole credit: it could never be sent.
        """
        if num_bytes < 0:
            raise ValueError(f"a piece of {num_bytes} bytes")
        if num_bytes > self.credit_bytes:
            raise ProtocolError(f"{num_bytes} bytes never fit a credit of {self.credit_bytes}")
        if num_bytes > self.free_bytes:
            return False
        self._in_flight_bytes += num_bytes
        return True

    def returned(self, num_bytes: int) -> None:
        """Take note that the other side is done with bytes, or that they go back into the queue.

        Raises:
            ProtocolError: more than is in flight; nothing changes then.
        """
        if not 0 <= num_bytes <= self._in_flight_bytes:
            raise ProtocolError(f"{num_bytes} bytes returned, {self._in_flight_bytes} in flight")
        self._in_flight_bytes -= num_bytes
