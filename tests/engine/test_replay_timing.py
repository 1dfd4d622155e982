"""Parts of a prefill add up to what the profile says of the whole."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine.replay_timing import ReplayTiming


def timing(speed: float = 1.0) -> ReplayTiming:
    return ReplayTiming(
        prefill_s=lambda n: 0.4 + 1e-3 * n + 1e-6 * n * n, decode_s=lambda b: 0.02 * b, speed=speed
    )


@given(st.lists(st.integers(1, 5_000), min_size=2, max_size=9, unique=True), st.floats(0.1, 100))
def test_the_chunks_of_a_prefill_add_up_to_it_however_it_is_cut(cuts, speed):
    ends = [0, *sorted(cuts)]
    total = ends[-1]
    parts = [timing(speed).chunk_s(start, end, total) for start, end in pairwise(ends)]
    assert sum(parts) == pytest.approx(timing().prefill_s(total) / speed)
    assert min(parts) > 0


def test_what_a_prefill_always_takes_is_spread_over_its_tokens():
    halves = [timing().chunk_s(0, 500, 1_000), timing().chunk_s(500, 1_000, 1_000)]
    assert halves == pytest.approx([0.2 + 0.5 + 0.25, 0.2 + 0.5 + 0.75])


def test_a_decode_step_is_that_of_its_batch_and_none_takes_nothing():
    assert timing(4.0).step_s(8) == pytest.approx(0.04)
    assert timing().step_s(0) == 0.0
    assert ReplayTiming(prefill_s=lambda n: n, decode_s=None).step_s(0) == 0.0
