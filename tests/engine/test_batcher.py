"""The batcher: its bounds in steps, its invariants under any history."""

import itertools
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas.engine.batcher import AGEING_STEPS, Batcher, StepPlan
from prfaas.engine.options import EngineOptions
from prfaas.errors import BadRequest, ConfigError, Overloaded

BLOCK = 4


class Engine:
    """Carries out plans in token counts, and keeps its own account of everything."""

    def __init__(
        self,
        *,
        chunk_tokens: int = 16,
        max_batch: int = 4,
        kv_tokens: int = 10**9,
        max_waiting: int = 10**6,
        constant_bytes: int = 0,
        saves: Iterator[int] | None = None,
    ) -> None:
        self.options = EngineOptions(
            chunk_tokens=chunk_tokens,
            max_batch_sequences=max_batch,
            kv_ram_bytes=kv_tokens,
            max_waiting_requests=max_waiting,
        )
        self.constant_bytes = constant_bytes
        self.batcher = Batcher(options=self.options, block_tokens=BLOCK, kv_bytes=self.kv_bytes)
        self.keys = itertools.count()
        self.known: dict[int, int] = {}
        self.limit: dict[int, int] = {}
        """Known tokens at which a sequence ends."""
        self.ready: dict[int, int] = {}
        """Waiting sequence -> tokens that can be imported."""
        self.computed: dict[int, int] = {}
        self.capacity: dict[int, int] = {}
        """Running sequences."""
        self.num_forks: dict[int, int] = {}
        """Sequence -> choices that split off at the end of its prompt."""
        self.first_token_step: dict[int, int] = {}
        self.saves = saves or itertools.repeat(4)
        self.num_steps = 0

    def kv_bytes(self, num_tokens: int) -> int:
        return self.constant_bytes + num_tokens

    def add(self, prompt: int, completion: int = 1, *, ready: int = 0, num_choices: int = 1) -> int:
        key = next(self.keys)
        total = prompt + completion
        self.batcher.add(key, num_tokens=prompt, num_computed=ready, max_kv_tokens=total - 1)
        self.known[key], self.limit[key], self.ready[key] = prompt, total, ready
        self.num_forks[key] = num_choices - 1
        return key

    def abort(self, key: int) -> None:
        self.batcher.remove(key)
        self.forget(key)

    def forget(self, key: int) -> None:
        del self.known[key], self.limit[key], self.num_forks[key]
        for state in (self.ready, self.computed, self.capacity):
            state.pop(key, None)

    def step(self) -> StepPlan:
        decoding = {k for k, n in self.computed.items() if self.known[k] - n == 1}
        plan = self.batcher.plan()
        assert decoding - set(plan.preempted) == {grant.key for grant in plan.decodes}
        self.num_steps += 1
        for key in plan.preempted:
            self.move_out(key)
        for reservation in plan.admitted:
            self.capacity[reservation.key] = reservation.capacity_tokens
            self.computed[reservation.key] = self.ready.pop(reservation.key)
            if self.computed[reservation.key] == self.known[reservation.key]:
                self.draw(reservation.key)
        for reservation in plan.grown:
            assert reservation.capacity_tokens > self.capacity[reservation.key]
            self.capacity[reservation.key] = reservation.capacity_tokens
        self.check_plan(plan)
        for grant in (*plan.decodes, *plan.prefills):
            key, end = grant.key, grant.start + grant.num_tokens
            assert end <= self.capacity[key]
            self.computed[key] = end
            self.batcher.computed(key, end)
            if end == self.known[key]:
                self.draw(key)
        self.check()
        return plan

    def move_out(self, key: int) -> None:
        """Save all, all whole blocks, or nothing, as the pool has room."""
        computed = self.computed.pop(key)
        saved = {4: computed, 3: computed, 2: computed // BLOCK * BLOCK}.get(next(self.saves), 0)
        del self.capacity[key]
        self.ready[key] = saved
        self.batcher.stored(key, saved)

    def draw(self, key: int) -> None:
        num_forks, self.num_forks[key] = self.num_forks[key], 0
        prompt = self.known[key]
        self.first_token_step.setdefault(key, self.num_steps)
        for _ in range(num_forks):
            child = next(self.keys)
            saved = (prompt - 1) // BLOCK * BLOCK
            self.known[child], self.limit[child] = prompt + 1, self.limit[key]
            self.num_forks[child] = 0
            capacity = self.batcher.fork(key, child, num_tokens=prompt + 1, num_saved=saved)
            if capacity is None:
                self.ready[child] = saved
            else:
                self.capacity[child], self.computed[child] = capacity, prompt
            self.end_or_go_on(child)
        self.known[key] += 1
        self.batcher.known(key, self.known[key])
        self.end_or_go_on(key)

    def end_or_go_on(self, key: int) -> None:
        if self.known[key] >= self.limit[key]:
            self.abort(key)

    def check_plan(self, plan: StepPlan) -> None:
        granted = {grant.key: grant for grant in plan.prefills}
        assert len(granted) == len(plan.prefills)
        assert all(grant.num_tokens == 1 for grant in plan.decodes)
        for key, grant in granted.items():
            end = grant.start + grant.num_tokens
            assert grant.start == self.computed[key] < end <= self.known[key]
            assert end == self.known[key] or end % BLOCK == 0
        num_prefill = sum(grant.num_tokens for grant in plan.prefills)
        assert num_prefill <= max(BLOCK, self.options.chunk_tokens - len(plan.decodes))
        if self.known:
            assert plan.decodes or plan.prefills or plan.admitted, "nothing moves"

    def check(self) -> None:
        self.batcher.check()
        used = sum(self.kv_bytes(capacity) for capacity in self.capacity.values())
        assert self.batcher.used_bytes == used <= self.options.kv_ram_bytes
        assert self.batcher.num_running == len(self.capacity) <= self.options.max_batch_sequences
        assert self.batcher.num_waiting == len(self.ready)
        assert self.batcher.num_remaining_tokens == sum(self.remaining().values())

    def remaining(self) -> dict[int, int]:
        return {k: n - {**self.computed, **self.ready}[k] for k, n in self.known.items()}

    def run_until_idle(self, max_steps: int) -> None:
        while self.known:
            self.step()
            assert self.num_steps < max_steps, "does not come to an end"


# ---------------------------------------------------------------- any history


class AnyHistory(RuleBasedStateMachine):
    @initialize(
        chunk_blocks=st.integers(1, 5),
        max_batch=st.integers(1, 4),
        kv_tokens=st.integers(60, 1500),
        constant_bytes=st.sampled_from([0, 10]),
        saves=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    )
    def start(self, chunk_blocks, max_batch, kv_tokens, constant_bytes, saves) -> None:
        self.engine = Engine(
            chunk_tokens=chunk_blocks * BLOCK,
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
    max_batch=st.integers(2, 5),
)
def test_endless_short_prompts_do_not_starve_a_long_one(
    long, short, completion, chunk_blocks, max_batch
):
    chunk = chunk_blocks * BLOCK
    engine = Engine(chunk_tokens=chunk, max_batch=max_batch)
    for _ in range(max_batch):
        engine.add(short, completion)
    older = engine.batcher.num_remaining_tokens
    key = engine.add(long)
    # A quarter of what decoding leaves, at least of one block, goes to the oldest; before it come
    # the older ones, and the answer that holds the place it gets.
    share = max(BLOCK, chunk - max_batch) / 4
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
