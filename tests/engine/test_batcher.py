"""The batcher: its bounds in steps, its invariants under any history."""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas.engine.batcher import AGEING_STEPS
from prfaas.engine.options import EngineOptions
from prfaas.errors import BadRequest, ConfigError, Overloaded
from tests.engine.batching import BLOCK, Engine

# ---------------------------------------------------------------- any history


class AnyHistory(RuleBasedStateMachine):
    @initialize(
        chunk_blocks=st.integers(1, 5),
        mixed_tokens=st.integers(1, 5 * BLOCK),
        max_batch=st.integers(1, 4),
        kv_tokens=st.integers(60, 1500),
        constant_bytes=st.sampled_from([0, 10]),
        saves=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    )
    def start(
        self, chunk_blocks, mixed_tokens, max_batch, kv_tokens, constant_bytes, saves
    ) -> None:
        self.engine = Engine(
            chunk_tokens=chunk_blocks * BLOCK,
            mixed_chunk_tokens=mixed_tokens,
            max_batch=max_batch,
            kv_tokens=kv_tokens,
            max_waiting=5,
            constant_bytes=constant_bytes,
            saves=itertools.cycle(saves),
        )

    @rule(
        prompt=st.integers(1, 80),
        completion=st.sampled_from([1, 2, 30, 400]),
        hit_blocks=st.integers(0, 20),
        is_transferred=st.booleans(),
        num_choices=st.sampled_from([1, 1, 2, 5]),
    )
    def submit(self, prompt, completion, hit_blocks, is_transferred, num_choices) -> None:
        ready = prompt if is_transferred else min(hit_blocks, (prompt - 1) // BLOCK) * BLOCK
        needed = self.engine.kv_bytes(prompt + completion - 1)
        never_admitted = len(self.engine.ready)
        try:
            self.engine.add(prompt, completion, ready=ready, num_choices=num_choices)
        except BadRequest:
            assert needed > self.engine.options.kv_ram_bytes
        except Overloaded:
            assert never_admitted >= self.engine.options.max_waiting_requests
        else:
            assert needed <= self.engine.options.kv_ram_bytes

    @precondition(lambda self: self.engine.known)
    @rule(num_steps=st.sampled_from([1, 1, 3, 20]))
    def step(self, num_steps) -> None:
        for _ in range(num_steps):
            self.engine.step()

    @rule(share=st.sampled_from([0.1, 0.5, 1.0]))
    def set_prefill_share(self, share) -> None:
        self.engine.batcher.set_prefill_share(share)

    @precondition(lambda self: self.engine.known)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.known))))

    @invariant()
    def counts_are_right(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.saves = itertools.repeat(4)
            self.engine.run_until_idle(self.engine.num_steps + 20_000)
            assert self.engine.batcher.used_bytes == 0
            assert self.engine.batcher.num_remaining_tokens == 0


TestAnyHistory = pytest.mark.slow(AnyHistory.TestCase)
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# ---------------------------------------------------------------- fairness, in steps


def test_tokens_drawn_elsewhere_get_their_room_before_they_are_computed():
    """More of them than the headroom that a prompt is admitted with."""
    engine = Engine(kv_tokens=200)
    older, younger = engine.add(10, 161), engine.add(20, 60)
    engine.step()
    engine.step()
    engine.known[older] = 160
    engine.batcher.known(older, 160)
    plan = engine.step()
    assert plan.preempted == (younger,)
    assert [(grown.key, grown.capacity_tokens) for grown in plan.grown] == [(older, 170)]
    while older in engine.known:
        engine.step()


def test_a_long_prompt_does_not_block_short_ones():
    engine = Engine(chunk_tokens=576 // 16 * BLOCK, max_batch=8)
    engine.add(100_000)
    engine.step()
    shorts = [engine.add(4) for _ in range(20)]
    for _ in range(3):
        engine.step()
    assert all(engine.first_token_step[key] <= 4 for key in shorts)


@settings(deadline=None)
@given(
    longs=st.lists(st.integers(200, 5000), min_size=1, max_size=12),
    gap_steps=st.integers(0, 6),
    short=st.integers(1, 100),
    chunk_blocks=st.integers(4, 12),
    max_batch=st.integers(2, 6),
)
def test_a_short_prompt_is_served_within_a_bound_that_long_prompts_do_not_move(
    longs, gap_steps, short, chunk_blocks, max_batch
):
    """Even if every place in the batch was taken by a half-prefilled prompt before it came."""
    chunk = chunk_blocks * BLOCK
    engine = Engine(chunk_tokens=chunk, max_batch=max_batch)
    for length in sorted(longs, reverse=True):  # each displaces the one before: the worst order
        engine.add(length)
        for _ in range(gap_steps):
            engine.step()
    arrival = engine.num_steps
    ahead = sum(n for n in engine.remaining().values() if n <= short)  # nearly done by now
    key = engine.add(short)
    # The oldest takes a quarter and what credit it saved, rounding takes less than a block a step.
    num_steps = -(-(ahead + short + chunk) // (chunk * 3 // 4 - BLOCK + 1))
    while key not in engine.first_token_step:
        engine.step()
        assert engine.num_steps - arrival <= num_steps


def test_a_step_in_which_sequences_decode_has_only_so_much_prefill():
    engine = Engine(chunk_tokens=16 * BLOCK, mixed_chunk_tokens=3 * BLOCK + 1)
    engine.add(1, 21)
    engine.step()
    engine.add(100 * BLOCK)
    plans = [engine.step() for _ in range(22)]
    blocks = [sum(grant.num_tokens for grant in plan.prefills) / BLOCK for plan in plans]
    assert [bool(plan.decodes) for plan in plans] == [True] * 20 + [False] * 2
    assert blocks == [3] * 20 + [16] * 2


@pytest.mark.parametrize(
    ("device", "asked", "chunk_tokens", "most"),
    [
        ("cpu", None, 576, 128),
        ("cpu", None, 64, 64),
        ("cpu", 512, 576, 512),
        ("cuda", None, 576, 576),
        ("cuda", 64, 576, 64),
    ],
)
def test_the_chunk_beside_decodes_is_small_on_a_cpu_and_never_above_a_chunk(
    device, asked, chunk_tokens, most
):
    options = EngineOptions(device=device, mixed_chunk_tokens=asked, chunk_tokens=chunk_tokens)
    assert options.most_mixed_tokens == most


def test_one_block_a_step_still_serves_short_prompts_soon():
    engine = Engine(chunk_tokens=BLOCK, max_batch=4)
    engine.add(10_000)
    for _ in range(9):
        engine.step()
    short = engine.add(3 * BLOCK)
    for _ in range(5):
        engine.step()
    assert short in engine.first_token_step


@settings(deadline=None)
@given(
    long=st.integers(50, 2000),
    short=st.integers(1, 40),
    completion=st.integers(1, 20),
    chunk_blocks=st.integers(1, 8),
    mixed_tokens=st.integers(1, 8 * BLOCK),
    max_batch=st.integers(2, 5),
)
def test_endless_short_prompts_do_not_starve_a_long_one(
    long, short, completion, chunk_blocks, mixed_tokens, max_batch
):
    chunk = chunk_blocks * BLOCK
    engine = Engine(chunk_tokens=chunk, mixed_chunk_tokens=mixed_tokens, max_batch=max_batch)
    for _ in range(max_batch):
        engine.add(short, completion)
    older = engine.batcher.num_remaining_tokens
    key = engine.add(long)
    # A quarter of a chunk beside decodes, at least of one block, goes to the oldest; before it come
    # the older ones, and the answer that holds the place it gets.
    share = max(BLOCK, min(chunk, mixed_tokens)) / 4
    bound = (older + long + 2 * BLOCK * (max_batch + 1)) / share + max_batch * completion + 8
    while key not in engine.first_token_step:
        while engine.batcher.num_waiting < 12:  # more short ones than can ever be served
            engine.add(short, completion)
        engine.step()
        assert engine.num_steps <= bound


@settings(deadline=None, max_examples=30)
@given(shorts=st.integers(1, 3), completion=st.integers(1, 30), long=st.integers(500, 900))
def test_short_prompts_do_not_keep_memory_from_a_long_one_for_ever(shorts, completion, long):
    engine = Engine(kv_tokens=1000, max_batch=50, chunk_tokens=64)
    for _ in range(40):
        engine.add(20, completion)
    engine.step()
    key = engine.add(long)
    steps_to_drain = AGEING_STEPS + completion + 40 * 20 // 16
    for _ in range(steps_to_drain + 4 * (long // 16 + 2)):
        for _ in range(shorts):
            if engine.batcher.num_waiting < 20:
                engine.add(20, completion)
        engine.step()
        if key in engine.first_token_step:
            break
    assert key in engine.first_token_step


def test_a_long_prompt_that_memory_cannot_take_does_not_block_short_ones_at_once():
    engine = Engine(kv_tokens=1000, max_batch=8, chunk_tokens=64)
    engine.add(30, 600)
    engine.step()
    engine.add(700)
    for _ in range(AGEING_STEPS // 2):
        key = engine.add(10)
        engine.step()
        assert key in engine.first_token_step


# ---------------------------------------------------------------- preemption


def test_the_youngest_is_preempted_when_a_sequence_cannot_grow():
    engine = Engine(kv_tokens=700, max_batch=4, chunk_tokens=64)
    old, young = engine.add(8, 600), engine.add(8, 600)
    preempted: list[int] = []
    while old in engine.known:
        preempted += engine.step().preempted
    assert set(preempted) == {young}
    engine.run_until_idle(3000)


def test_a_preempted_sequence_goes_on_where_its_pages_end():
    engine = Engine(kv_tokens=700, max_batch=4, chunk_tokens=64)
    engine.add(8, 500)
    young = engine.add(8, 500)
    while not (plan := engine.step()).preempted:
        pass
    assert plan.preempted == (young,)
    saved = engine.ready[young]
    assert saved == engine.known[young] - 1
    while young not in engine.capacity:
        plan = engine.step()
    grants = [grant for grant in plan.prefills if grant.key == young]
    assert [(grant.start, grant.num_tokens) for grant in grants] == [(saved, 1)]


def test_choices_that_find_no_room_wait_and_finish():
    engine = Engine(max_batch=2, chunk_tokens=16)
    engine.add(9, 5, num_choices=5)
    engine.step()
    assert engine.batcher.num_running == 2
    assert engine.batcher.num_waiting == 3
    engine.run_until_idle(60)


# ---------------------------------------------------------------- refusals


def test_what_can_never_fit_is_refused_with_both_numbers():
    engine = Engine(kv_tokens=99)
    with pytest.raises(BadRequest, match=r"100 bytes.*limit is 99"):
        engine.add(90, 11)
    engine.add(90, 10)
    engine.run_until_idle(100)


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 150))
def test_the_most_tokens_of_a_sequence_are_those_that_are_not_refused(budget, limit, constant):
    engine = Engine(kv_tokens=budget, constant_bytes=constant)
    most = engine.batcher.max_kv_tokens(limit)
    assert most == max((n for n in range(1, limit + 1) if engine.kv_bytes(n) <= budget), default=0)


def test_an_answer_that_has_begun_is_let_into_a_full_queue():
    engine = Engine(max_waiting=1)
    engine.add(5)
    engine.batcher.add(99, num_tokens=5, num_computed=5, max_kv_tokens=5, has_begun=True)
    assert engine.batcher.num_waiting == 2


def test_a_full_queue_is_overloaded():
    engine = Engine(max_waiting=2)
    engine.add(5)
    engine.add(5)
    with pytest.raises(Overloaded, match="2 requests are waiting; the limit is 2"):
        engine.add(5)
    engine.step()
    engine.add(5)


def test_a_chunk_that_is_no_multiple_of_the_block_is_a_config_error():
    with pytest.raises(ConfigError, match="30 is not a multiple of the block: 4"):
        Engine(chunk_tokens=30)


def test_the_batcher_loads_no_torch():
    code = "import sys, prfaas.engine.batcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
