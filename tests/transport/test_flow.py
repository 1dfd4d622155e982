"""The egress budget keeps its rate, wastes nothing and starves nobody; credit is never overdrawn."""

import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prfaas.errors import ProtocolError
from prfaas.transport.flow import MAX_WAIT_S, MIN_WAIT_S, PATIENCE_S, CreditAccount, EgressBudget

RATE = 1e6
BURST = 50_000


class Senders:
    """Transfers that always have a next piece, and ask for it when they are told to."""

    def __init__(self, budget: EgressBudget) -> None:
        self.budget = budget
        self.grants: list[tuple[float, str, int]] = []
        self._asks: list[tuple[float, int, str]] = []
        self._pieces: dict[str, tuple[int, float | None]] = {}
        self._numbers = itertools.count()

    def add(self, name: str, piece: int, *, at_s: float, deadline_s: float | None = None) -> None:
        self._pieces[name] = (piece, deadline_s)
        heapq.heappush(self._asks, (at_s, next(self._numbers), name))

    def leave(self, name: str) -> None:
        del self._pieces[name]
        self.budget.done(name)

    def run(self, until_s: float) -> None:
        while self._asks and self._asks[0][0] <= until_s:
            now_s, _, name = heapq.heappop(self._asks)
            if name not in self._pieces:
                continue
            piece, deadline_s = self._pieces[name]
            wait_s = self.budget.ask(name, piece, now_s=now_s, deadline_s=deadline_s)
            self.budget.check()
            if wait_s == 0.0:
                self.grants.append((now_s, name, piece))
            heapq.heappush(self._asks, (now_s + wait_s, next(self._numbers), name))

    def sent(self, name: str) -> int:
        return sum(piece for _, who, piece in self.grants if who == name)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3 * BURST),
            st.floats(0, 0.3),
            st.one_of(st.none(), st.floats(-1, 5)),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_no_span_carries_more_than_the_rate_and_one_burst(pieces):
    senders = Senders(EgressBudget(RATE, BURST))
    for number, (piece, at_s, deadline_s) in enumerate(pieces):
        senders.add(str(number), max(piece, 10_000), at_s=at_s, deadline_s=deadline_s)
    senders.run(0.8)
    allowance = max(BURST, *(piece for _, _, piece in senders.grants))
    total, least = 0, float("inf")
    for now_s, _, piece in senders.grants:  # least: of what was sent before a span, less its rate
        least = min(least, total - RATE * now_s)
        total += piece
        assert total - RATE * now_s - least <= allowance + 1e-3


@given(st.lists(st.integers(5_000, BURST), min_size=1, max_size=5))
def test_no_budget_is_lost_while_pieces_wait(pieces):
    senders = Senders(EgressBudget(RATE, BURST))
    for number, piece in enumerate(pieces):
        senders.add(str(number), piece, at_s=0.0)
    senders.run(1.0)
    assert sum(piece for _, _, piece in senders.grants) >= RATE * (1.0 - MIN_WAIT_S)


def test_what_a_transfer_that_left_would_have_sent_is_soon_used_by_others():
    senders = Senders(EgressBudget(RATE, BURST))
    for number in range(40):
        senders.add(f"leaver-{number}", BURST, at_s=0.0)
    senders.add("stayer", BURST, at_s=0.001)
    senders.run(0.01)
    for number in range(40):
        senders.leave(f"leaver-{number}")
    senders.run(0.01 + MAX_WAIT_S)
    assert senders.sent("stayer") > 0


def test_transfers_without_deadlines_take_turns():
    senders = Senders(EgressBudget(RATE, BURST))
    for name in ("a", "b", "c"):
        senders.add(name, 10_000, at_s=0.0)
    senders.run(3.0)
    shares = [senders.sent(name) for name in ("a", "b", "c")]
    assert max(shares) - min(shares) <= 2 * 10_000


def test_streams_of_one_transfer_together_get_one_transfers_share():
    senders = Senders(EgressBudget(RATE, BURST))
    senders.add("single", 10_000, at_s=0.0)
    senders._asks += [(0.0, next(senders._numbers), "many") for _ in range(4)]
    senders._pieces["many"] = (10_000, None)
    heapq.heapify(senders._asks)
    senders.run(3.0)
    assert senders.sent("single") >= 0.8 * senders.sent("many")


def test_the_nearer_deadline_goes_first_and_the_older_transfer_among_equals():
    budget = EgressBudget(RATE, BURST)
    assert budget.ask("filler", BURST, now_s=0.0) == 0.0
    for name, deadline_s in (("late", 1.5), ("older", 1.0), ("younger", 1.0)):
        assert budget.ask(name, BURST, now_s=0.0, deadline_s=deadline_s) > 0
    order = []
    for step in range(1, 4):
        now_s = step * 1.01 * BURST / RATE
        for name, deadline_s in (("late", 1.5), ("younger", 1.0), ("older", 1.0)):
            if name not in order and not budget.ask(
                name, BURST, now_s=now_s, deadline_s=deadline_s
            ):
                order.append(name)
    assert order == ["older", "younger", "late"]


def test_endless_urgent_newcomers_do_not_starve_a_patient_transfer():
    senders = Senders(EgressBudget(RATE, BURST))
    senders.add("patient", BURST, at_s=0.5)
    for number in range(200):
        senders.add(f"urgent-{number}", BURST, at_s=number * 0.05, deadline_s=-1.0)
    crowd = int((0.5 + PATIENCE_S) / 0.05) + 1  # that can stand before it in the end
    senders.run(0.5 + PATIENCE_S + MAX_WAIT_S + (crowd + 2) * BURST / RATE)
    assert senders.sent("patient") > 0


def test_who_does_not_come_back_holds_up_nobody():
    budget = EgressBudget(RATE, BURST)
    budget.ask("filler", BURST, now_s=0.0)
    assert budget.ask("gone", BURST, now_s=0.0, deadline_s=0.0) > 0
    assert budget.ask("here", BURST, now_s=0.0) > 0
    assert budget.ask("here", BURST, now_s=0.05) > 0
    assert budget.ask("here", BURST, now_s=1.2) == 0.0
    assert budget.num_waiting == 0


def test_a_budget_without_a_rate_grants_everything():
    budget = EgressBudget(None, 1)
    assert [budget.ask("a", 1 << 40, now_s=0.0) for _ in range(3)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_a_budget_of_nothing_is_refused(rate, burst):
    with pytest.raises(ValueError, match="a budget of"):
        EgressBudget(rate, burst)


class CreditMachine(RuleBasedStateMachine):
    """Spends and returns; the oracle is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.account = CreditAccount(1_000)
        self.in_flight = 0

    @rule(num_bytes=st.integers(0, 1_000))
    def spend(self, num_bytes):
        fits = self.in_flight + num_bytes <= 1_000
        assert self.account.try_spend(num_bytes) is fits
        self.in_flight += num_bytes if fits else 0

    @rule(num_bytes=st.integers(0, 1_000))
    def give_back(self, num_bytes):
        if num_bytes > self.in_flight:
            with pytest.raises(ProtocolError, match="in flight"):
                self.account.returned(num_bytes)
        else:
            self.account.returned(num_bytes)
            self.in_flight -= num_bytes

    @invariant()
    def in_flight_is_what_was_not_returned_and_within_credit(self):
        assert self.account.in_flight_bytes == self.in_flight <= 1_000
        assert self.account.free_bytes == 1_000 - self.in_flight


CreditMachine.TestCase.settings = settings(stateful_step_count=30, max_examples=50)
TestCredit = CreditMachine.TestCase


def test_a_piece_that_never_fits_is_an_error_and_not_a_wait():
    with pytest.raises(ProtocolError, match="1001 bytes never fit a credit of 1000"):
        CreditAccount(1_000).try_spend(1_001)
