"""The link between two clusters.

Flows share the link alike, those of others too; bandwidth and their number change at given moments.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import exp

from prfaas.config.simulation_table import LinkChange
from prfaas.scheduler.profile import Link
from prfaas.sim.events import Events
from prfaas.sim.sharing import Share, SharedServer

EGRESS_WINDOW_S = 10.0
"""The time constant of the average that a view shows."""
OnChange = Callable[[bool], object]
"""Called after a change, with whether the link was down before."""


class KvLink:
    """One link: its flows, its changes, and what went over it."""

    def __init__(
        self, events: Events, link: Link, *, streams: int, changes: Sequence[LinkChange] = ()
    ) -> None:
        self._events = events
        self._link = link
        self._streams = streams
        self._change = LinkChange(at_s=0.0)
        self._server = SharedServer(events, rate_each=self._rate_each)
        self._watchers: dict[OnChange, None] = {}
        self._sent_bytes = 0.0
        self._read_s = self._read_bytes = self._average = 0.0
        for change in changes:
            events.at(change.at_s, partial(self._set, change), priority=-1)

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that have arrived so far."""
        return self._sent_bytes

    @property
    def is_down(self) -> bool:
        """Return whether nothing gets through."""
        return self._change.bandwidth_fraction == 0

    @property
    def available_bytes_per_s(self) -> float:
        """Return what one more of our transfers, with those under way, would get together."""
        num_flows = self._server.num_active + 1
        return self._rate_each(num_flows) * num_flows

    @property
    def average_bytes_per_s(self) -> float:
        """Return the average as it was last brought to now."""
        return self._average

    def egress_bytes_per_s(self) -> float:
        """Return the average of the last seconds, brought to now."""
        now_s = self._events.now_s
        passed_s = now_s - self._read_s
        if passed_s > 0:
            rate = (self._sent_bytes - self._read_bytes) / passed_s
            self._average += (1 - exp(-passed_s / EGRESS_WINDOW_S)) * (rate - self._average)
            self._read_s, self._read_bytes = now_s, self._sent_bytes
        return self._average

    def send(self, num_bytes: float, on_done: Callable[[], object]) -> Share:
        """Begin to send; `on_done` is called when the last byte is through."""
        return self._server.submit(num_bytes, partial(self._done, num_bytes, on_done))

    def bytes_left(self, share: Share) -> float:
        """Return what of a flow is not through yet."""
        return self._server.amount_left(share)

    def watch(self, on_change: OnChange) -> None:
        """Call this whenever bandwidth or competing flows change, until `unwatch`."""
        self._watchers[on_change] = None

    def unwatch(self, on_change: OnChange) -> None:
        """Call it no more."""
        self._watchers.pop(on_change, None)

    def give_up(self, share: Share) -> None:
        """Stop sending what is left."""
        self._server.withdraw(share)

    def check(self) -> None:
        """Assert that no flow was lost or made."""
        self._server.check()

    def _done(self, num_bytes: float, on_done: Callable[[], object]) -> None:
        self._sent_bytes += num_bytes
        on_done()

    def _set(self, change: LinkChange) -> None:
        was_down, self._change = self.is_down, change
        self._server.set_rate(self._rate_each)
        for on_change in list(self._watchers):
            on_change(was_down)

    def _rate_each(self, num_flows: int) -> float:
        """Each transfer has several streams, and a stream is worth one flow of others."""
        bytes_per_s = self._link.bytes_per_s * self._change.bandwidth_fraction
        streams = self._streams * num_flows
        return bytes_per_s * self._streams / (streams + self._change.competing_flows)
