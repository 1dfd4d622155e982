"""Instances that go at given moments with all they had, and come back empty."""

from collections.abc import Callable, Sequence
from functools import partial

from prfaas.config.simulation_table import Failure
from prfaas.sim.decode_pool import DecodePool
from prfaas.sim.events import Events
from prfaas.sim.remote_cluster import RemoteCluster
from prfaas.sim.station import Station


class Failures:
    """Carries out the failures of a configuration; of a PrfaaS cluster that is not there, nothing fails."""

    def __init__(
        self,
        events: Events,
        failures: Sequence[Failure],
        *,
        prefill: Station,
        decode: DecodePool,
        remotes: Sequence[RemoteCluster],
        on_cluster_lost: Callable[[int], object],
        on_restored: Callable[[], object],
    ) -> None:
        self._events = events
        self._prefill = prefill
        self._decode = decode
        self._remotes = remotes
        self._on_cluster_lost = on_cluster_lost
        self._on_restored = on_restored
        for failure in failures:
            events.at(failure.at_s, partial(self._fail, failure))

    def _fail(self, failure: Failure) -> None:
        if failure.role == "decode":
            lost = self._decode.lose(failure.instances)
            self._events.after(failure.for_s, partial(self._decode.restore, lost))
        elif failure.role == "prefill":
            self._lose(self._prefill, failure)
        elif failure.cluster < len(self._remotes):
            station = self._remotes[failure.cluster].station
            self._lose(station, failure)
            if not station.num_servers:
                self._on_cluster_lost(failure.cluster)

    def _lose(self, station: Station, failure: Failure) -> None:
        num = min(failure.instances, station.num_servers)
        self._events.after(failure.for_s, partial(self._restore, station, num))
        station.lose(num)
        self._report()

    def _restore(self, station: Station, num_servers: int) -> None:
        station.set_servers(station.num_servers + num_servers)
        self._report()
        self._on_restored()

    def _report(self) -> None:
        for remote in self._remotes:
            remote.changed()
