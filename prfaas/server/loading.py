"""A node loaded in a thread of its own, so that the loop can answer probes and signals."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from prfaas.log import get_logger
from prfaas.server.node import Progress

T = TypeVar("T")

log = get_logger()


class LoadStopped(BaseException):
    """Raised inside the loading thread, by its progress calls, when the process shall stop.

    No Exception, so that no fallback of a loader takes it for a fault.
    """


class Loading:
    """One load. `stop` makes its next progress call raise.

    Args:
        load: does the work, calling the progress function that it is given.
        note_progress: told the stage, on the loading thread.
    """

    def __init__(self, load: Callable[[Progress], T], note_progress: Callable[[str], None]) -> None:
        self._load: Callable[[Progress], object] = load
        self._note_progress = note_progress
        self._is_stopping = threading.Event()
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._outcome: object = None
        self._error: BaseException | None = None

    def stop(self) -> None:
        """Ask the load to end early."""
        self._is_stopping.set()
        self._wake.set()

    async def run(self, *, stop_timeout_s: float) -> object | None:
        """Return what `load` returned, or None if it was stopped; raises what it raised.

        A load that does not end within `stop_timeout_s` of `stop` is left behind: its thread is a
        daemon and ends with the process.
        """
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._run, args=(loop,), name="prfaas-load", daemon=True)
        thread.start()
        await self._wake.wait()
        try:
            async with asyncio.timeout(stop_timeout_s):
                await self._ended.wait()
        except TimeoutError:
            log.warning("load.abandoned", waited_s=stop_timeout_s)
            return None
        thread.join()
        if isinstance(self._error, LoadStopped):
            return None
        if self._error is not None:
            raise self._error
        return self._outcome

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._outcome = self._load(self._progress)
        except BaseException as error:  # noqa: BLE001  carried to the loop, raised there
            self._error = error
        try:
            loop.call_soon_threadsafe(self._end)
        except RuntimeError:  # the loop is closed: this load was abandoned
            return

    def _end(self) -> None:
        self._ended.set()
        self._wake.set()

    def _progress(self, stage: str, done: int, total: int) -> None:
        if self._is_stopping.is_set():
            raise LoadStopped
        self._note_progress(f"{stage} {100 * done // total} %" if total > 0 else stage)
