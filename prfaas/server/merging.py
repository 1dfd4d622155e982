"""Several generations as one stream of events: an answer may hold many prompts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from prfaas.server.node import Generation
from prfaas.types import Request, TokenEvent

MAX_QUEUED = 64
"""Events between the engine and the client; full makes the engine's own queue fill."""

Item = tuple[int, TokenEvent | Exception | None]
"""(prompt index, event); an error ends all, and so does None, behind the last event of all."""


class Generates(Protocol):
    """What is asked of a node; `node.ServingNode` is one."""

    def generate(self, request: Request) -> AbstractAsyncContextManager[Generation]:
        """Run `request`; leaving the block, for whatever reason, aborts it everywhere."""
        ...


class MergedGenerations:
    """The events of all requests as they come; made by `generate_all`.

    Those of one request are taken from it directly: no task and no queue stands between.
    """

    def __init__(self, num_requests: int) -> None:
        self.generations: list[Generation | None] = [None] * num_requests
        """By prompt index; None until it has begun."""
        self._only: Generation | None = None
        """The generation of a single request."""
        self._queue: asyncio.Queue[Item] = asyncio.Queue(MAX_QUEUED)
        self._num_open = num_requests
        self._num_at_once = 0
        """Events that were there without a wait, since the loop last had a turn."""

    @property
    def has_next(self) -> bool:
        """Whether `next` returns or raises at once; else it may wait, and the loop has a turn."""
        return self._num_at_once < MAX_QUEUED and self._is_here

    @property
    def _is_here(self) -> bool:
        return self._only.has_next if self._only is not None else not self._queue.empty()

    async def next(self) -> tuple[int, TokenEvent] | None:
        """Return (prompt index, event), None when all have ended; raises their errors.

        Cancelling it loses no event, and the loop has its turns however many there are at once.
        """
        if self._num_at_once >= MAX_QUEUED:
            self._num_at_once = 0
            await asyncio.sleep(0)
        self._num_at_once = self._num_at_once + 1 if self._is_here else 0
        if self._only is not None:
            event = await anext(self._only, None)
            return None if event is None else (0, event)
        index, item = await self._queue.get()
        if item is None:
            self._queue.put_nowait((index, None))  # whoever asks again
            return None
        if isinstance(item, Exception):
            self._queue.put_nowait((index, None))
            try:
                raise item
            finally:
                del item  # its traceback holds this frame
        return index, item

    def take_only(self, generation: Generation) -> None:
        """Let a single request's events come from its generation."""
        self.generations[0] = self._only = generation

    def close(self) -> None:
        """Let go of what nobody took: an error's traceback holds the frames that hold it."""
        while not self._queue.empty():
            self._queue.get_nowait()

    async def pump(self, node: Generates, request: Request, index: int) -> None:
        """Run one of several requests to its end."""
        try:
            async with node.generate(request) as generation:
                self.generations[index] = generation
                async for event in generation:
                    await self._queue.put((index, event))
        except Exception as error:  # noqa: BLE001  raised by `next`, in the answer's own task
            await self._queue.put((index, error))
        else:
            self._num_open -= 1
            if not self._num_open:
                await self._queue.put((index, None))


@asynccontextmanager
async def generate_all(
    node: Generates, requests: Sequence[Request]
) -> AsyncIterator[MergedGenerations]:
    """Run all requests side by side; leaving the block aborts those that still run."""
    merged = MergedGenerations(len(requests))
    if len(requests) == 1:
        async with node.generate(requests[0]) as generation:
            merged.take_only(generation)
            yield merged
        return
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        pumps = [
            tasks.create_task(merged.pump(node, request, index))
            for index, request in enumerate(requests)
        ]
        try:
            yield merged
        except Exception as error:  # noqa: BLE001  raised below: no group comes round it
            failure = error
        finally:
            for pump in pumps:
                pump.cancel()
    merged.close()
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame
