"""KVCache on its way from a PrfaaS cluster: sent while it is computed, judged as nodes judge theirs."""

from collections.abc import Callable
from math import inf, isfinite
from typing import TYPE_CHECKING

from prfaas.scheduler.monitor import GRACE_S, TransferMonitor, Verdict
from prfaas.sim.events import Events
from prfaas.sim.kv_link import KvLink

if TYPE_CHECKING:
    from prfaas.sim.sharing import Share

LOOK_EVERY_S = 1.0
"""Between two judgements of a transfer, where a node makes one at every frame."""


class Transfer:
    """The KVCache of one prefill: piece by piece as computed, done with the last one.

    A piece that is computed while another is under way waits, as on a stream. A `TransferMonitor` is
    told what comes and says when to give up: nothing is heard over a link that is down, and a local
    prefill may be the earlier end of one over a slow link.
    """

    def __init__(
        self,
        events: Events,
        link: KvLink,
        *,
        num_bytes: float,
        num_tokens: int,
        pieces: int,
        stall_timeout_s: float,
        on_arrived: Callable[[], object],
        on_given_up: Callable[[Verdict], object],
        local_estimate_s: float = inf,
    ) -> None:
        """Begin nothing yet; `local_estimate_s` is what a local prefill would take, infinite without one."""
        self._events = events
        self._link = link
        self._num_bytes = num_bytes
        self._num_tokens = num_tokens
        self._piece_bytes = num_bytes / pieces
        self._pieces = self._pieces_left = pieces
        self._stall_timeout_s = stall_timeout_s
        self._local_estimate_s = local_estimate_s
        self._on_arrived = on_arrived
        self._on_given_up = on_given_up
        self._pending_bytes = 0.0
        self._arrived_bytes = 0.0
        self._share: Share | None = None
        self._began_s = self._prefill_s = self._computed_every_s = 0.0
        self._sent_s = self._heard_s = -inf
        self._monitor: TransferMonitor | None = None
        self._is_looking = False
        self._is_gone = False
        self.first_sent_s: float | None = None
        """When its first piece began to be sent."""

    @property
    def arrived_fraction(self) -> float:
        """Return the share of the prompt up to which all has come: whole pieces, as states end them."""
        if not self._piece_bytes:
            return 0.0
        return int(self._arrived_bytes / self._piece_bytes + 1e-9) / self._pieces

    def begin(self, prefill_s: float) -> None:
        """Let the pieces be computed from now on, evenly over the prefill; the last is `finish`."""
        self._began_s, self._prefill_s = self._events.now_s, prefill_s
        self._link.watch(self._link_changed)
        self._computed_every_s = prefill_s / self._pieces_left
        if self._pieces_left > 1:
            self._events.after(self._computed_every_s, self._computed)
        if self._link.is_down:
            self._events.after(self._stall_timeout_s, self._judge_stall)
        else:
            self._look_after(GRACE_S)

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
            self._share = None

    def _leave(self) -> None:
        self._is_gone = True
        self._link.unwatch(self._link_changed)
        self._monitor = None

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
            self._sent_s = self._events.now_s
            if self.first_sent_s is None:
                self.first_sent_s = self._sent_s

    def _sent(self) -> None:
        assert self._share is not None, "something was under way"
        self._arrived_bytes += self._share.amount
        self._share = None
        if self._pending_bytes > 0:
            self._send()
        elif not self._pieces_left:
            self._leave()
            self._on_arrived()

    def _watched(self) -> TransferMonitor:
        """Return the monitor; there is none before it is asked anything."""
        if self._monitor is None:
            num_bytes = int(self._num_bytes)
            self._monitor = TransferMonitor(
                started_s=self._began_s,
                num_tokens=self._num_tokens,
                tokens_done=0,
                num_kv_bytes=num_bytes,
                num_streamed_bytes=num_bytes,
                local_estimate_s=self._local_estimate_s,
                stall_timeout_s=self._stall_timeout_s,
            )
        return self._monitor

    def _hear(self) -> None:
        """Tell the monitor what has come until now; with nothing under way, the link keeps up.

        Of what is under way it hears from the moment on that it was sent.
        """
        now_s = self._events.now_s
        if self._share is None:
            tokens_done = self._tokens_done(now_s)
            num_bytes = int(self._num_bytes) * tokens_done // self._num_tokens
            self._progressed(now_s, tokens_done, num_bytes)
            return
        if self._sent_s > self._heard_s and not self._link.is_down:
            self._progressed(
                self._sent_s, self._tokens_done(self._sent_s), int(self._arrived_bytes)
            )
        under_way = self._share.amount - self._link.bytes_left(self._share)
        self._progressed(now_s, self._tokens_done(now_s), int(self._arrived_bytes + under_way))

    def _tokens_done(self, at_s: float) -> int:
        """Return what is computed at a moment, not before the last piece began to be sent."""
        passed_s = at_s - self._began_s
        if passed_s >= self._prefill_s or not self._pieces_left:
            return self._num_tokens
        return int(self._num_tokens * passed_s / self._prefill_s)

    def _progressed(self, at_s: float, tokens_done: int, num_bytes: int) -> None:
        self._heard_s = at_s
        self._watched().progressed(
            now_s=at_s, num_bytes=num_bytes, tokens_done=tokens_done, tokens_ahead=0
        )

    def _look_after(self, delay_s: float) -> None:
        """Judge its pace from then on; without an estimate there is nothing to be slower than."""
        if not self._is_looking and isfinite(self._local_estimate_s):
            self._is_looking = True
            self._events.after(delay_s, self._look)

    def _look(self) -> None:
        self._is_looking = False
        if not (self._is_gone or self._link.is_down):
            self._hear()
            self._judge()
            if not self._is_gone:
                self._look_after(LOOK_EVERY_S)

    def _link_changed(self, was_down: bool) -> None:
        is_down = self._link.is_down
        if not (was_down and is_down):
            self._hear()
        if is_down:
            self._events.after(self._stall_timeout_s, self._judge_stall)
        else:
            self._look_after(LOOK_EVERY_S)

    def _judge_stall(self) -> None:
        if self._link.is_down and not self._is_gone:
            self._judge()
            if not self._is_gone:  # rounding, or it was up in between
                self._events.after(self._stall_timeout_s, self._judge_stall)

    def _judge(self) -> None:
        verdict = self._watched().verdict(self._events.now_s)
        if verdict != "wait":
            self.give_up()
            self._on_given_up(verdict)
