"""One thread steps the engine; nobody waits for anybody, and a dead engine is no secret."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator

import pytest
import structlog

from prfaas.engine.submission import EngineEvent, Submission
from prfaas.errors import BadRequest, EngineError, Overloaded
from prfaas.server.engine_thread import MAX_STEP_S, EngineStream, EngineThread
from prfaas.types import Request, RequestEnded, TokenEvent
from tests.server.fleet import make_cache, request, until
from tests.server.scripted_engine import DENSE, VOCAB_SIZE, ScriptedEngine

pytestmark = pytest.mark.usefixtures("no_leaks")


class Bench:
    """An engine thread over a scripted engine."""

    def __init__(self) -> None:
        self.cache = make_cache(DENSE)
        self.engine = ScriptedEngine(self.cache)
        self.now_s = 0.0
        self.thread = EngineThread(self.engine, clock=lambda: self.now_s)

    def submit(self, asked: Request) -> EngineStream:
        keys = self.cache.block_keys(asked.prompt_tokens, asked.cache_salt)
        table = self.cache.lookup(keys, len(asked.prompt_tokens))
        return self.thread.submit(Submission(request=asked, table=table))

    def assert_nothing_is_held(self) -> None:
        self.cache.check()
        assert self.cache.counts().num_tables == 0


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.thread.start()
    try:
        async with asyncio.timeout(30):
            yield bench
    finally:
        bench.engine.gate.set()
        await bench.thread.stop()
        bench.assert_nothing_is_held()


async def drain(stream: EngineStream) -> list[EngineEvent]:
    return [event async for event in stream]


async def test_events_come_in_order_and_end_once():
    async with running() as bench:
        events = await drain(bench.submit(request(40, max_tokens=5)))
        assert [type(event) for event in events] == [TokenEvent] * 5 + [RequestEnded]
        assert isinstance(events[-1], RequestEnded)
        assert events[-1].num_tokens_computed == 40
        bench.assert_nothing_is_held()


async def test_many_requests_at_once_get_their_own_events():
    async with running() as bench:
        asked = [request(30, variant=variant, max_tokens=4) for variant in range(20)]
        streams = [bench.submit(one) for one in asked]
        for one, stream in zip(asked, streams, strict=True):
            events = await drain(stream)
            assert {event.request_id for event in events} == {one.request_id}
            assert len(events) == 5


async def test_a_consumer_that_does_not_read_delays_nobody():
    async with running() as bench:
        unread = bench.submit(request(40, max_tokens=300))
        assert len(await drain(bench.submit(request(40, variant=1, max_tokens=300)))) == 301
        assert len(await drain(unread)) == 301


@pytest.mark.parametrize("kind", [Overloaded, BadRequest])
async def test_a_refusal_is_raised_by_the_iteration_and_holds_nothing(kind):
    async with running() as bench:
        bench.engine.is_full = kind is Overloaded
        tokens = (1, VOCAB_SIZE + 5) if kind is BadRequest else (1, 2)
        stream = bench.submit(request(prompt_tokens=tokens))
        with pytest.raises(kind):
            await drain(stream)
        bench.assert_nothing_is_held()
        bench.engine.is_full = False
        assert len(await drain(bench.submit(request(10, max_tokens=2)))) == 3


async def test_an_aborted_request_ends_and_the_others_go_on():
    async with running() as bench:
        bench.engine.gate.clear()
        left, kept = request(40, max_tokens=500), request(40, variant=1, max_tokens=50)
        left_stream, kept_stream = bench.submit(left), bench.submit(kept)
        bench.thread.abort(left.request_id)
        bench.engine.gate.set()
        assert isinstance((await drain(left_stream))[-1], RequestEnded)
        assert len(await drain(kept_stream)) == 51
        bench.thread.abort(left.request_id)
        bench.thread.abort("never heard of")


async def test_a_stopped_choice_has_no_further_events():
    async with running() as bench:
        asked = request(20, num_choices=2, max_tokens=400)
        stream = bench.submit(asked)
        num_events = [0, 0]
        async for event in stream:
            if isinstance(event, TokenEvent):
                num_events[event.choice_index] += 1
                if num_events == [1, 1]:
                    bench.thread.stop_choice(asked.request_id, 0)
        assert num_events[0] < num_events[1] == 400


async def test_a_crash_fails_every_request_and_says_so():
    async with running() as bench:
        bench.engine.gate.clear()
        streams = [bench.submit(request(40, variant=variant)) for variant in range(3)]
        assert bench.thread.is_ready == (True, "")
        bench.engine.crash_next = True
        with structlog.testing.capture_logs() as logs:
            bench.engine.gate.set()
            for stream in streams:
                with pytest.raises(EngineError, match="scripted crash"):
                    await drain(stream)
        assert [entry["event"] for entry in logs] == ["engine.failed"]
        assert bench.thread.is_ready == (False, "engine_failed: RuntimeError: scripted crash")
        with pytest.raises(EngineError, match="scripted crash"):
            bench.submit(request(10))
        bench.assert_nothing_is_held()


async def test_stopping_ends_what_runs_and_the_thread():
    async with running() as bench:
        streams = [bench.submit(request(40, variant=v, max_tokens=10**6)) for v in range(3)]
        await until(lambda: bench.thread.load().step_count > 5)
        await bench.thread.stop()
        for stream in streams:
            assert isinstance((await drain(stream))[-1], RequestEnded)
        assert bench.thread.is_ready == (False, "engine_stopped")
        with pytest.raises(EngineError, match="not running"):
            bench.submit(request(10))


async def test_a_name_that_runs_is_refused_and_holds_nothing():
    async with running() as bench:
        first = request(40, variant=1, max_tokens=10**6)
        stream = bench.submit(first)
        with pytest.raises(EngineError, match="runs here already"):
            bench.submit(first)
        bench.thread.abort(first.request_id)
        await drain(stream)
    bench.assert_nothing_is_held()


async def test_a_thread_that_never_started_stops_at_once():
    bench = Bench()
    await bench.thread.stop()
    assert bench.thread.is_ready == (False, "engine_stopped")
    with pytest.raises(EngineError, match="not running"):
        bench.submit(request(10))
    bench.assert_nothing_is_held()


async def test_a_step_that_does_not_end_makes_the_node_not_ready():
    async with running() as bench:
        bench.engine.gate.clear()
        stream = bench.submit(request(10, max_tokens=2))
        await until(lambda: bench.thread._step_began_s is not None)
        assert bench.thread.is_ready[0]
        bench.now_s += MAX_STEP_S + 1
        is_ready, why = bench.thread.is_ready
        assert not is_ready
        assert why.startswith("engine_stuck")
        bench.engine.gate.set()
        await drain(stream)
        assert bench.thread.is_ready == (True, "")


async def test_the_heartbeat_counts_layers_and_rests_when_the_engine_does():
    async with running() as bench:
        assert bench.thread.heartbeat()[0] == 0
        await drain(bench.submit(request(32, max_tokens=2)))
        assert bench.thread.heartbeat()[0] == 2 * 3
        assert bench.thread.load().num_running == 0
        resting = bench.thread.heartbeat()
        await asyncio.sleep(0.1)
        assert bench.thread.heartbeat() == resting


@pytest.mark.skipif(sys.platform != "linux", reason="CPU time of a thread is read from /proc")
async def test_one_long_layer_is_a_sign_of_life(monkeypatch):
    async with running() as bench:
        is_done = threading.Event()

        def compute():
            while not is_done.is_set():
                sum(range(1000))
            return []

        monkeypatch.setattr(bench.engine, "step", compute)
        bench.submit(request(10, max_tokens=2))
        await until(lambda: bench.thread._step_began_s is not None)
        first = bench.thread.heartbeat()
        await until(lambda: bench.thread.heartbeat() != first)
        assert bench.thread.heartbeat()[0] == first[0]
        bench.now_s += MAX_STEP_S + 1
        assert bench.thread.is_ready == (True, "")
        monkeypatch.undo()
        is_done.set()


async def test_the_engine_hears_its_prefill_share_and_a_wrong_one_stays_outside():
    async with running() as bench:
        with pytest.raises(ValueError, match="a prefill share of 0"):
            bench.thread.set_prefill_share(0.0)
        bench.thread.set_prefill_share(0.25)
        await until(lambda: bench.engine.prefill_share == 0.25)
        assert bench.thread.is_ready == (True, "")
