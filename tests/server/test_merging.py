import asyncio
from typing import Any

import pytest

from prfaas.errors import EngineError
from prfaas.server.merging import MAX_QUEUED, generate_all
from prfaas.types import Request, SamplingParams
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


async def test_what_nobody_takes_is_not_drawn_without_end():
    node = FakeNode(lambda request: [byte_ids("x" * 1000)])
    async with generate_all(node, [request("a", 1000)]) as merged:
        await merged.next()
        for _ in range(3 * MAX_QUEUED):
            await asyncio.sleep(0)
        assert node.num_drawn <= MAX_QUEUED + 3
