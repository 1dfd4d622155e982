"""What a sender says of when it computed a prompt."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import pytest

from prfaas.server.prefill_job import JobsProgress, PrefillJob
from prfaas.transport.messages import PrefillTimes, parse_first_tokens
from prfaas.transport.wire import FrameType
from tests.server.fleet import fleet, make_cache
from tests.server.scripted_engine import BLOCK_TOKENS, HYBRID
from tests.server.test_prefill import Received, asked, client_of

if TYPE_CHECKING:
    from prfaas.cache.block_table import BlockTable

pytestmark = pytest.mark.usefixtures("no_leaks")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@contextlib.asynccontextmanager
async def jobs() -> AsyncIterator[tuple[Clock, Callable[[int], PrefillJob]]]:
    """Yield a clock and what makes a job of so many tokens now, all on one node."""
    cache, clock, all_jobs = make_cache(HYBRID), Clock(), JobsProgress()
    tables: list[BlockTable] = []

    def made(num_tokens: int) -> PrefillJob:
        request = asked(num_tokens, number=len(tables))
        tokens = request.request.prompt_tokens
        table = cache.lookup(cache.block_keys(tokens, b""), num_tokens)
        assert table.try_reserve(num_tokens)
        tables.append(table)
        return PrefillJob(
            asked=request, table=table, layout=cache.layout, clock=clock, all_jobs=all_jobs
        )

    try:
        yield clock, made
    finally:
        for table in tables:
            table.release()
        cache.check()
        cache.close()


async def test_times_count_from_the_transfer_s_beginning_and_leave_the_queue_out():
    async with jobs() as (clock, made):
        job = made(200)
        for now_s, num_tokens in ((1003.0, 0), (1004.0, 128), (1007.0, 200)):
            clock.now_s = now_s
            job.progress(num_tokens)
        clock.now_s = 1009.0
        assert job._times() == PrefillTimes(
            begun_s=3.0, computed_s=7.0, num_tokens=200, num_engine_tokens=200
        )


async def test_what_the_cache_had_was_not_computed_and_took_no_time():
    async with jobs() as (clock, made):
        job = made(200)
        clock.now_s = 1001.0
        job.progress(192)
        clock.now_s = 1001.5
        job.progress(200)
        assert job._times().num_tokens == job._times().num_engine_tokens == 8
        whole = made(100)
        whole.progress(100)
        assert whole._times() == PrefillTimes(
            begun_s=0.0, computed_s=0.0, num_tokens=0, num_engine_tokens=0
        )


async def test_prompts_that_are_computed_side_by_side_each_say_what_all_of_them_took():
    async with jobs() as (clock, made):
        first, second = made(200), made(100)
        first.progress(0)
        for now_s, job, num_tokens in (
            (1001.0, first, 64),
            (1001.0, second, 0),
            (1002.0, second, 100),
            (1003.0, first, 200),
        ):
            clock.now_s = now_s
            job.progress(num_tokens)
        assert first._times().num_engine_tokens == 300
        assert (second._times().num_tokens, second._times().num_engine_tokens) == (100, 100)


async def test_a_prompt_that_is_computed_again_does_not_count_twice():
    async with jobs() as (clock, made):
        job = made(200)
        for num_tokens in (0, 128, 64, 128, 200):
            clock.now_s += 1.0
            job.progress(num_tokens)
        times = job._times()
        assert (times.num_tokens, times.computed_s - times.begun_s) == (200, 4.0)
        assert times.num_engine_tokens >= 200


async def test_first_tokens_bring_the_times_to_whoever_asked():
    async with fleet() as nodes, client_of(nodes) as client:
        computed = []
        for number in range(2):  # the second time it is cached up to the last block
            request, received = asked(200, number=number, request=asked(200).request), Received()
            async with client.pull(request, received) as pulling:
                while not pulling.is_finished:
                    await pulling.step()
                assert pulling.acknowledge()
            (payload,) = (data for kind, data in received.frames if kind is FrameType.FIRST_TOKENS)
            times = parse_first_tokens(payload, request.request).times
            assert 0 <= times.begun_s <= times.computed_s
            computed.append(times.num_tokens)
        assert computed[0] == 200
        assert 0 < computed[1] <= BLOCK_TOKENS
