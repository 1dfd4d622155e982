"""A request is relayed whole, and a node that fails in any way costs time, never a token."""

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from prfaas.cache.changes import CacheSnapshot
from prfaas.errors import BadRequest, EngineError, IncompatiblePeer, Overloaded, PrfaasError
from prfaas.scheduler.placing import Placement
from prfaas.server import relay
from prfaas.server.generation import RunningGeneration
from prfaas.server.key_thread import INLINE_TOKENS
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.fleet_messages import Ended, GenerateRequest, Refused, encode_generate_request
from prfaas.types import Request, RequestRecord
from tests.server.fleet import Answer, request, until
from tests.server.fleet_nodes import (
    PATIENT,
    ScriptedFleet,
    ScriptedNode,
    drawn,
    scripted_fleet,
)

KEY = ClusterKey(b"0123456789abcdef")
MAX_TOKENS = 6


def expected(asked: Request) -> list[list[int]]:
    return [drawn(asked, choice) for choice in range(asked.num_choices)]


async def first_asked(fleet: ScriptedFleet, asked: Request) -> ScriptedNode:
    """Return the node that the request will go to first."""
    answer = (await fleet.scheduler.explain(asked)).answer
    assert isinstance(answer, Placement)
    (node,) = (node for node in fleet.nodes if node.name == answer.decode_at)
    return node


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "keyed"])
async def test_an_answer_is_relayed_and_tells_its_story(key):
    async with scripted_fleet(2, key=key) as fleet:
        for num_choices in (1, 3):
            asked = request(num_choices=num_choices, max_tokens=MAX_TOKENS)
            answer = await fleet.host.ask(asked)
            assert answer.tokens == expected(asked)
            assert answer.record.node in {node.name for node in fleet.nodes}
            assert answer.record.retries == 0
            assert answer.record.tokens_local == len(asked.prompt_tokens)
            assert answer.record.reason


def state(fleet: ScriptedFleet) -> str:
    (member,) = fleet.scheduler.members()
    return member.state


async def ended_with(answer: Awaitable[Answer]) -> PrfaasError | None:
    try:
        await answer
    except PrfaasError as error:
        return error
    return None


async def collect(fleet: ScriptedFleet, asked: Request, got: list[int]) -> None:
    async with fleet.scheduler.generate(asked) as generation:
        async for event in generation:
            got.append(event.token_id)


class Fault:
    def __init__(self, name: str, inject: Callable[[ScriptedNode, int], None]) -> None:
        self.name = name
        self.inject = inject


def _fault(**settings: Any) -> Callable[[ScriptedNode, int], None]:
    def inject(node: ScriptedNode, position: int) -> None:
        for name, value in settings.items():
            setattr(node, name, value(position))

    return inject


FAULTS = [
    Fault("dies", _fault(die_at=lambda position: position)),
    Fault("cut short", _fault(end_at=lambda position: position)),
    Fault("crashes", _fault(say_at=lambda p: (p, Refused(kind="engine_error", message="crash")))),
    Fault(
        "ends early",
        _fault(
            say_at=lambda p: (p, Ended(record=RequestRecord(request_id="r", prompt_tokens=100)))
        ),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_a_node_that_fails_is_continued_by_another(fault):
    async with scripted_fleet(2, key=KEY) as fleet:
        for position, num_choices in [(0, 1), (3, 1), (3, 2)]:
            asked = request(num_choices=num_choices, max_tokens=MAX_TOKENS)
            failing = await first_asked(fleet, asked)
            (other,) = (node for node in fleet.nodes if node is not failing)
            fault.inject(failing, position)
            answer = await fleet.host.ask(asked)
            assert answer.tokens == expected(asked)
            assert len(answer.events) == num_choices * MAX_TOKENS  # none twice
            assert (answer.record.node, answer.record.retries) == (other.name, 1)
            sent = tuple(tuple(tokens[:position]) for tokens in expected(asked))
            assert other.asked[-1].drawn_tokens == (sent if position else ())
            # What failed once is suspected until it is heard again.
            assert (await fleet.host.ask(request(max_tokens=2))).record.node == other.name
            failing.heal()
            await fleet.beat(failing)


@pytest.mark.parametrize("is_deaf", [False, True], ids=["within", "from the start"])
async def test_a_node_that_goes_silent_is_continued_by_another(is_deaf):
    async with scripted_fleet(2, options=replace(PATIENT, stall_timeout_s=1.0)) as fleet:
        asked = request(max_tokens=MAX_TOKENS)
        failing = await first_asked(fleet, asked)
        failing.hold_at, failing.is_silent, failing.is_deaf = 3, True, is_deaf
        answer = await fleet.host.ask(asked)
        assert answer.tokens == expected(asked)
        assert answer.record.retries == 1
        failing.release.set()


async def test_a_node_that_works_long_and_says_so_is_waited_for():
    async with scripted_fleet(1, options=replace(PATIENT, stall_timeout_s=1.0)) as fleet:
        (node,) = fleet.nodes
        node.hold_at = 3
        asked = request(max_tokens=MAX_TOKENS)
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(fleet.host.ask(asked))
            await asyncio.sleep(1.2)
            node.release.set()
        assert answer.result().tokens == expected(asked)
        assert answer.result().record.retries == 0


async def test_lines_that_nobody_signed_are_not_believed():
    async with scripted_fleet(2, key=KEY) as fleet:
        asked = request(max_tokens=MAX_TOKENS)
        forger = await first_asked(fleet, asked)
        forger.forges = True
        answer = await fleet.host.ask(asked)
        assert answer.tokens == expected(asked)
        assert answer.record.node != forger.name


async def test_a_full_node_is_passed_over_and_full_nodes_say_when_to_come_back():
    async with scripted_fleet(2) as fleet:
        asked = request(max_tokens=MAX_TOKENS)
        full = await first_asked(fleet, asked)
        full.refuses = Overloaded("no room", retry_after_s=7.0)
        answer = await fleet.host.ask(asked)
        assert answer.tokens == expected(asked)
        assert answer.record.node != full.name
        for node in fleet.nodes:
            node.refuses = Overloaded("no room", retry_after_s=7.0)
            await fleet.beat(node)
        with pytest.raises(Overloaded) as refusal:
            await fleet.host.ask(request())
        assert refusal.value.retry_after_s > 0


@pytest.mark.parametrize("is_line", [False, True])
async def test_a_bad_request_is_not_tried_again(is_line):
    async with scripted_fleet(2) as fleet:
        for node in fleet.nodes:
            if is_line:
                node.say_at = (0, Refused(kind="bad_request", message="too long", code="c"))
            else:
                node.refuses = BadRequest("too long")
        with pytest.raises(BadRequest, match="too long"):
            await fleet.host.ask(request())
        assert sum(len(node.asked) for node in fleet.nodes) == 1


async def test_a_node_that_is_another_by_now_is_passed_over():
    async with scripted_fleet(2) as fleet:
        asked = request(max_tokens=MAX_TOKENS)
        changed = await first_asked(fleet, asked)
        changed.refuses = IncompatiblePeer("layout differs")
        assert (await fleet.host.ask(asked)).tokens == expected(asked)


async def test_an_answer_goes_on_within_its_numerics_or_ends_with_an_error():
    options = replace(PATIENT, accept_numerics="approximate")
    async with scripted_fleet(2, options=options, numerics=("a", "b")) as fleet:
        asked = request(max_tokens=MAX_TOKENS)
        failing = await first_asked(fleet, asked)
        failing.die_at = 3
        got: list[int] = []
        with pytest.raises(EngineError, match="no other node can continue"):
            await collect(fleet, asked, got)
        assert got == expected(asked)[0][:3]
        failing.die_at = 0  # of what has not begun any node may draw
        await fleet.beat(failing)
        again = request(max_tokens=MAX_TOKENS)
        assert (await fleet.host.ask(again)).tokens == expected(again)


async def test_a_prompt_that_ends_nodes_does_not_end_them_all():
    async with scripted_fleet(5) as fleet:
        for node in fleet.nodes:
            node.die_at = 0
        with pytest.raises(EngineError, match="failed 3 times"):
            await fleet.host.ask(request())
        assert sum(len(node.asked) for node in fleet.nodes) == 3


async def test_a_node_that_is_heard_and_cannot_be_reached_is_no_failure_of_the_request():
    async with scripted_fleet(1, patience_s=60.0) as fleet:
        (node,) = fleet.nodes
        port = int(node.name.rpartition(":")[2])
        await node.close()
        asked = request(max_tokens=MAX_TOKENS)
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(fleet.host.ask(asked))
            await until(lambda: state(fleet) == "suspected")
            await fleet.beat(node)  # it is tried again, and fails again
            await until(lambda: state(fleet) == "suspected")
            assert not answer.done()
            await node.start(port)
            while not answer.done():
                await fleet.beat(node)
                await asyncio.sleep(0.05)
        assert answer.result().tokens == expected(asked)
        assert {told.outcome for told in answer.result().record.tries[:-1]} == {"failed"}


async def test_with_no_node_the_request_may_come_back_later():
    async with scripted_fleet(0) as fleet:
        with pytest.raises(Overloaded):
            await fleet.host.ask(request())


async def test_what_was_answered_has_ended_well_though_its_client_left_at_once():
    async with scripted_fleet(1) as fleet:
        for num_choices in (1, 2):
            asked = request(num_choices=num_choices, max_tokens=MAX_TOKENS)
            (told,) = (await fleet.host.ask(asked)).record.tries
            assert (told.outcome, told.num_tokens) == ("completed", num_choices * MAX_TOKENS)


@pytest.mark.parametrize("position", [0, 3], ids=["before it began", "midway"])
async def test_an_answer_waits_for_its_only_node_to_be_heard_again(position):
    async with scripted_fleet(1, patience_s=60.0) as fleet:
        (node,) = fleet.nodes
        node.die_at = position
        asked = request(max_tokens=MAX_TOKENS)
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(fleet.host.ask(asked))
            await until(lambda: state(fleet) == "suspected")
            also = tasks.create_task(fleet.host.ask(request(max_tokens=MAX_TOKENS)))
            await asyncio.sleep(0.05)
            assert not also.done()
            assert fleet.scheduler.is_ready == (True, ""), "requests are let in"
            node.heal()
            await fleet.beat(node)
        assert answer.result().tokens == expected(asked)
        assert answer.result().record.retries == 1
        assert also.result().record.retries == 0
        assert [len(asked.drawn_tokens) for asked in node.asked[:2]] == [0, 1 if position else 0]


@pytest.mark.parametrize(
    "beat", [{"is_ready": False}, {"mode": "prefill"}], ids=["not ready", "prefills"]
)
async def test_a_request_waits_for_a_node_that_may_yet_decode(beat):
    async with scripted_fleet(1, patience_s=60.0) as fleet:
        (node,) = fleet.nodes
        await fleet.beat(node, **beat)
        asked = request(max_tokens=MAX_TOKENS)
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(fleet.host.ask(asked))
            await asyncio.sleep(0.05)
            await fleet.beat(node, **beat)
            await asyncio.sleep(0.05)
            assert not answer.done()
            await fleet.beat(node)
        assert answer.result().tokens == expected(asked)


async def test_a_request_waits_no_longer_than_there_is_hope():
    async with scripted_fleet(2, patience_s=60.0) as fleet:
        for node in fleet.nodes:
            await fleet.beat(node, is_ready=False)
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(ended_with(fleet.host.ask(request())))
            first, second = fleet.nodes
            await fleet.leave(first)
            await asyncio.sleep(0.05)
            assert not answer.done()
            await fleet.leave(second)
        assert isinstance(answer.result(), Overloaded)
        await fleet.beat(first, is_draining=True)
        assert isinstance(await ended_with(fleet.host.ask(request())), Overloaded)


async def test_a_request_waits_no_longer_than_it_may():
    async with scripted_fleet(1, patience_s=0.1) as fleet:
        (node,) = fleet.nodes
        await fleet.beat(node, is_ready=False)
        error = await ended_with(fleet.host.ask(request()))
        assert isinstance(error, Overloaded)
        assert error.retry_after_s >= 1
        assert "not_ready" in str(error)


async def test_so_many_wait_and_no_more(monkeypatch):
    monkeypatch.setattr("prfaas.server.relay.MAX_WAITING", 2)
    async with scripted_fleet(1, patience_s=60.0) as fleet:
        (node,) = fleet.nodes
        await fleet.beat(node, is_ready=False)
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(fleet.host.ask(request(variant=v))) for v in range(2)]
            await until(lambda: fleet.scheduler.driver.num_waiting == 2)
            assert isinstance(await ended_with(fleet.host.ask(request())), Overloaded)
            await fleet.beat(node)
        assert [task.result().record.node for task in waiting] == [node.name] * 2
        assert fleet.scheduler.driver.num_waiting == 0


async def test_a_client_that_leaves_while_it_waits_is_waited_for_no_longer():
    async with scripted_fleet(1, patience_s=60.0) as fleet:
        (node,) = fleet.nodes
        await fleet.beat(node, is_ready=False)
        async with fleet.scheduler.generate(request()):
            await asyncio.sleep(0.05)
        await fleet.at_rest()
        await fleet.beat(node)
        assert node.asked == []


async def test_a_node_that_says_itself_that_it_failed_is_not_asked_again():
    async with scripted_fleet(1, patience_s=60.0) as fleet:
        (node,) = fleet.nodes
        node.say_at = (0, Refused(kind="engine_error", message="crash"))
        assert isinstance(await ended_with(fleet.host.ask(request())), EngineError)
        assert len(node.asked) == 1


async def test_a_prompt_that_was_just_prefilled_is_a_hit_before_any_heartbeat_says_so():
    async with scripted_fleet(2) as fleet:
        for node in fleet.nodes:
            await fleet.beat(node, snapshot=CacheSnapshot(epoch=node.epoch, sequence=0))
        asked = request(100, max_tokens=MAX_TOKENS)
        first = (await fleet.host.ask(asked)).record.node
        placed = (await fleet.scheduler.explain(asked)).answer
        assert isinstance(placed, Placement)
        assert (placed.decode_at, placed.decode_reason) == (first, "prefix")
        # Two heartbeats later it is known that the node has not kept it.
        for node in (*fleet.nodes, *fleet.nodes):
            await fleet.beat(node)
        answer = (await fleet.scheduler.explain(asked)).answer
        assert isinstance(answer, Placement)
        assert answer.decode_reason == "least_loaded"


async def test_a_client_that_leaves_ends_the_work_everywhere():
    async with scripted_fleet(2, key=KEY) as fleet:
        for node in fleet.nodes:
            node.hold_at = 2
        async with fleet.scheduler.generate(request(max_tokens=MAX_TOKENS)) as generation:
            async for _ in generation:
                break
            assert sum(node.num_running for node in fleet.nodes) == 1
        await until(lambda: not any(node.num_running for node in fleet.nodes))
        assert all(node.asked == [] or not node.release.is_set() for node in fleet.nodes)


async def test_a_stopped_choice_ends_at_the_node_and_the_others_go_on():
    async with scripted_fleet(1, key=KEY) as fleet:
        (node,) = fleet.nodes
        node.hold_at = 2
        asked = request(num_choices=2, max_tokens=MAX_TOKENS)
        tokens: list[list[int]] = [[], []]
        async with fleet.scheduler.generate(asked) as generation:
            async for event in generation:
                tokens[event.choice_index].append(event.token_id)
                if not node.release.is_set() and len(tokens[0]) == 2:
                    generation.stop_choice(0)
                    await until(lambda: bool(node.stopped))
                    node.release.set()
        assert tokens == [expected(asked)[0][:2], expected(asked)[1]]
        assert [stop.choice_index for stop in node.stopped] == [0]


async def test_a_choice_that_has_ended_is_not_continued_elsewhere():
    async with scripted_fleet(2) as fleet:
        asked = request(num_choices=2, max_tokens=MAX_TOKENS)
        failing = await first_asked(fleet, asked)
        (other,) = (node for node in fleet.nodes if node is not failing)
        failing.die_at = 4
        tokens: list[list[int]] = [[], []]
        async with fleet.scheduler.generate(asked) as generation:
            async for event in generation:
                tokens[event.choice_index].append(event.token_id)
                if len(tokens[0]) == 1 and event.choice_index == 0:
                    generation.stop_choice(0)
        assert tokens == [expected(asked)[0][:1], expected(asked)[1]]
        assert [asked.ended_choices for asked in other.asked] == [(0,)]


async def test_a_choice_that_is_stopped_between_two_nodes_ends_at_the_second():
    async with scripted_fleet(2) as fleet:
        asked = request(num_choices=2, max_tokens=MAX_TOKENS)
        failing = await first_asked(fleet, asked)
        (other,) = (node for node in fleet.nodes if node is not failing)
        failing.die_at, other.is_deaf, other.hold_at = 2, True, 3
        tokens: list[list[int]] = [[], []]
        async with fleet.scheduler.generate(asked) as generation, asyncio.TaskGroup() as tasks:

            async def stop() -> None:
                await until(lambda: bool(other.asked))
                generation.stop_choice(0)
                other.is_deaf = False
                other.release.set()
                other.release = asyncio.Event()
                await until(lambda: bool(other.stopped))
                other.release.set()

            tasks.create_task(stop())
            async for event in generation:
                tokens[event.choice_index].append(event.token_id)
        assert tokens == [expected(asked)[0][:2], expected(asked)[1]]
        assert [stop.choice_index for stop in other.stopped] == [0]


async def test_a_long_prompt_is_written_beside_the_loop(monkeypatch):
    threads = []
    encode = encode_generate_request

    def noted(asked: GenerateRequest) -> bytes:
        threads.append(threading.current_thread())
        return encode(asked)

    monkeypatch.setattr(relay, "encode_generate_request", noted)
    async with scripted_fleet(1) as fleet:
        for limit in (INLINE_TOKENS, 100):
            monkeypatch.setattr(relay, "INLINE_TOKENS", limit)
            asked = request(100, max_tokens=MAX_TOKENS)
            assert (await fleet.host.ask(asked)).tokens == expected(asked)
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [True, False]


async def test_a_burst_is_spread_over_the_nodes_at_once():
    async with scripted_fleet(2) as fleet:
        for node in fleet.nodes:
            node.hold_at = 0
        async with asyncio.TaskGroup() as tasks:
            for variant in range(8):
                tasks.create_task(fleet.host.ask(request(variant=variant)))
            await until(lambda: sum(len(node.asked) for node in fleet.nodes) == 8)
            assert [len(node.asked) for node in fleet.nodes] == [4, 4]
            for node in fleet.nodes:
                node.release.set()


async def test_a_node_that_leaves_finishes_what_it_has_begun():
    async with scripted_fleet(2, key=KEY) as fleet:
        asked = request(max_tokens=MAX_TOKENS)
        leaving = await first_asked(fleet, asked)
        leaving.hold_at = 2
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(fleet.host.ask(asked))
            await until(lambda: leaving.num_running == 1)
            await fleet.leave(leaving)
            for _ in range(2):
                assert (await fleet.host.ask(request(max_tokens=2))).record.node != leaving.name
            await fleet.scheduler._links.sweep()
            leaving.release.set()
        assert answer.result().tokens == expected(asked)
        assert answer.result().record.retries == 0
        await fleet.scheduler._links.sweep()
        assert not fleet.scheduler._links._retired


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "failed over"])
async def test_what_nodes_failed_with_is_gone_when_its_answer_is(is_refused):
    """Without the collector: a scheduler looks for garbage rarely, and a prompt may have megabytes."""

    def living() -> int:
        kinds = {relay.Relay, RunningGeneration}
        return sum(type(each) in kinds for each in gc.get_objects())

    async with scripted_fleet(2) as fleet:
        asked = request(max_tokens=MAX_TOKENS)
        failing = await first_asked(fleet, asked)
        gc.collect()
        num_living = living()
        gc.disable()
        try:
            if is_refused:
                for node in fleet.nodes:
                    node.refuses = Overloaded("full", retry_after_s=0.0)
                assert isinstance(await ended_with(fleet.host.ask(asked)), Overloaded)
            else:
                failing.say_at = (3, Refused(kind="engine_error", message="crash"))
                assert (await fleet.host.ask(asked)).record.retries == 1
            await until(lambda: not fleet.scheduler.load().num_running)
            assert living() == num_living
        finally:
            gc.enable()
