"""The table finds what a look at every peer's view would find."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prfaas.scheduler.pace import Pace
from prfaas.scheduler.peer_table import Booking, PeerTable
from prfaas.scheduler.profile import Link
from prfaas.scheduler.view import PeerView

NOW_S = 50.0
NAMES = [f"{letter}:1" for letter in "abcdef"]
RATES = st.none() | st.sampled_from([0.0, 1.0, 7.0, 1e3, 1e308, 1e-300, float("nan")])
COUNTS = st.sampled_from([0, 1, 500, 10**6])
PEERS = st.builds(
    PeerView,
    peer=st.sampled_from(NAMES),
    state=st.sampled_from(["ready", "ready", "unknown", "down", "overloaded", "not_ready"]),
    prefill_tokens_per_s=RATES,
    reported_tokens_per_s=RATES,
    pace=st.none()
    | st.builds(Pace, st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([1e-6, 0.01])),
    link_bytes_per_s=RATES,
    expected_link=st.none() | st.just(Link(bytes_per_s=10.0, rtt_s=0.25)),
    rtt_s=st.none() | st.sampled_from([0.0, 0.5]),
    num_queue_tokens=COUNTS,
    heard_s=st.none() | st.sampled_from([0.0, NOW_S]),
    num_failures=st.integers(0, 1),
    retry_at_s=st.none() | st.sampled_from([0.0, 90.0]),
    num_inflight=st.integers(0, 2),
    num_inflight_tokens=COUNTS,
    num_inflight_bytes=COUNTS,
)
ASKED: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "num_tokens": st.just(2000),
        "hits": st.dictionaries(st.sampled_from([*NAMES, "gone:1"]), st.integers(0, 2000)),
        "num_kv_bytes": st.sampled_from([0, 1000, 10**7]),
        "num_tail_bytes": st.just(0),
    }
) | st.fixed_dictionaries(
    {
        "num_tokens": st.just(2000),
        "hits": st.just({}),
        "num_kv_bytes": st.sampled_from([1000, 10**7]),
        "num_tail_bytes": st.just(900),
    }
)


def best_of_all(
    views: Iterable[PeerView],
    *,
    num_tokens: int,
    hits: dict[str, int],
    num_kv_bytes: int,
    num_tail_bytes: int,
) -> str | None:
    """The rule without a table: every view, one after the other."""

    def key(view: PeerView) -> tuple[bool, float, int, str]:
        ttft_s = view.ttft_s(
            num_tokens=num_tokens - hits.get(view.peer, 0),
            num_kv_bytes=num_kv_bytes,
            num_tail_bytes=num_tail_bytes,
        )
        return (view.is_stale(NOW_S), ttft_s or 0.0, view.num_inflight_tokens, view.peer)

    usable = [view for view in views if view.refusal(NOW_S) is None]
    return min(usable, key=key).peer if usable else None


@settings(max_examples=60)
@given(peers=st.lists(PEERS, max_size=6, unique_by=lambda p: p.peer), asked=ASKED)
def test_the_best_peer_is_the_best_of_a_look_at_all(peers, asked):
    table = PeerTable(peers)
    found = table.best(now_s=NOW_S, **asked)
    assert (None if found is None else found.peer) == best_of_all(peers, **asked)
    table.check()


class TableMachine(RuleBasedStateMachine):
    """Peers come, change and go; a table that saw all of it equals one made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PeerTable()
        self.views: dict[str, PeerView] = {}

    @rule(view=PEERS)
    def put(self, view: PeerView) -> None:
        self.table.put(view)
        self.views[view.peer] = view

    @rule(name=st.sampled_from(NAMES), counts=st.tuples(COUNTS, COUNTS, COUNTS))
    def book(self, name: str, counts: tuple[int, int, int]) -> None:
        requests, tokens, num_bytes = counts
        booked = Booking(requests, tokens, num_bytes, float(num_bytes), NOW_S)
        if name not in self.views:
            with pytest.raises(KeyError):
                self.table.book(name, booked)
            return
        self.table.book(name, booked)
        self.views[name] = replace(
            self.views[name],
            num_inflight=requests,
            num_inflight_tokens=tokens,
            num_inflight_bytes=num_bytes,
            spent_bytes=float(num_bytes),
            spent_at_s=NOW_S,
        )

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        if name in self.views:
            self.table.remove(name)
            del self.views[name]
        else:
            with pytest.raises(KeyError):
                self.table.remove(name)

    @rule(asked=ASKED)
    def ask(self, asked: dict[str, Any]) -> None:
        found = self.table.best(now_s=NOW_S, **asked)
        expected = best_of_all(self.views.values(), **asked)
        assert (None if found is None else found.peer) == expected

    @invariant()
    def holds_what_was_put(self) -> None:
        assert len(self.table) == len(self.views)
        assert [name for name in NAMES if name in self.table] == sorted(self.views)

    def teardown(self) -> None:
        assert self.table.views == tuple(self.views.values())
        self.table.check()


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=15, stateful_step_count=20)
