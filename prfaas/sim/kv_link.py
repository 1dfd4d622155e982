"""The link between two clusters, and KVCache that is sent over it while it is computed.

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
        self._watchers: dict[Callable[[], None], None] = {}
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

    def watch(self, on_down: Callable[[], None]) -> None:
        """Call this whenever the link goes down, until `unwatch`."""
        self._watchers[on_down] = None

    def unwatch(self, on_down: Callable[[], None]) -> None:
        """Call it no more."""
        self._watchers.pop(on_down, None)

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
        self._change = change
        self._server.set_rate(self._rate_each)
        if self.is_down:
            for on_down in list(self._watchers):
                on_down()

    def _rate_each(self, num_flows: int) -> float:
        """Each transfer has several streams, and a stream is worth one flow of others."""
        bytes_per_s = self._link.bytes_per_s * self._change.bandwidth_fraction
        streams = self._streams * num_flows
        return bytes_per_s * self._streams / (streams + self._change.competing_flows)


class Transfer:
    """The KVCache of one prefill: piece by piece as computed, done with the last one.

    A piece that is computed while another is under way waits, as on a stream. One that stands still
    for `stall_timeout_s` while the link is down is given up.
    """

    def __init__(
        self,
        events: Events,
        link: KvLink,
        *,
        num_bytes: float,
        pieces: int,
        stall_timeout_s: float,
        on_arrived: Callable[[], object],
        on_stalled: Callable[[], object],
    ) -> None:
        self._events = events
        self._link = link
        self._piece_bytes = num_bytes / pieces
        self._pieces_left = pieces
        self._stall_timeout_s = stall_timeout_s
        self._on_arrived = on_arrived
        self._on_stalled = on_stalled
        self._pending_bytes = 0.0
        self._share: Share | None = None
        self._computed_every_s = 0.0
        self._is_gone = False

    def begin(self, prefill_s: float) -> None:
        """Let the pieces be computed from now on, evenly over the prefill; the last is `finish`."""
        self._link.watch(self._watch)
        self._computed_every_s = prefill_s / self._pieces_left
        if self._pieces_left > 1:
            self._events.after(self._computed_every_s, self._computed)

    def finish(self) -> None:
        """Send the last piece: the prefill has ended."""
        if self._is_gone:
            return
        self._pending_bytes += self._piece_bytes * self._pieces_left
        self._pieces_left = 0
        self._send()

    def give_up(self) -> None:
        """Stop, wherever it is; nothing more is called."""
        self._leave()
        if self._share is not None:
            self._link.give_up(self._share)

    def _leave(self) -> None:
        self._is_gone = True
        self._link.unwatch(self._watch)

    def _computed(self) -> None:
        if self._is_gone or self._pieces_left <= 1:
            return
        self._pieces_left -= 1
        self._pending_bytes += self._piece_bytes
        if self._pieces_left > 1:
            self._events.after(self._computed_every_s, self._computed)
        self._send()

    def _send(self) -> None:
        if self._share is None:
            num_bytes, self._pending_bytes = self._pending_bytes, 0.0
            self._share = self._link.send(num_bytes, self._sent)
            self._watch()

    def _watch(self) -> None:
        """Give up after the timeout if the link is down now and the same piece is still under way."""
        if self._link.is_down and self._share is not None:
            self._events.after(self._stall_timeout_s, partial(self._judge, self._share))

    def _judge(self, share: Share) -> None:
        if not self._is_gone and self._share is share and self._link.is_down:
            self.give_up()
            self._on_stalled()

    def _sent(self) -> None:
        self._share = None
        if self._pending_bytes > 0:
            self._send()
        elif not self._pieces_left:
            self._leave()
            self._on_arrived()
