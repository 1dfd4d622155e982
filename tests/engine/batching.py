"""An engine that only counts: what tests of the batcher run plans on."""

import itertools
from collections.abc import Iterator

from prfaas.engine.batcher import Batcher
from prfaas.engine.options import EngineOptions
from prfaas.engine.step_plan import StepPlan

BLOCK = 4


class Engine:
    """Carries out plans in token counts, and keeps its own account of everything."""

    def __init__(
        self,
        *,
        chunk_tokens: int = 16,
        mixed_chunk_tokens: int | None = None,
        max_batch: int = 4,
        kv_tokens: int = 10**9,
        max_waiting: int = 10**6,
        constant_bytes: int = 0,
        saves: Iterator[int] | None = None,
    ) -> None:
        self.options = EngineOptions(
            chunk_tokens=chunk_tokens,
            mixed_chunk_tokens=mixed_chunk_tokens,
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
        limit = self.options.chunk_tokens
        if plan.decodes:
            limit = max(BLOCK, self.options.most_mixed_tokens)
        assert num_prefill <= limit
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
