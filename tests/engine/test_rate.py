"""The prefill rate speaks for long prompts and follows a change."""

import pytest

from prfaas.engine.rate import MEMORY_TOKENS, PrefillRate


def test_the_first_step_sets_the_rate():
    rate = PrefillRate()
    assert rate.tokens_per_s == 0.0
    rate.add(576, 2.0)
    assert rate.tokens_per_s == 288.0


def test_a_step_without_prefill_or_time_says_nothing():
    rate = PrefillRate()
    rate.add(576, 2.0)
    rate.add(0, 5.0)
    rate.add(64, 0.0)
    assert rate.tokens_per_s == 288.0


def test_tiny_prompts_hardly_move_it():
    rate = PrefillRate()
    rate.add(4096, 10.0)
    for _ in range(20):
        rate.add(1, 0.1)
    assert rate.tokens_per_s == pytest.approx(409.6, rel=0.01)


def test_a_lasting_change_is_followed():
    rate = PrefillRate()
    rate.add(4096, 10.0)
    for _ in range(5 * MEMORY_TOKENS // 512):
        rate.add(512, 5.12)
    assert rate.tokens_per_s == pytest.approx(100, rel=0.03)
