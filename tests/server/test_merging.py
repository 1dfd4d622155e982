import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from prfaas.errors import EngineError, Overloaded
from prfaas.server.generation import RunningGeneration
from prfaas.server.merging import MAX_QUEUED, MergedGenerations, generate_all
from prfaas.types import Request, SamplingParams, TokenEvent
from tests.collecting import num_left
from tests.server.fake_node import FakeNode, byte_ids


def request(name: str, max_tokens: int = 100) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return Request(request_id=name, prompt_tokens=(5,), sampling=sampling)


async def drain(merged: Any) -> list[tuple[int, int]]:
    items = []
    while (item := await merged.next()) is not None:
        items.append((item[0], item[1].token_id))
    return items


async def test_all_events_of_all_requests_come_each_in_its_order():
    words = {"a": "abc", "b": "xyzw"}
    node = FakeNode(lambda request: [byte_ids(words[request.request_id])])
    async with generate_all(node, [request("a", 3), request("b", 4)]) as merged:
        items = await drain(merged)
        assert await merged.next() is None
    for index, name in enumerate("ab"):
        assert [token for i, token in items if i == index] == byte_ids(words[name])
    assert (node.num_running, node.num_aborted) == (0, 0)


@pytest.mark.parametrize("error", [EngineError("dead"), RuntimeError("bug")])
async def test_an_error_of_one_ends_all_and_comes_out_as_it_is(error):
    node = FakeNode()
    node.fail_at = (1, error)

    async def consume() -> None:
        async with generate_all(node, [request("a"), request("b")]) as merged:
            await drain(merged)

    with pytest.raises(type(error), match=str(error)) as raised:
        await consume()
    assert raised.value is error
    assert node.num_running == 0


async def test_leaving_early_aborts_what_runs():
    node = FakeNode(lambda request: [byte_ids("x" * 99)])
    async with generate_all(node, [request("a"), request("b")]) as merged:
        await merged.next()
    assert (node.num_running, node.num_aborted) == (0, 2)


async def test_being_cancelled_aborts_what_runs():
    node = FakeNode()
    node.hold_at = 0

    async def consume() -> None:
        async with generate_all(node, [request("a")]) as merged:
            await drain(merged)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(consume())
        await node.is_holding.wait()
        task.cancel()
    assert task.cancelled()
    assert (node.num_running, node.num_aborted) == (0, 1)


@pytest.mark.parametrize("num_requests", [1, 2])
async def test_a_wait_that_is_cancelled_loses_no_event(num_requests):
    node = FakeNode(lambda request: [byte_ids("ab")])
    node.hold_at = 1
    async with generate_all(node, [request(name, 2) for name in "ab"[:num_requests]]) as merged:
        indices = []
        for _ in range(num_requests):
            item = await merged.next()
            assert item is not None
            indices.append(item[0])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await merged.next()
        node.release.set()
        indices += [index for index, _ in await drain(merged)]
    assert indices == [*range(num_requests)] * 2


async def test_events_that_are_all_there_leave_the_loop_its_turns():
    generation = RunningGeneration(request("a", 1000), clock=lambda: 0.0)
    merged = MergedGenerations(1)
    merged.take_only(generation)
    for index in range(1000):
        event = TokenEvent(request_id="a", choice_index=0, token_id=index)
        generation.put(event if index < 999 else replace(event, finish_reason="length"))
    taken: list[tuple[int, int]] = []
    turns: list[int] = []

    async def count() -> None:
        while len(taken) < 1000:
            turns.append(len(taken))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(count())
        while (item := await merged.next()) is not None:
            taken.append((item[0], item[1].token_id))
        assert await merged.next() is None
    assert taken == [(0, index) for index in range(1000)]
    assert max(after - before for before, after in pairwise(turns)) <= MAX_QUEUED


async def test_what_nobody_takes_is_not_drawn_without_end():
    node = FakeNode(lambda request: [byte_ids("x" * 1000)])
    async with generate_all(node, [request("a", 1000)]) as merged:
        await merged.next()
        for _ in range(3 * MAX_QUEUED):
            await asyncio.sleep(0)
        assert node.num_drawn <= MAX_QUEUED + 3


async def test_the_end_of_one_prompt_is_nothing_that_comes_next():
    node = FakeNode(lambda request: [byte_ids("a" if request.request_id == "a" else "xy")])
    node.hold_at = 1
    async with generate_all(node, [request("a", 1), request("b", 2)]) as merged:
        first = [await merged.next() for _ in range(2)]
        assert sorted(item[0] for item in first if item is not None) == [0, 1]
        await node.is_holding.wait()
        for _ in range(10):  # the first has its end now
            await asyncio.sleep(0)
        assert node.num_running == 1
        assert not merged.has_next
        node.release.set()
        assert await drain(merged) == [(1, byte_ids("y")[0])]
        assert merged.has_next


async def test_prompts_that_are_all_refused_leave_nothing_to_the_collector():
    node = FakeNode()

    async def ask() -> None:
        node.fail_before = Overloaded("full", retry_after_s=1.0)
        with pytest.raises(Overloaded, match="full"):
            async with generate_all(node, [request(name) for name in "abc"]) as merged:
                await merged.next()
        node.fail_before = None
        node.requests.clear()

    assert await num_left(ask) == 0
