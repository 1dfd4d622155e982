"""KVCache crosses a link while it is computed, and is given up by the rule of the nodes."""

from functools import partial
from math import inf

import pytest

from prfaas.config.simulation_table import LinkChange
from prfaas.scheduler.profile import Link
from prfaas.sim.events import Events
from prfaas.sim.kv_link import KvLink
from prfaas.sim.transfer import Transfer

LINK = Link(bytes_per_s=100.0)


class Case:
    """A link, and when each transfer over it arrived or was given up."""

    def __init__(self, *changes: LinkChange, streams: int = 1) -> None:
        self.events = Events()
        self.link = KvLink(self.events, LINK, streams=streams, changes=changes)
        self.ended: dict[str, tuple[str, float]] = {}

    def prefill(
        self,
        name: str,
        num_bytes: float,
        prefill_s: float,
        pieces: int = 4,
        local_estimate_s: float = inf,
        stall_timeout_s: float = 5.0,
    ) -> Transfer:
        """Begin a prefill now that sends as it computes."""
        transfer = Transfer(
            self.events,
            self.link,
            num_bytes=num_bytes,
            num_tokens=1000,
            pieces=pieces,
            stall_timeout_s=stall_timeout_s,
            local_estimate_s=local_estimate_s,
            on_arrived=partial(self._end, name, "arrived"),
            on_given_up=partial(self._end, name),
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
    transfer = case.prefill("a", num_bytes, 10.0, pieces)
    case.events.run()
    assert case.ended["a"][0] == "arrived"
    assert case.ended["a"][1] == pytest.approx(arrived_s)
    assert case.link.sent_bytes == pytest.approx(num_bytes)
    assert transfer.first_sent_s == pytest.approx(10.0 / pieces)


def test_a_transfer_goes_on_after_a_short_outage_and_is_given_up_in_a_long_one():
    out = LinkChange(at_s=2.0, bandwidth_fraction=0.0)
    for back_s, expected in [(6.0, ("arrived", 9.0)), (8.0, ("stuck", 7.0))]:
        case = Case(out, LinkChange(at_s=back_s))
        case.prefill("a", 400.0, 1.0, pieces=1)
        case.events.run()
        assert case.ended == {"a": expected}
        case.link.check()


def test_over_a_link_that_is_down_nothing_is_heard_whether_there_is_a_piece_or_not():
    case = Case(LinkChange(at_s=0.0, bandwidth_fraction=0.0))
    case.events.at(1.0, lambda: case.prefill("a", 400.0, 8.0))
    case.events.run()
    assert case.ended == {"a": ("stuck", 6.0)}


def test_every_outage_is_waited_for_anew():
    """Three of 4 s in a row: what is heard in between ends the patience of each."""
    changes = [
        LinkChange(at_s=at_s + off, bandwidth_fraction=fraction)
        for at_s in (1.0, 6.0, 11.0)
        for off, fraction in ((0.0, 0.0), (4.0, 1.0))
    ]
    case = Case(*changes)
    case.prefill("a", 400.0, 0.5, pieces=1)
    case.events.run()
    assert case.ended == {"a": ("arrived", 0.5 + 4.0 + 3 * 4.0)}


@pytest.mark.parametrize("stall_timeout_s", [1e-9, 0.1, 1 / 3, 7.7])
def test_patience_ends_though_its_seconds_are_rounded(stall_timeout_s):
    case = Case(LinkChange(at_s=1234.56789, bandwidth_fraction=0.0))
    case.events.at(
        1234.4, lambda: case.prefill("a", 400.0, 0.1, 1, stall_timeout_s=stall_timeout_s)
    )
    case.events.run()
    how, ended_s = case.ended["a"]
    assert how == "stuck"
    assert 1234.56789 + stall_timeout_s == pytest.approx(ended_s, abs=stall_timeout_s + 1e-6)


def test_a_slow_link_loses_to_a_local_prefill_and_a_fast_one_does_not():
    """40 s of bytes at the first pace, a local prefill of 8 s: more than 1.5 x 8 + 1 s are left."""
    slow = Case(LinkChange(at_s=0.0, bandwidth_fraction=0.1))
    transfer = slow.prefill("a", 400.0, 1.0, local_estimate_s=8.0)
    slow.events.run()
    how, ended_s = slow.ended["a"]
    assert how == "slower_than_local"
    assert 2.0 <= ended_s <= 4.0, "no pace is judged on less than 2 s, and looks are 1 s apart"
    assert transfer.arrived_fraction == 0.0, "a quarter takes 10 s"
    assert slow.link.sent_bytes == 0.0
    for fraction, estimate_s in [(0.1, 100.0), (0.1, inf), (1.0, 8.0)]:
        case = Case(LinkChange(at_s=0.0, bandwidth_fraction=fraction))
        case.prefill("a", 400.0, 1.0, local_estimate_s=estimate_s)
        case.events.run()
        assert case.ended["a"][0] == "arrived"


def test_a_link_that_becomes_slow_leaves_the_pieces_that_came():
    case = Case(LinkChange(at_s=5.0, bandwidth_fraction=0.001))
    transfer = case.prefill("a", 800.0, 8.0, local_estimate_s=5.0)
    case.events.run()
    assert case.ended["a"][0] == "slower_than_local"
    assert 7.0 <= case.ended["a"][1] <= 10.0
    assert transfer.arrived_fraction == 0.25, "of pieces of 2 s at 2, 4 and 6 s"


@pytest.mark.parametrize("pieces", [1, 3, 16])
def test_a_long_prefill_over_a_fast_link_is_never_slow(pieces):
    case = Case()
    case.prefill("a", 100.0, 300.0, pieces, local_estimate_s=250.0)
    case.events.run()
    assert case.ended["a"][0] == "arrived"


def test_one_that_is_given_up_calls_nothing_and_leaves_the_link():
    case = Case()
    transfer = case.prefill("a", 400.0, 4.0)
    case.prefill("b", 400.0, 4.0, pieces=1)
    case.events.at(1.5, transfer.give_up)
    case.events.run()
    assert case.ended == {"b": ("arrived", 8.0)}
    case.link.check()
