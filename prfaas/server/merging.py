"""Several generations as one stream of events: an answer may hold many prompts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from prfaas.server.failures import first_leaf
from prfaas.server.node import Generation
from prfaas.types import Request, TokenEvent

MAX_QUEUED = 64
"""Events between the engine and the client; full makes the engine's own queue fill."""

Item = tuple[int, TokenEvent | Exception | None]
"""(prompt index, event); an error ends all, None ends one."""


class Generates(Protocol):
    """What is asked of a node; `node.ServingNode` is one."""

    def generate(self, request: Request) -> AbstractAsyncContextManager[Generation]:
        """Run `request`; leaving the block, for whatever reason, aborts it everywhere."""
        ...


class MergedGenerations:
    """The events of all requests as they come; made by `generate_all`."""

    def __init__(self, num_requests: int) -> None:
        self.generations: list[Generation | None] = [None] * num_requests
        """By prompt index; None until it has begun."""
        self._queue: asyncio.Queue[Item] = asyncio.Queue(MAX_QUEUED)
        self._num_open = num_requests

    async def next(self) -> tuple[int, TokenEvent] | None:
        """Return (prompt index, event), None when all have ended; raises their errors.

        Cancelling it loses no event.
        """
        while self._num_open:
            index, event = await self._queue.get()
            if isinstance(event, Exception):
                raise event
            if event is not None:
                return index, event
            self._num_open -= 1
        return None

    async def pump(self, node: Generates, request: Request, index: int) -> None:
        """Run one request to its end."""
        try:
            async with node.generate(request) as generation:
                self.generations[index] = generation
                async for event in generation:
                    await self._queue.put((index, event))
        except Exception as error:  # noqa: BLE001  raised by `next`, in the answer's own task
            await self._queue.put((index, error))
        else:
            await self._queue.put((index, None))


@asynccontextmanager
async def generate_all(
    node: Generates, requests: Sequence[Request]
) -> AsyncIterator[MergedGenerations]:
    """Run all requests side by side; leaving the block aborts those that still run."""
    merged = MergedGenerations(len(requests))
    try:
        async with asyncio.TaskGroup() as tasks:
            pumps = [
                tasks.create_task(merged.pump(node, request, index))
                for index, request in enumerate(requests)
            ]
            try:
                yield merged
            finally:
                for pump in pumps:
                    pump.cancel()
    except BaseExceptionGroup as group:
        raise first_leaf(group) from None
