"""What a node sends to a peer, from the first page to the receiver's ACK: a prompt, or a cached prefix."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.cache.block_table import BlockTable
from prfaas.cache.spec import CacheLayout, bytes_of_page
from prfaas.clock import Clock
from prfaas.engine.submission import EngineLoad, FirstLogits
from prfaas.errors import EngineError, PrfaasError
from prfaas.server.engine_thread import EngineStream, EngineThread
from prfaas.server.places import places_of_prefix, places_of_snapshots, places_to_send
from prfaas.server.pull import kv_numbers
from prfaas.transport.messages import (
    FirstTokens,
    PrefillTimes,
    TransferRequest,
    encode_first_tokens,
)
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.pieces import PagePlace
from prfaas.transport.sending import outlive
from prfaas.transport.wire import FrameType, encode_progress
from prfaas.types import RequestEnded, TokenEvent

PROGRESS_INTERVAL_S = 0.5


def tokens_ahead(load: EngineLoad, *, num_tokens: int, tokens_done: int, hit_tokens: int) -> int:
    """Return other prompts' tokens that the engine still has before the first of this prompt.

    It falls as they are computed, by which the receiver sees that a queue moves; prompts that come
    later and go first make it grow.
    """
    if tokens_done > hit_tokens:
        return 0
    return max(0, load.num_waiting_tokens - (num_tokens - tokens_done))


class PageSource:
    """A transfer's pages, in a table of which the transfer's job has one hold."""

    def __init__(self, asked: TransferRequest, table: BlockTable, layout: CacheLayout) -> None:
        haste_s = asked.deadline_s
        self.transfer = OutgoingTransfer(
            transfer_id=asked.transfer_id,
            page_view=self._page_view,
            capability=asked.capability,
            credit_bytes=asked.credit_bytes,
            codec=asked.codec,
            numbers=kv_numbers(layout, asked.identity),
            deadline_s=None if haste_s is None else asyncio.get_running_loop().time() + haste_s,
        )
        self._table = table
        self._layout = layout

    def _page_view(self, place: PagePlace) -> memoryview:
        pages = self._table.pages(place.group, place.block)
        assert pages is not None, f"{place} was let go before it was sent"
        spec = self._layout.groups[place.group]
        num_bytes = bytes_of_page(spec, place.index, place.num_tokens, self._layout.block_tokens)
        return self._table.view(pages[place.index])[:num_bytes]


class PrefixJob(PageSource):
    """Sends the table's hit, as far as the receiver lacks it; nothing is computed."""

    def __init__(self, *, asked: TransferRequest, table: BlockTable, layout: CacheLayout) -> None:
        super().__init__(asked, table, layout)
        places = places_of_prefix(layout, table.hit_tokens, asked.have_tokens)
        for place in sorted(places, key=in_order):
            self.transfer.put_page(place)
        self.transfer.finish(tokens_computed=0)

    async def run(self, *, lease_s: float) -> None:
        """Run the transfer to its end; then the table's hold is released."""
        try:
            await outlive(self.transfer, lease_s)
        finally:
            self.transfer.close("stopped")
            self._table.release()


def in_order(place: PagePlace) -> tuple[int, int, int]:
    """Return what pages of a hit are sorted by: what comes first is of use without the rest."""
    return place.block, place.group, place.index


class _Computed(NamedTuple):
    at_s: float
    num_tokens: int
    """Of the prompt."""
    num_all: int
    """Of all jobs' prompts."""


@dataclass(slots=True)
class JobsProgress:
    """Prompt tokens that the engine has computed for all jobs of a node; counted on its thread."""

    num_tokens: int = 0


class PrefillJob(PageSource):
    """Feeds one transfer: with the pages of the prefix hit, then with what the engine makes.

    It is the prompt's PageSink: `page_ready` and `progress` run on the engine's thread, everything
    else on the loop. The pages live in `table`, of which the job has one hold until `run` ends.
    """

    def __init__(
        self,
        *,
        asked: TransferRequest,
        table: BlockTable,
        layout: CacheLayout,
        clock: Clock,
        all_jobs: JobsProgress,
    ) -> None:
        super().__init__(asked, table, layout)
        self._loop = asyncio.get_running_loop()
        self._asked = asked
        self._clock = clock
        self._accepted_s = clock()
        self._all_jobs = all_jobs
        self._tokens_done = table.hit_tokens
        self._begun: _Computed | None = None
        self._last: _Computed | None = None
        """As the engine said at its beginning, and last."""
        num_tokens = len(asked.request.prompt_tokens)
        self._unsent = set(places_to_send(layout, num_tokens, asked.have_tokens))
        self._unsent_snapshots = set(
            places_of_snapshots(layout, num_tokens, asked.have_tokens, asked.snapshot_tokens)
        )
        """Not waited for at the end: those without room, or behind our own hit, are never made."""
        self._ready: deque[PagePlace] = deque()
        self._is_waking = False
        self._queue_hit()

    def _queue_hit(self) -> None:
        hit_blocks = self._table.hit_tokens // self._layout.block_tokens
        for place in sorted(self._unsent, key=in_order):
            if place.block < hit_blocks:
                self._queue(place)

    def _queue(self, place: PagePlace) -> None:
        # A preempted prompt is computed again, and its pages come again: once is enough.
        for unsent in (self._unsent, self._unsent_snapshots):
            if place in unsent:
                unsent.remove(place)
                self.transfer.put_page(place)

    # ------------------------------------------------------------ on the engine's thread

    def page_ready(self, group: int, index: int, block: int, num_tokens: int, page: int) -> None:
        """Take a written page by its place; it is looked up again when its turn comes."""
        self._ready.append(PagePlace(group=group, index=index, block=block, num_tokens=num_tokens))
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._take_ready)

    def progress(self, num_tokens: int) -> None:
        """Take note how far the prompt is."""
        if self._begun is not None:
            self._all_jobs.num_tokens += max(0, num_tokens - self._tokens_done)
        self._tokens_done = num_tokens
        self._last = _Computed(self._clock(), num_tokens, self._all_jobs.num_tokens)
        self._begun = self._begun or self._last

    # ------------------------------------------------------------ on the loop

    def _times(self) -> PrefillTimes:
        """Return when the prompt was computed; it is, and its last word has come."""
        assert self._begun is not None, "the engine drew a token of a prompt that it never began"
        assert self._last is not None
        num_tokens = max(0, self._last.num_tokens - self._begun.num_tokens)
        return PrefillTimes(
            begun_s=self._begun.at_s - self._accepted_s,
            computed_s=self._last.at_s - self._accepted_s,
            num_tokens=num_tokens,
            num_engine_tokens=max(num_tokens, self._last.num_all - self._begun.num_all),
        )

    def _take_ready(self) -> None:
        self._is_waking = False  # first, so that a page that comes meanwhile wakes us again
        while self._ready:
            self._queue(self._ready.popleft())

    async def run(self, stream: EngineStream, engine: EngineThread, *, lease_s: float) -> None:
        """Run the transfer to its end; then the prompt is aborted and the table's hold released."""
        try:
            async with asyncio.TaskGroup() as tasks:
                work = [
                    tasks.create_task(self._produce(stream)),
                    tasks.create_task(self._report_progress(engine)),
                ]
                await outlive(self.transfer, lease_s)
                for task in work:
                    task.cancel()
        finally:
            self.transfer.close("stopped")
            engine.abort(stream.request_id)
            self._table.release()

    async def _produce(self, stream: EngineStream) -> None:
        """Pass on what the engine draws, then the end; a failure becomes an ERROR frame."""
        first_tokens: list[TokenEvent] = []
        num_choices = self._asked.request.num_choices
        try:
            async for event in stream:
                match event:
                    case TokenEvent():
                        first_tokens.append(event)
                        if len(first_tokens) == num_choices:
                            first_tokens.sort(key=lambda token: token.choice_index)
                            first = FirstTokens(events=tuple(first_tokens), times=self._times())
                            payload = encode_first_tokens(first)
                            self.transfer.put_urgent(FrameType.FIRST_TOKENS, payload)
                    case FirstLogits():
                        self.transfer.put_urgent(FrameType.LOGITS, event.logits)
                    case RequestEnded():
                        self._finish(event)
        except PrfaasError as error:
            self.transfer.fail(str(error))

    def _finish(self, ended: RequestEnded) -> None:
        self._take_ready()
        if self._unsent:
            raise EngineError(f"the engine ended without {len(self._unsent)} pages of the prompt")
        self.transfer.finish(tokens_computed=ended.num_tokens_computed)

    async def _report_progress(self, engine: EngineThread) -> None:
        """Send PROGRESS now and then, but only when the engine has really done something since."""
        seen = engine.heartbeat()
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            if (beat := engine.heartbeat()) == seen:
                continue
            seen = beat
            ahead = tokens_ahead(
                engine.load(),
                num_tokens=len(self._asked.request.prompt_tokens),
                tokens_done=self._tokens_done,
                hit_tokens=self._table.hit_tokens,
            )
            self.transfer.put_urgent(FrameType.PROGRESS, encode_progress(self._tokens_done, ahead))
