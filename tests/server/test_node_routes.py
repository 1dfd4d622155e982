"""A scheduler has a node answer: line by line, signed, aborted when the scheduler leaves."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from aiohttp import web

from prfaas.clock import monotonic_s
from prfaas.errors import (
    BadRequest,
    EngineError,
    IncompatiblePeer,
    Overloaded,
    PromptRefused,
    UntrustedPeer,
)
from prfaas.server import node_routes
from prfaas.server.directions import Directions
from prfaas.server.generation import RunningGeneration
from prfaas.server.lifecycle import Lifecycle
from prfaas.server.merging import MAX_QUEUED
from prfaas.server.metrics import Metrics
from prfaas.server.node_routes import NodeRoutes
from prfaas.server.records import RecordRing
from prfaas.transport.address import parse_address
from prfaas.transport.auth import PeerSide
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.fleet_messages import (
    GENERATE_PATH,
    STOP_PATH,
    Alive,
    Ended,
    GenerateLine,
    GenerateRequest,
    Logits,
    Refused,
    StopChoice,
    Story,
    encode_generate_request,
    encode_stop_choice,
    parse_generate_request,
    parse_line,
)
from prfaas.transport.gate import Gate
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.signed_http import AnswerLines, SignedHttp
from prfaas.types import Request, SamplingParams, TokenEvent
from tests.accepting import accept_no_more
from tests.server.fake_node import FakeGeneration, FakeNode
from tests.server.http_face import until

KEY = ClusterKey(b"k" * 32)
PATIENT = TransportOptions(connect_timeout_s=20.0, stall_timeout_s=20.0)


class Generation(FakeGeneration):
    hit_tokens = 3
    route_outcome = "completed"


class DirectedFakeNode(FakeNode):
    """Also notes what it is directed to."""

    def __init__(self, script: str = "Hello, world!") -> None:
        super().__init__(script)
        self.gate = Gate(None)
        self.directions: list[Directions | None] = []
        self.drawn: list[tuple[tuple[int, ...], ...]] = []

    @contextlib.asynccontextmanager
    async def generate(  # type: ignore[override]
        self,
        request: Request,
        *,
        return_logits: bool = False,
        directions: Directions | None = None,
        drawn_tokens: tuple[tuple[int, ...], ...] = (),
    ) -> AsyncIterator[Generation]:
        self.directions.append(directions)
        self.drawn.append(drawn_tokens)
        async with super().generate(request) as generation:
            told = Generation(self, request, generation._drawn)
            if return_logits:
                told.first_logits = b"\0" * 8
            yield told


@dataclass
class Host:
    node: DirectedFakeNode
    http: SignedHttp
    lifecycle: Lifecycle
    metrics: Metrics
    records: RecordRing

    def asked(self, num_choices: int = 1, **fields: Any) -> GenerateRequest:
        request = Request(
            request_id="r1",
            prompt_tokens=tuple(range(20)),
            sampling=SamplingParams(max_tokens=6, seed=1),
            num_choices=num_choices,
        )
        return GenerateRequest(
            **{"identity": self.node.identity, "request": request, "reason": "short", **fields}
        )

    def lines(self, asked: GenerateRequest) -> contextlib.AbstractAsyncContextManager[AnswerLines]:
        return self.http.lines(
            GENERATE_PATH,
            encode_generate_request(asked),
            self.node.identity,
            silence_s=20.0,
            max_line_bytes=1 << 20,
        )

    async def answer(self, asked: GenerateRequest) -> list[GenerateLine]:
        """Every line but those that only say that it is alive."""
        told = []
        async with self.lines(asked) as lines:
            while (text := await lines.next()) is not None:
                told.append(parse_line(text, asked.request))
        return [line for line in told if line != Alive()]


@contextlib.asynccontextmanager
async def host(
    key: ClusterKey | None = None,
    asker_key: ClusterKey | None = KEY,
    node: DirectedFakeNode | None = None,
) -> AsyncIterator[Host]:
    node = node or DirectedFakeNode()
    lifecycle, metrics, records = Lifecycle(), Metrics(), RecordRing()
    if key is not None:
        node.gate = Gate(PeerSide(key, identity=node.identity, epoch="e" * 64))
    routes = NodeRoutes(
        node,
        lifecycle=lifecycle,
        metrics=metrics,
        records=records,
        clock=monotonic_s,
        write_timeout_s=20.0,
    )
    lifecycle.start_serving(lambda: node.is_ready)
    app = web.Application()
    app.add_routes([*node.gate.routes(), *routes.routes()])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    security = ChannelSecurity(cluster_key=None if key is None else asker_key)
    http = SignedHttp(parse_address(f"127.0.0.1:{runner.addresses[0][1]}"), PATIENT, security)
    try:
        async with asyncio.timeout(60):
            yield Host(node, http, lifecycle, metrics, records)
            await until(lambda: not node.num_running and not lifecycle.num_inside)
    finally:
        await http.close()
        await accept_no_more(site._server)
        await runner.cleanup()


@pytest.mark.parametrize("key", [None, KEY])
async def test_an_answer_is_its_story_its_tokens_and_its_end(key):
    async with host(key) as at:
        asked = at.asked(num_choices=2, return_logits=True)
        story, logits, *events, ended = await at.answer(asked)
    assert isinstance(story, Story)
    assert (story.record.route, story.record.tokens_remote) == ("remote", 19)
    assert logits == Logits(b"\0" * 8)
    expected = at.node._cut(asked.request, at.node.script(asked.request)[0])
    for choice in range(2):
        mine = [e for e in events if isinstance(e, TokenEvent) and e.choice_index == choice]
        assert [e.token_id for e in mine] == expected
        assert [e.finish_reason for e in mine] == [None] * (len(expected) - 1) + ["length"]
    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.hit_tokens) == ("completed", 3)


async def test_the_last_token_and_the_end_come_in_one_write(monkeypatch):
    written: list[int] = []
    write = node_routes._Lines._write

    async def noted(self, *, is_last=False):
        written.append(len(self._waiting))
        await write(self, is_last=is_last)

    monkeypatch.setattr(node_routes._Lines, "_write", noted)
    async with host() as at:
        await at.answer(at.asked())
    assert written == [2, 1, 1, 1, 1, 2]  # story and first token ... last token and end


async def test_a_long_request_is_read_beside_the_loop(monkeypatch):
    threads = []
    parse = parse_generate_request

    def noted(body: bytes) -> GenerateRequest:
        threads.append(threading.current_thread())
        return parse(body)

    monkeypatch.setattr(node_routes, "parse_generate_request", noted)
    async with host() as at:
        for limit in (1 << 17, 100):
            monkeypatch.setattr(node_routes, "INLINE_BYTES", limit)
            await at.answer(at.asked())
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [True, False]


async def test_the_node_is_directed_and_continues_what_others_drew():
    async with host() as at:
        await at.answer(
            at.asked(
                prefill_at="10.0.0.9:8100",
                reason="long",
                predicted_ttft_s=0.25,
                prefix_from="10.0.0.8:8000",
                prefix_tokens=7,
                drawn_tokens=((5, 6),),
            )
        )
    assert at.node.directions == [
        Directions(
            prefill_at="10.0.0.9:8100",
            reason="long",
            predicted_ttft_s=0.25,
            prefix_from="10.0.0.8:8000",
            prefix_tokens=7,
        )
    ]
    assert at.node.drawn == [((5, 6),)]


async def test_the_story_counts_and_can_be_asked_for():
    async with host() as at:
        await at.answer(at.asked())
        record = at.records.get("r1")
        assert record is not None
        assert record.reason == "above_threshold"
        text = at.metrics.render().decode()
    assert 'prfaas_requests_total{reason="above_threshold",route="remote"} 1.0' in text
    assert "prfaas_itl_seconds_count 5.0" in text


async def test_a_node_that_has_nothing_to_say_says_that_it_is_alive(monkeypatch):
    monkeypatch.setattr(node_routes, "ALIVE_S", 0.01)
    async with host() as at:
        at.node.hold_at = 0
        async with at.lines(at.asked()) as lines:
            for _ in range(2):
                text = await lines.next()
                assert text is not None
                assert parse_line(text, at.asked().request) == Alive()
            at.node.fail_at = (0, Overloaded("no room", retry_after_s=2.0))
            at.node.release.set()
            told = []
            while (text := await lines.next()) is not None:
                told.append(parse_line(text, at.asked().request))
        assert told[-1] == Refused(kind="overloaded", message="no room", retry_after_s=2.0)


class _RunningNode(DirectedFakeNode):
    """Gives a generation that the test has drawn into."""

    def __init__(self, draw: Callable[[RunningGeneration], None]) -> None:
        super().__init__()
        self.draw = draw
        self.generation: RunningGeneration | None = None

    @contextlib.asynccontextmanager
    async def generate(  # type: ignore[override]
        self, request: Request, **_options: Any
    ) -> AsyncIterator[RunningGeneration]:
        self.generation = RunningGeneration(request, clock=monotonic_s)
        self.draw(self.generation)
        yield self.generation


def drawn(choice: int, token_id: int = 7) -> TokenEvent:
    return TokenEvent(request_id="r1", choice_index=choice, token_id=token_id)


async def test_a_stop_of_all_that_is_left_does_not_silence_the_node(monkeypatch):
    monkeypatch.setattr(node_routes, "ALIVE_S", 0.01)

    def draw(generation: RunningGeneration) -> None:
        generation.put(drawn(1))
        for _ in range(3 * MAX_QUEUED):
            generation.put(drawn(0))

    node = _RunningNode(draw)

    async def stop_at_a_turn() -> None:
        """Stop the choice when the answer has given the loop its first turn."""
        await until(lambda: node.generation and node.generation.record.completion_tokens)
        assert node.generation is not None
        node.generation.stop_choice(0)

    async with host(node=node) as at, asyncio.TaskGroup() as tasks:
        tasks.create_task(stop_at_a_turn())
        asked = at.asked(num_choices=2)
        async with at.lines(asked) as lines:
            seen: list[GenerateLine] = []
            while Alive() not in seen:  # waits for ever if it does not come
                text = await lines.next()
                assert text is not None
                seen.append(parse_line(text, asked.request))
            assert drawn(1) in seen
            assert node.generation is not None
            node.generation.put(replace(drawn(1, 8), finish_reason="length"))
            rest = []
            while (text := await lines.next()) is not None:
                rest.append(parse_line(text, asked.request))
    *alive, last, ended = rest
    assert all(line == Alive() for line in alive)
    assert last == replace(drawn(1, 8), finish_reason="length")
    assert isinstance(ended, Ended)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineError("dead"), "engine_error"),
        (Overloaded("dead", retry_after_s=1.0), "overloaded"),
        (BadRequest("dead"), "bad_request"),
    ],
)
async def test_what_was_drawn_before_an_error_is_told_before_it(error, kind):
    def draw(generation: RunningGeneration) -> None:
        for token_id in range(3):
            generation.put(drawn(0, token_id))
        generation.fail(error)

    async with host(node=_RunningNode(draw)) as at:
        story, *events, last = await at.answer(at.asked())
    assert isinstance(story, Story)
    assert events == [drawn(0, token_id) for token_id in range(3)]
    assert isinstance(last, Refused)
    assert (last.kind, last.message) == (kind, "dead")


async def test_a_scheduler_that_leaves_ends_the_work():
    async with host() as at:
        at.node.hold_at = 2
        async with at.lines(at.asked()) as lines:
            assert await lines.next() is not None
            await at.node.is_holding.wait()
            assert at.node.num_running == 1
            lines._response.close()
        await until(lambda: not at.lifecycle.num_inside)
        assert at.node.num_aborted == 1
        assert (
            'prfaas_request_failures_total{reason="cancelled"} 1.0' in at.metrics.render().decode()
        )


async def test_a_choice_ends_when_it_is_told_to_and_the_others_go_on():
    async with host(KEY) as at:
        at.node.hold_at = 1
        asked = at.asked(num_choices=3, ended_choices=(2,))
        async with at.lines(asked) as lines:
            await at.node.is_holding.wait()
            stop = StopChoice(request_id="r1", choice_index=1)
            await at.http.post(STOP_PATH, encode_stop_choice(stop), at.node.identity)
            await at.http.post(
                STOP_PATH, encode_stop_choice(replace(stop, request_id="r2")), at.node.identity
            )
            await at.http.post(
                STOP_PATH, encode_stop_choice(replace(stop, choice_index=9)), at.node.identity
            )
            at.node.release.set()
            told = []
            while (text := await lines.next()) is not None:
                told.append(parse_line(text, asked.request))
    numbers = [
        sum(isinstance(line, TokenEvent) and line.choice_index == choice for line in told)
        for choice in range(3)
    ]
    assert numbers == [6, 1, 0]
    assert isinstance(told[-1], Ended)
    assert set(at.node.stopped_choices) == {("r1", 1), ("r1", 2)}


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (BadRequest("too long"), PromptRefused),
        (Overloaded("converting", retry_after_s=3.0), Overloaded),
    ],
)
async def test_what_is_refused_at_once_has_a_status(error, raised):
    async with host() as at:
        at.node.fail_before = error
        with pytest.raises(raised, match=str(error)):
            await at.answer(at.asked())


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (EngineError("the engine is dead"), "engine_error", "the engine is dead"),
        (RuntimeError("secret"), "engine_error", "internal error"),
        (BadRequest("late", code="c"), "bad_request", "late"),
    ],
)
async def test_what_fails_later_is_the_last_line(error, kind, message):
    async with host() as at:
        at.node.fail_at = (2, error)
        *_, last = await at.answer(at.asked())
        assert isinstance(last, Refused)
        assert (last.kind, last.message) == (kind, message)


async def test_a_draining_node_finishes_what_it_has_and_takes_nothing_new():
    async with host() as at:
        at.node.hold_at = 1
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(at.answer(at.asked()))
            await at.node.is_holding.wait()
            at.lifecycle.start_draining()
            assert at.lifecycle.num_inside == 1
            with pytest.raises(Overloaded, match="draining"):
                await at.answer(at.asked())
            at.node.release.set()
        assert isinstance(running.result()[-1], Ended)


async def test_the_same_request_does_not_run_twice_at_once():
    async with host() as at:
        at.node.hold_at = 1
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(at.answer(at.asked()))
            await at.node.is_holding.wait()
            with pytest.raises(Overloaded, match="runs here already"):
                await at.answer(at.asked())
            at.node.release.set()


async def test_a_scheduler_that_takes_the_node_for_another_is_refused():
    async with host() as at:
        other = replace(at.node.identity, numerics_fingerprint="other")
        with pytest.raises(IncompatiblePeer, match=r"'n' here, 'other' there"):
            await at.answer(at.asked(identity=other))


@pytest.mark.parametrize("asker_key", [None, ClusterKey(b"x" * 32)])
async def test_who_has_not_the_key_gets_nothing(asker_key):
    async with host(KEY, asker_key) as at:
        with pytest.raises(UntrustedPeer):
            await at.answer(at.asked())
        stop = encode_stop_choice(StopChoice(request_id="r1", choice_index=0))
        with pytest.raises(UntrustedPeer):
            await at.http.post(STOP_PATH, stop, at.node.identity)
        assert not at.node.requests
