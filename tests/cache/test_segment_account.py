"""Segments are counted in step, and the least useful goes first."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.segment_account import Segment, SegmentAccount
from tests.cache.stores import key_of


def segment(
    number: int, tenant: bytes = b"", *, size: int = 100, live: int = 100, used_s: float = 0.0
) -> Segment:
    return Segment(
        number=number,
        tenant=tenant,
        created_s=0.0,
        used_s=used_s,
        size_bytes=size,
        live_bytes=live,
    )


def account_of(*segments: Segment) -> SegmentAccount:
    account = SegmentAccount()
    for found in segments:
        account.add(found)
    return account


def least_useful(account: SegmentAccount, tenant: bytes | None = None) -> int | None:
    found = account.least_useful(100, tenant=tenant)
    return None if found is None else found.number


def test_what_is_dead_goes_before_what_is_old():
    account = account_of(segment(1, live=0, used_s=100), segment(2, used_s=0))
    assert least_useful(account) == 1


def test_of_equals_the_longest_unused_goes_and_then_the_first_written():
    account = account_of(segment(1, used_s=50), segment(3, used_s=10), segment(2, used_s=10))
    assert least_useful(account) == 2


def test_half_alive_is_worth_as_much_as_whole_and_twice_as_old():
    whole = segment(1, used_s=69)  # for 31 s
    assert account_of(whole, segment(2, live=50, used_s=90)).least_useful(100) is whole
    half = segment(2, live=50, used_s=80)
    assert account_of(whole, half).least_useful(100) is half


def test_a_tenant_loses_only_its_own():
    account = account_of(segment(1, b"a", live=0), segment(2, b"b", used_s=99))
    assert least_useful(account, b"b") == 2
    assert least_useful(account, b"c") is None


def test_a_clock_that_went_back_makes_nothing_worth_more_than_new():
    assert segment(1, used_s=500).usefulness(100) == segment(2, used_s=100).usefulness(100) == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 100))))
def test_sums_are_those_of_the_segments_after_any_changes(steps):
    account = SegmentAccount()
    by_number: dict[int, Segment] = {}
    lengths: dict[int, list[int]] = {}
    for what, number, length in steps:
        if number not in by_number:
            by_number[number] = segment(number, b"ab"[number % 2 :][:1], size=0, live=0)
            account.add(by_number[number])
            lengths[number] = []
        if what < 3:
            account.grow(by_number[number], key_of(length), length, 1.0)
            lengths[number].append(length)
        elif what == 3 and lengths[number]:
            account.bury(by_number[number], lengths[number].pop())
        else:
            account.remove(by_number.pop(number))
            del lengths[number]
        account.check()
        assert account.live_bytes == sum(sum(found) for found in lengths.values())
        assert set(account) == set(by_number.values())
        assert sum(account.tenants().values()) == account.size_bytes
