"""What the engine says of its pace speaks for long prompts, follows a change and counts waiting."""

import pytest

from prfaas.engine.rate import FIRST_TOKENS, MEMORY_STEPS, MEMORY_TOKENS, PrefillRate, StepTimes


def test_the_first_step_sets_the_rate():
    rate = PrefillRate()
    assert rate.tokens_per_s == 0.0
    rate.add(576, 2.0)
    assert rate.tokens_per_s == 288.0


def test_a_few_tokens_alone_say_nothing_of_a_prompt_s_pace():
    rate = PrefillRate()
    rate.add(1, 0.5)
    rate.add(FIRST_TOKENS - 2, 0.25)
    assert rate.tokens_per_s == 0.0
    rate.add(1, 0.25)
    assert rate.tokens_per_s == FIRST_TOKENS


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


def test_prefill_that_was_held_back_is_expected_to_be_again():
    times = StepTimes(mixed_chunk_tokens=512)
    for _ in range(3):
        times.add(0.5, num_prefill_tokens=0, is_prefill_held_back=True)
    times.add(1.0, num_prefill_tokens=256, is_prefill_held_back=False)
    assert times.prefill_tokens_per_s == 256 / 2.5
    assert times.prefill_chunk_s == 2.0, "half a chunk took a second"
    assert times.decode_step_s == 0.5


def test_steps_in_which_nothing_waited_do_not_slow_the_next_prompt():
    times = StepTimes(mixed_chunk_tokens=512)
    times.add(0.5, num_prefill_tokens=0, is_prefill_held_back=True)
    times.add(0.5, num_prefill_tokens=0, is_prefill_held_back=False)  # who waited has left
    times.add(1.0, num_prefill_tokens=512, is_prefill_held_back=False)
    assert times.prefill_tokens_per_s == 512


def test_decode_steps_follow_a_change_and_know_nothing_of_prefill():
    times = StepTimes(mixed_chunk_tokens=512)
    assert (times.decode_step_s, times.prefill_chunk_s) == (None, None)
    times.add(0.1, num_prefill_tokens=0, is_prefill_held_back=False)
    times.add(5.0, num_prefill_tokens=512, is_prefill_held_back=False)
    assert times.decode_step_s == 0.1
    for _ in range(5 * MEMORY_STEPS):
        times.add(0.2, num_prefill_tokens=0, is_prefill_held_back=False)
    assert times.decode_step_s == pytest.approx(0.2, rel=0.01)
