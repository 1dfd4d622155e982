"""Local instances that change their role: drained, converted, and at work again."""

from collections.abc import Callable
from functools import partial

from prfaas.scheduler.rebalancer import LocalRole, Rebalance, Rebalancer
from prfaas.scheduler.throughput import Shape
from prfaas.sim.decode_pool import DecodePool
from prfaas.sim.events import Events
from prfaas.sim.station import Station

LOOK_S = 1.0
"""Between two looks at whether a prefill instance is done with its last job."""


class Conversions:
    """Carries out what a rebalancer decides, one instance at a time.

    It looks as long as requests arrive: `is_over` says when to stop.
    """

    def __init__(
        self,
        events: Events,
        rebalancer: Rebalancer,
        *,
        prefill: Station,
        decode: DecodePool,
        num_prfaas: int,
        period_s: float,
        conversion_s: float,
        is_over: Callable[[], bool],
        on_threshold: Callable[[float], object],
    ) -> None:
        self._events = events
        self._rebalancer = rebalancer
        self._prefill = prefill
        self._decode = decode
        self._num_prfaas = num_prfaas
        self._period_s = period_s
        self._conversion_s = conversion_s
        self._is_over = is_over
        self._on_threshold = on_threshold
        self._is_converting = False
        self.num_done = 0
        events.after(period_s, self._look)

    def _look(self) -> None:
        if self._is_over():
            return
        self._events.after(self._period_s, self._look)
        num_prefill, num_decode = self._prefill.num_servers, self._decode.num_up
        if self._is_converting or not num_prefill or not num_decode:
            return
        shape = Shape(num_prfaas=self._num_prfaas, num_prefill=num_prefill, num_decode=num_decode)
        found = self._rebalancer.look(shape, self._events.now_s)
        self._apply(found)

    def _apply(self, found: Rebalance) -> None:
        if found.threshold_tokens is not None:
            self._on_threshold(found.threshold_tokens)
        if found.to is None:
            return
        self._is_converting = True
        if found.to == "prefill":
            self._decode.drain(partial(self._drained, "prefill"))
        else:
            self._prefill.set_servers(self._prefill.num_servers - 1)
            self._wait_for_prefill()

    def _wait_for_prefill(self) -> None:
        if self._prefill.num_serving > self._prefill.num_servers:
            self._events.after(LOOK_S, self._wait_for_prefill)
        else:
            self._drained("decode")

    def _drained(self, to: LocalRole) -> None:
        self._events.after(self._conversion_s, partial(self._join, to))

    def _join(self, to: LocalRole) -> None:
        self._is_converting = False
        self.num_done += 1
        if to == "prefill":
            self._prefill.set_servers(self._prefill.num_servers + 1)
        else:
            self._decode.add()
