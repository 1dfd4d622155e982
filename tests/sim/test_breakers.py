"""A cluster that fails gets nothing for a while, then one prefill to show that it works."""

from prfaas.scheduler.router import FIRST_BACKOFF_S, SLOW_BACKOFF_S
from prfaas.sim.breakers import Breakers, Sent


class Clusters:
    """Breakers and what is in flight at two clusters."""

    def __init__(self) -> None:
        self.breakers = Breakers(["a", "b"])
        self.here: dict[int, tuple[int, Sent]] = {}

    def send(self, index: int, now_s: float) -> int:
        number = len(self.here) + 1
        self.here[number] = (index, (number, 100, now_s))
        self.breakers.sent(index, self.here[number][1])
        return number

    def end(self, number: int, outcome, now_s: float) -> None:
        index, _ = self.here[number]
        here = [sent for at, sent in self.here.values() if at == index]
        self.breakers.ended(index, number, outcome, now_s, here)
        self.breakers.check(len(self.here))


def test_while_all_goes_well_nothing_is_remembered():
    clusters = Clusters()
    clusters.end(clusters.send(0, 1.0), "completed", 2.0)
    clusters.breakers.heard(0, 3.0, is_ready=False)
    assert not clusters.breakers
    assert clusters.breakers.refused(4.0) == frozenset()


def test_a_failure_opens_the_breaker_and_one_prefill_closes_it_again():
    clusters = Clusters()
    lost, still = clusters.send(0, 1.0), clusters.send(0, 1.5)
    clusters.end(lost, "peer_stuck", 6.0)
    assert clusters.breakers.refused(6.5) == {0}
    assert clusters.breakers.refused(6.0 + FIRST_BACKOFF_S) == {0}, (
        "another is still in flight there"
    )
    clusters.end(still, "peer_stuck", 6.5)
    assert clusters.breakers.refused(7.6) == frozenset()
    probe = clusters.send(0, 7.6)
    assert clusters.breakers.refused(7.7) == {0}, "half open: one at a time"
    clusters.end(probe, "completed", 9.0)
    assert clusters.breakers.refused(9.0) == frozenset()
    clusters.send(0, 9.1)
    assert clusters.breakers.refused(9.2) == frozenset()


def test_failures_in_a_row_are_waited_for_longer_and_longer():
    clusters, now_s, waits = Clusters(), 0.0, []
    for _ in range(4):
        clusters.end(clusters.send(1, now_s), "transfer_failed", now_s)
        began_s = now_s
        while clusters.breakers.refused(now_s):
            now_s += 0.25
        waits.append(now_s - began_s)
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_one_that_completes_beside_a_failure_closes_the_breaker():
    clusters = Clusters()
    failed, fine = clusters.send(0, 1.0), clusters.send(0, 1.0)
    clusters.end(failed, "transfer_failed", 2.0)
    clusters.end(fine, "completed", 2.1)
    assert clusters.breakers.refused(2.2) == frozenset()


def test_a_slow_cluster_rests_and_a_report_does_not_end_that():
    clusters = Clusters()
    clusters.end(clusters.send(0, 1.0), "slower_than_local", 4.0)
    clusters.breakers.heard(0, 5.0, is_ready=True)
    assert clusters.breakers.refused(4.0 + SLOW_BACKOFF_S - 0.1) == {0}
    assert clusters.breakers.refused(4.0 + SLOW_BACKOFF_S + 0.1) == frozenset()


def test_what_goes_to_a_refused_cluster_for_want_of_another_proves_nothing():
    clusters = Clusters()
    clusters.end(clusters.send(0, 1.0), "peer_stuck", 6.0)
    forced = clusters.send(0, 6.1)
    clusters.end(forced, "completed", 6.2)
    assert clusters.breakers.refused(6.3) == {0}
