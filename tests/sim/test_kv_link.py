"""KVCache crosses a link while it is computed, beside others, through outages."""

from functools import partial

import pytest

from prfaas.config.simulation_table import LinkChange
from prfaas.scheduler.profile import Link
from prfaas.sim.events import Events
from prfaas.sim.kv_link import EGRESS_WINDOW_S, KvLink, Transfer

LINK = Link(bytes_per_s=100.0)


class Case:
    """A link, and when each transfer over it arrived or was given up."""

    def __init__(self, *changes: LinkChange, streams: int = 1) -> None:
        self.events = Events()
        self.link = KvLink(self.events, LINK, streams=streams, changes=changes)
        self.ended: dict[str, tuple[str, float]] = {}

    def prefill(self, name: str, num_bytes: float, prefill_s: float, pieces: int = 4) -> Transfer:
        """Begin a prefill now that sends as it computes."""
        transfer = Transfer(
            self.events,
            self.link,
            num_bytes=num_bytes,
            pieces=pieces,
            stall_timeout_s=5.0,
            on_arrived=partial(self._end, name, "arrived"),
            on_stalled=partial(self._end, name, "stalled"),
        )
        transfer.begin(prefill_s)
        self.events.after(prefill_s, transfer.finish)
        return transfer

    def _end(self, name: str, how: str) -> None:
        assert name not in self.ended
        self.ended[name] = (how, self.events.now_s)


@pytest.mark.parametrize(
    ("num_bytes", "pieces", "arrived_s"),
    [
        (400.0, 4, 11.0),  # the last quarter after the prefill
        (400.0, 1, 14.0),  # nothing overlaps
        (4000.0, 4, 42.5),  # the link is the slower one, from the first piece on
        (0.0, 4, 10.0),
    ],
)
def test_a_transfer_ends_with_the_slower_of_prefill_and_link(num_bytes, pieces, arrived_s):
    case = Case()
    case.prefill("a", num_bytes, 10.0, pieces)
    case.events.run()
    assert case.ended["a"][0] == "arrived"
    assert case.ended["a"][1] == pytest.approx(arrived_s)
    assert case.link.sent_bytes == pytest.approx(num_bytes)


def test_flows_of_others_take_their_share():
    case = Case(LinkChange(at_s=0.0, competing_flows=4), streams=4)
    assert case.link.available_bytes_per_s == 100.0
    case.prefill("a", 100.0, 1.0, pieces=1)
    case.events.run()
    assert case.ended["a"][1] == pytest.approx(3.0), "4 of 8 flows: 50 bytes/s"
    assert case.link.available_bytes_per_s == 50.0


def test_a_transfer_goes_on_after_a_short_outage_and_is_given_up_in_a_long_one():
    out = LinkChange(at_s=2.0, bandwidth_fraction=0.0)
    for back_s, expected in [(6.0, ("arrived", 9.0)), (8.0, ("stalled", 7.0))]:
        case = Case(out, LinkChange(at_s=back_s))
        case.prefill("a", 400.0, 1.0, pieces=1)
        case.events.run()
        assert case.ended == {"a": expected}
        case.link.check()


def test_what_is_computed_in_an_outage_stalls_from_its_first_piece_on():
    case = Case(LinkChange(at_s=0.0, bandwidth_fraction=0.0))
    case.prefill("a", 400.0, 8.0)
    case.events.run()
    assert case.ended == {"a": ("stalled", 7.0)}, "2 s for the first piece, 5 s of patience"


def test_one_that_is_given_up_calls_nothing_and_leaves_the_link():
    case = Case()
    transfer = case.prefill("a", 400.0, 4.0)
    case.prefill("b", 400.0, 4.0, pieces=1)
    case.events.at(1.5, transfer.give_up)
    case.events.run()
    assert case.ended == {"b": ("arrived", 8.0)}
    case.link.check()


def test_the_egress_average_rises_to_what_is_sent_and_falls_again():
    case = Case()
    for second in range(200):
        case.events.at(second, partial(case.prefill, str(second), 50.0, 0.1))
    seen = []
    for second in range(1, 400):
        case.events.at(second, lambda: seen.append(case.link.egress_bytes_per_s()), priority=1)
    case.events.run()
    assert seen[190] == pytest.approx(50.0, rel=0.05)
    assert seen[int(199 + 5 * EGRESS_WINDOW_S)] < 1.0
