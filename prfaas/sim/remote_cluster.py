"""A simulated PrfaaS cluster: its queue, its link, and what it reports of itself, late."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from prfaas.config.simulation_table import SimulationOptions
from prfaas.scheduler.forecast import LinkView, PrefillView, RemoteView
from prfaas.scheduler.monitor import Verdict
from prfaas.scheduler.profile import Link
from prfaas.scheduler.router import Outcome
from prfaas.sim.breakers import Sent
from prfaas.sim.events import Events
from prfaas.sim.kv_link import KvLink
from prfaas.sim.prefix_lru import PrefixLru
from prfaas.sim.station import Job, Station
from prfaas.sim.transfer import Transfer

OnEnded = Callable[[Outcome], object]
"""Called once, with what became of a remote prefill."""


class RemotePrefill:
    """One prefill there and its transfer, until it arrived or was given up."""

    def __init__(
        self,
        cluster: "RemoteCluster",
        *,
        index: int,
        sent: Sent,
        service_s: float,
        num_bytes: float,
        num_tokens: int,
        local_estimate_s: float,
        on_ended: OnEnded,
    ) -> None:
        self.index = index
        """Of the cluster."""
        self.sent = sent
        self._station = cluster.station
        self._service_s = service_s
        self._on_ended = on_ended
        self.transfer = cluster.transfer(
            num_bytes=num_bytes,
            num_tokens=num_tokens,
            local_estimate_s=local_estimate_s,
            on_arrived=self._arrived,
            on_given_up=self._given_up,
        )
        self.job: Job | None = None
        """None while the request is on its way."""
        self.computed_s: float | None = None

    def begin(self, more_s: float = 0.0) -> None:
        """Reach the cluster, and queue there, for so much more service than was thought."""
        self._service_s += more_s
        self.job = self._station.submit(self._service_s, self._computed, self._started, self.lose)

    def lose(self) -> None:
        """Give it up because its instance is gone, and say so."""
        self.fail("transfer_failed")

    def fail(self, outcome: Outcome) -> None:
        """Give it up, and say why."""
        self._leave()
        self._end(outcome)

    def _started(self) -> None:
        self.transfer.begin(self._service_s)

    def _computed(self) -> None:
        self.computed_s = self._station.now_s
        self.transfer.finish()

    def _arrived(self) -> None:
        self._end("completed")

    def _given_up(self, verdict: Verdict) -> None:
        self.fail("peer_stuck" if verdict == "stuck" else "slower_than_local")

    def _end(self, outcome: Outcome) -> None:
        self._on_ended(outcome)
        self.job = None  # it refers to this, as the transfer does
        del self.transfer

    def _leave(self) -> None:
        """Take it out of queue, service and link."""
        self.transfer.give_up()
        if self.job is not None:
            self._station.withdraw(self.job)


class RemoteCluster:
    """Prefills for the local cluster, and sends KVCache as it is computed.

    It reports every period while it has work; the reports of one at rest are the same, so that none
    is made and the last one counts as fresh.
    """

    def __init__(
        self,
        events: Events,
        *,
        name: str,
        num_instances: int,
        link: Link,
        options: SimulationOptions,
        on_report: Callable[[RemoteView], object],
    ) -> None:
        self._events = events
        self._name = name
        self._rtt_s = link.rtt_s
        self._options = options
        self._on_report = on_report
        self.is_at_rest = True
        """Whether no report is under way, nor needed."""
        self.station = Station(events, num_servers=num_instances)
        self.link = KvLink(events, link, streams=options.streams, changes=options.link)
        self.link_there = KvLink(events, link, streams=options.streams, changes=options.link)
        """The other direction, for prefixes: as wide, and it changes alike."""
        self.cache = PrefixLru(capacity_tokens=options.prfaas_cache_tokens)
        for at_s in {change.at_s for change in options.link}:
            events.at(at_s, self._wake, priority=1)

    def view(self) -> RemoteView:
        """Return the cluster as it is now."""
        return RemoteView(
            name=self._name,
            prefill=view_of(self.station, self._events.now_s),
            link=LinkView(
                bytes_per_s=self.link.available_bytes_per_s,
                rtt_s=self._rtt_s,
                egress_bytes_per_s=self.link.egress_bytes_per_s(),
            ),
        )

    def transfer(
        self,
        *,
        num_bytes: float,
        num_tokens: int,
        local_estimate_s: float,
        on_arrived: Callable[[], object],
        on_given_up: Callable[[Verdict], object],
    ) -> Transfer:
        """Return a transfer over the cluster's link, not begun."""
        return Transfer(
            self._events,
            self.link,
            num_bytes=num_bytes,
            num_tokens=num_tokens,
            pieces=self._options.pieces,
            stall_timeout_s=self._options.stall_timeout_s,
            local_estimate_s=local_estimate_s,
            on_arrived=on_arrived,
            on_given_up=on_given_up,
        )

    def changed(self) -> None:
        """Report in a while: work or instances have come, or are on their way."""
        self._wake()

    def check(self) -> None:
        """Assert that queue and link lost nothing."""
        self.station.check()
        self.link.check()
        self.link_there.check()

    def _wake(self) -> None:
        if self.is_at_rest:
            self.is_at_rest = False
            self._events.after(self._options.view_period_s, self._report)

    def _report(self) -> None:
        view = self.view()
        has_work = self.station.num_serving + self.station.num_waiting > 0
        has_egress = view.link.egress_bytes_per_s > 1e-3 * view.link.bytes_per_s
        if has_work or has_egress:
            self._events.after(self._options.view_period_s, self._report)
        else:
            self.is_at_rest = True
        self._events.after(self._options.view_delay_s, partial(self._on_report, view))


def view_of(station: Station, now_s: float) -> PrefillView:
    """Return what a policy may know of a queue."""
    return PrefillView(
        num_instances=station.num_servers,
        num_busy=station.num_serving,
        num_waiting=station.num_waiting,
        waiting_work_s=station.waiting_work_s,
        residual_work_s=station.residual_work_s,
        taken_s=now_s,
    )


def refreshed(view: RemoteView, now_s: float) -> RemoteView:
    """Return the view of a cluster at rest, as if it had just been taken."""
    return replace(view, prefill=replace(view.prefill, taken_s=now_s))


def remote_clusters(
    events: Events,
    *,
    num_instances: int,
    link: Link | None,
    options: SimulationOptions,
    on_report: Callable[[int, RemoteView], object],
) -> list[RemoteCluster]:
    """Return the clusters that so many instances and the link are divided between, as even as can be."""
    num_clusters = min(options.clusters, num_instances)
    if not num_clusters:
        return []
    assert link is not None, "a PrfaaS cluster without a link"
    return [
        RemoteCluster(
            events,
            name=f"prfaas-{index}",
            num_instances=num_instances // num_clusters + (index < num_instances % num_clusters),
            link=replace(link, bytes_per_s=link.bytes_per_s / num_clusters),
            options=options,
            on_report=partial(on_report, index),
        )
        for index in range(num_clusters)
    ]
