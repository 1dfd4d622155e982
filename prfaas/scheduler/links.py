"""The ways from other nodes to a cluster, as its nodes report them."""

from collections.abc import Iterable

from prfaas.scheduler.heartbeat import Heartbeat
from prfaas.scheduler.view import known_rate

NEAR_BYTES_PER_S = 125e6
"""Between two nodes of a cluster, until any was measured."""


class Links:
    """The ways from other nodes to a cluster's. Of a rate the least counts that one of its nodes says.

    A node to which nothing was sent yet knows only what the sender sends at most, or what a profile says.
    """

    def __init__(self) -> None:
        self._told_byte_s: dict[str, dict[str, float]] = {}
        """By the sender, then by the node that says so."""
        self._byte_s: dict[str, float] = {}
        """By the sender, the most that is said."""
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
                told = self._told_byte_s.setdefault(name, {})
                told[heartbeat.node] = 1 / rate
                self._byte_s[name] = max(told.values())
            if rtt_s is not None:
                self._rtt_s[name] = rtt_s
            if old != (self._byte_s.get(name), self._rtt_s.get(name)):
                changed.append(name)
        return changed

    def forget(self, name: str) -> None:
        """Drop what is known of the way from a node, and what it said of others."""
        for known in (self._told_byte_s, self._byte_s, self._rtt_s):
            known.pop(name, None)
        for sender, told in list(self._told_byte_s.items()):
            if told.pop(name, None) is None:
                continue
            if told:
                self._byte_s[sender] = max(told.values())
            else:
                del self._told_byte_s[sender], self._byte_s[sender]

    def byte_s(self, name: str) -> float | None:
        """Return the seconds of a byte from a node; None if nobody knows."""
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
