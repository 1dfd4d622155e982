"""The ways from other nodes to a cluster, as its nodes report them."""

from collections.abc import Iterable

from prfaas.scheduler.heartbeat import Heartbeat
from prfaas.scheduler.view import known_rate

NEAR_BYTES_PER_S = 125e6
"""Between two nodes of a cluster, until any was measured."""


class Links:
    """The ways from other nodes to a cluster's, as any of its nodes saw them last."""

    def __init__(self) -> None:
        self._byte_s: dict[str, float] = {}
        self._rtt_s: dict[str, float] = {}

    def heard(self, heartbeat: Heartbeat) -> list[str]:
        """Take what a node of the cluster says, and return to whom a link has changed.

        What it does not know changes nothing.
        """
        changed = []
        for name, report in heartbeat.links.items():
            rate, rtt_s = known_rate(report.bytes_per_s), known_rate(report.rtt_s)
            old = self._byte_s.get(name), self._rtt_s.get(name)
            if rate is not None:
                self._byte_s[name] = 1 / rate
            if rtt_s is not None:
                self._rtt_s[name] = rtt_s
            if old != (self._byte_s.get(name), self._rtt_s.get(name)):
                changed.append(name)
        return changed

    def forget(self, name: str) -> None:
        """Drop what is known of the way from a node."""
        self._byte_s.pop(name, None)
        self._rtt_s.pop(name, None)

    def byte_s(self, name: str) -> float | None:
        """Return the seconds of a byte from a node; None if no transfer has shown it."""
        return self._byte_s.get(name)

    def rtt_s(self, name: str) -> float | None:
        """Return the round trip to a node; None is unknown."""
        return self._rtt_s.get(name)

    def mean_bytes_per_s(self, names: Iterable[str]) -> float | None:
        """Return the mean goodput from these nodes; None if none is known."""
        known = [1 / self._byte_s[name] for name in names if name in self._byte_s]
        return sum(known) / len(known) if known else None

    def near_byte_s(self, name: str | None) -> float:
        """Return the seconds of a byte from a node of the cluster itself, an assumption at first."""
        byte_s = None if name is None else self._byte_s.get(name)
        return 1 / NEAR_BYTES_PER_S if byte_s is None else byte_s
