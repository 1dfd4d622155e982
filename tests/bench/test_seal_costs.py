"""Guards cost what they cost: a MAC more than a checksum, measured by the clock that is given."""

import itertools

import pytest

from prfaas.bench.seal_costs import PAGE_BYTES, guard_costs


def test_every_guard_is_measured_by_the_clock():
    ticks = itertools.count()
    costs = guard_costs(lambda: float(next(ticks)), seconds=10.0)
    assert [cost.name for cost in costs] == ["checksum", "mac", "tls"]
    # The clock ticks at each look: nine pages, and the tenth look finds the time over.
    for cost in costs:
        assert cost.s_per_gib == pytest.approx(10 / 9 * (1 << 30) / PAGE_BYTES)
