"""Which part of its life a node is in, and the requests that a drain must wait for."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from prfaas.errors import Overloaded

Phase = Literal["loading", "serving", "draining"]

RETRY_AFTER_LOADING_S = 5.0
RETRY_AFTER_DRAINING_S = 1.0


class Lifecycle:
    """Lets requests in while the node serves and counts those inside.

    Args:
        is_node_ready: (False, why) while the node cannot serve; asked only while serving.
    """

    def __init__(self) -> None:
        self.phase: Phase = "loading"
        self.is_node_ready: Callable[[], tuple[bool, str]] = lambda: (True, "")
        self._load_stage = "starting"
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def num_inside(self) -> int:
        """Requests that `admit` let in and that have not left."""
        return self._num_inside

    def note_progress(self, stage: str) -> None:
        """Say what loading is at; shown by /ready. Any thread."""
        self._load_stage = stage

    def start_serving(self, is_node_ready: Callable[[], tuple[bool, str]]) -> None:
        """The node is loaded."""
        assert self.phase == "loading"
        self.is_node_ready = is_node_ready
        self.phase = "serving"

    def start_draining(self) -> None:
        """Let nobody in from now on; those inside go on. Idempotent."""
        self.phase = "draining"

    def readiness(self) -> tuple[bool, str]:
        """Return (whether requests are let in, why not)."""
        if self.phase == "loading":
            return False, f"loading: {self._load_stage}"
        if self.phase == "draining":
            return False, "draining: this node is about to stop"
        return self.is_node_ready()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request as inside for the length of the block; Overloaded if none is let in."""
        is_ready, reason = self.readiness()
        if not is_ready:
            retry_after_s = (
                RETRY_AFTER_LOADING_S if self.phase == "loading" else RETRY_AFTER_DRAINING_S
            )
            raise Overloaded(f"not ready: {reason}", retry_after_s=retry_after_s)
        self._num_inside += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._is_empty.set()

    async def wait_empty(self) -> None:
        """Return when nobody is inside."""
        await self._is_empty.wait()
