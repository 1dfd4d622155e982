"""A link is shared alike, with flows of others too, and says what went over it."""

from functools import partial

import pytest

from prfaas.config.simulation_table import LinkChange
from prfaas.scheduler.profile import Link
from prfaas.sim.events import Events
from prfaas.sim.kv_link import EGRESS_WINDOW_S, KvLink

LINK = Link(bytes_per_s=100.0)


def test_flows_of_others_take_their_share():
    events, arrived = Events(), []
    changes = (LinkChange(at_s=0.0, competing_flows=4),)
    link = KvLink(events, LINK, streams=4, changes=changes)
    assert link.available_bytes_per_s == 100.0
    events.at(1.0, lambda: link.send(100.0, lambda: arrived.append(events.now_s)))
    events.run()
    assert arrived == [pytest.approx(3.0)], "4 of 8 flows: 50 bytes/s"
    assert link.available_bytes_per_s == 50.0
    assert link.sent_bytes == 100.0
    link.check()


def test_who_watches_is_told_of_every_change_and_of_what_was_before():
    events, told = Events(), list[tuple[float, bool, bool]]()
    times = [(1.0, 0.0), (2.0, 0.0), (3.0, 0.5), (4.0, 1.0)]
    changes = [LinkChange(at_s=at_s, bandwidth_fraction=part) for at_s, part in times]
    link = KvLink(events, LINK, streams=1, changes=changes)

    def tell(was_down: bool) -> None:
        told.append((events.now_s, was_down, link.is_down))

    link.watch(tell)
    events.at(3.5, partial(link.unwatch, tell))
    events.run()
    assert told == [(1.0, False, True), (2.0, True, True), (3.0, True, False)]


def test_the_egress_average_rises_to_what_is_sent_and_falls_again():
    events, seen = Events(), list[float]()
    link = KvLink(events, LINK, streams=1)
    for second in range(200):
        events.at(second, partial(link.send, 50.0, lambda: None))
    for second in range(1, 400):
        events.at(second, lambda: seen.append(link.egress_bytes_per_s()), priority=1)
    events.run()
    assert seen[190] == pytest.approx(50.0, rel=0.05)
    assert seen[int(199 + 5 * EGRESS_WINDOW_S)] < 1.0
    assert link.average_bytes_per_s == seen[-1]
