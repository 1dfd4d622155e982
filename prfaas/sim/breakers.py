"""The circuit breakers of simulated clusters: the `Router` that nodes run, told what becomes of prefills."""

from collections.abc import Iterable, Sequence

from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.router import Outcome, Router, RouteRequest
from prfaas.scheduler.view import LocalView

Sent = tuple[int, int, float]
"""A remote prefill: a number that no other has, its tokens, and when it was decided."""


class Breakers:
    """Says which PrfaaS clusters get nothing for now, and which get one prefill to show that they work.

    A cluster has no router before its first failure: until then none would be refused.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._routers: dict[int, Router] = {}
        self._sent: set[int] = set()
        """What the routers know of."""

    def __bool__(self) -> bool:
        """Return whether a cluster may be refused."""
        return bool(self._routers)

    def refused(self, now_s: float) -> frozenset[int]:
        """Return the clusters that nothing may be sent to now."""
        return frozenset(
            index
            for index, router in self._routers.items()
            if not router.is_usable(self._names[index], now_s)
        )

    def sent(self, index: int, sent: Sent) -> None:
        """Take note of a remote prefill from its decision on.

        One that goes to a refused cluster, as nobody else can serve, proves nothing.
        """
        router = self._routers.get(index)
        if router is None:
            return
        number, num_tokens, now_s = sent
        request = RouteRequest(num_tokens=num_tokens, hit_tokens=0, num_kv_bytes=0)
        route = router.route(str(number), request, local=LocalView(), now_s=now_s, force="remote")
        if route.name == "remote":
            self._sent.add(number)

    def ended(
        self, index: int, number: int, outcome: Outcome, now_s: float, here: Iterable[Sent]
    ) -> None:
        """Take note of what became of one; `here` are all that the cluster has, it among them."""
        if index not in self._routers:
            if outcome == "completed":
                return
            self._routers[index] = Router(peers=(self._names[index],), options=SchedulerOptions())
            for sent in here:
                self._routers[index].heard(self._names[index], now_s=sent[2], is_ready=True)
                self.sent(index, sent)
        if number in self._sent:
            self._sent.remove(number)
            self._routers[index].ended(str(number), outcome, now_s=now_s)

    def heard(self, index: int, now_s: float, *, is_ready: bool) -> None:
        """Take note of a cluster's report."""
        router = self._routers.get(index)
        if router is not None:
            router.heard(self._names[index], now_s=now_s, is_ready=is_ready)

    def check(self, num_inflight: int) -> None:
        """Assert that routers know of no prefill that has ended."""
        assert len(self._sent) <= num_inflight
        for router in self._routers.values():
            router.check()
