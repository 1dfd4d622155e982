"""What a node's connections to one peer say of the link between them. Pure."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from prfaas.transport.tcpinfo import TcpInfo

MEMORY_S = 5.0
"""Rates and loss look back about this long."""
BEST_HALF_LIFE_S = 600.0
"""A best rate counts half after this: links change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """The link as last seen; bytes that the peer got from us and we from it, headers not counted."""

    num_streams: int
    goodput_bytes_per_s: float
    """Arrived in either direction, idle times included."""
    busy_goodput_bytes_per_s: float | None
    """The same while there was more to send than fit; None if that never was: what the link can do."""
    utilisation_fraction: float
    """Of the egress limit, or without one of the best goodput seen lately; 0 to 1."""
    loss_fraction: float
    """Of what was sent, the part sent again."""
    rtt_s: float | None
    min_rtt_s: float | None
    queueing_s: float
    """How much longer a round trip takes than the shortest did: waiting in queues on the way."""
    unsent_bytes: int
    """In this side's send buffers."""


class LinkState:
    """Samples of all streams to one peer become rates of the link.

    Args:
        egress_limit_bytes_per_s: what may be sent at most; None: utilisation is of the best goodput.
    """

    def __init__(self, egress_limit_bytes_per_s: float | None = None) -> None:
        self._limit = egress_limit_bytes_per_s
        self._last: dict[Hashable, TcpInfo] = {}
        self._sampled_s: float | None = None
        self._span_s = self._arrived = self._sent = self._sent_again = 0.0
        self._busy_span_s = self._busy_arrived = 0.0
        self._best = 0.0

    def add(self, samples: Mapping[Hashable, TcpInfo], *, now_s: float) -> None:
        """Take note of one sample of every open stream; streams that are missing have closed.

        A stream's first sample only says where its counts start, unless it opened since the last.
        """
        before_s, self._sampled_s = self._sampled_s, now_s
        known, self._last = self._last, dict(samples)
        if before_s is None or now_s <= before_s:
            return
        span_s = now_s - before_s
        deltas = [_Delta.between(known.get(stream), info) for stream, info in samples.items()]
        arrived = sum(delta.arrived for delta in deltas)
        self._fade(math.exp(-span_s / MEMORY_S))
        self._best *= 0.5 ** (span_s / BEST_HALF_LIFE_S)
        self._span_s += span_s
        self._arrived += arrived
        self._sent += sum(delta.sent for delta in deltas)
        self._sent_again += sum(delta.sent_again for delta in deltas)
        if any(info.notsent_bytes for info in samples.values()):
            self._busy_span_s += span_s
            self._busy_arrived += arrived
        self._best = max(self._best, self._goodput)

    @property
    def sampled_s(self) -> float | None:
        """When it was sampled last; None before the first."""
        return self._sampled_s

    def view(self) -> LinkView:
        """Return the link as of the last sample."""
        infos = self._last.values()
        rtts = [info.rtt_s for info in infos if info.rtt_s > 0]
        least = [info.min_rtt_s for info in infos if info.min_rtt_s is not None]
        rtt_s = sum(rtts) / len(rtts) if rtts else None
        min_rtt_s = min(least) if least else None
        queueing_s = 0.0
        if rtt_s is not None and min_rtt_s is not None:
            queueing_s = max(0.0, rtt_s - min_rtt_s)
        yardstick = self._limit or self._best
        return LinkView(
            num_streams=len(self._last),
            goodput_bytes_per_s=self._goodput,
            busy_goodput_bytes_per_s=(
                self._busy_arrived / self._busy_span_s if self._busy_span_s else None
            ),
            utilisation_fraction=min(1.0, self._goodput / yardstick) if yardstick else 0.0,
            loss_fraction=min(1.0, self._sent_again / self._sent) if self._sent else 0.0,
            rtt_s=rtt_s,
            min_rtt_s=min_rtt_s,
            queueing_s=queueing_s,
            unsent_bytes=sum(info.notsent_bytes for info in infos),
        )

    @property
    def _goodput(self) -> float:
        return self._arrived / self._span_s if self._span_s else 0.0

    def _fade(self, weight: float) -> None:
        self._span_s *= weight
        self._arrived *= weight
        self._sent *= weight
        self._sent_again *= weight
        self._busy_span_s *= weight
        self._busy_arrived *= weight


@dataclass(frozen=True, slots=True)
class _Delta:
    """What one stream did between two samples, in bytes."""

    arrived: int
    sent: int
    sent_again: int

    @classmethod
    def between(cls, before: TcpInfo | None, after: TcpInfo) -> "_Delta":
        """Return the difference; all of `after` if the stream, or its like by name, is a new one."""
        if before is None or after.bytes_sent < before.bytes_sent:
            return cls(
                after.bytes_acked + after.bytes_received, after.bytes_sent, after.bytes_retrans
            )
        return cls(
            max(0, after.bytes_acked - before.bytes_acked)
            + max(0, after.bytes_received - before.bytes_received),
            after.bytes_sent - before.bytes_sent,
            max(0, after.bytes_retrans - before.bytes_retrans),
        )
