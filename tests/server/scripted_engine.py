"""An engine without arithmetic: KV bytes and tokens are hashes of everything before them.

It keeps the engine's contract (pages, sink, commits, events, one hold on the table), so the roles can
be tested without a model. Every page that it continues from is compared with the bytes it would
have made itself: KV of another prompt, block, layer or length is noticed.
"""

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from prfaas.cache.block_table import BlockTable
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import (
    CacheLayout,
    FullSpec,
    StateSpec,
    WindowSpec,
    bytes_of_page,
    held_blocks,
    needed_blocks,
    replay_boundary,
)
from prfaas.engine.submission import EngineEvent, EngineLoad, FirstLogits, Submission
from prfaas.errors import BadRequest, Overloaded
from prfaas.types import RequestEnded, TokenEvent, TokenLogprobs

BLOCK_TOKENS = 8
VOCAB_SIZE = 1000
END_TOKEN = 999

DENSE = CacheLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(FullSpec(name="full", layers=(0, 1, 2), page_bytes=64 * BLOCK_TOKENS),),
)
HYBRID = CacheLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(
        FullSpec(name="full", layers=(2,), page_bytes=64 * BLOCK_TOKENS),
        WindowSpec(name="window", layers=(0, 1, 3), page_bytes=32 * BLOCK_TOKENS, window_tokens=20),
    ),
)


STATES = CacheLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(
        FullSpec(name="full", layers=(1, 2), page_bytes=64 * BLOCK_TOKENS),
        StateSpec(name="state", layers=(0, 2), page_bytes=64 * BLOCK_TOKENS, state_bytes=1200),
    ),
)
"""Layer 2 has both, and a state takes three pages, the last of them shorter."""


def page_bytes(
    layout: CacheLayout, group: int, index: int, block: int, tokens: Sequence[int]
) -> bytes:
    """A page of a block after `tokens`, which end in or behind the block."""
    end = min(len(tokens), (block + 1) * layout.block_tokens)
    num_tokens = end - block * layout.block_tokens
    size = bytes_of_page(layout.groups[group], index, num_tokens, layout.block_tokens)
    seed = hashlib.sha256(f"{group} {index} {block} {list(tokens[:end])}".encode()).digest()
    return hashlib.shake_128(seed).digest(size)


def drawn_token(tokens: Sequence[int], seed: int, choice: int) -> int:
    digest = hashlib.sha256(f"{seed} {choice} {list(tokens)}".encode()).digest()
    return int.from_bytes(digest[:4], "little") % (VOCAB_SIZE - 1)


def first_logits(tokens: Sequence[int]) -> bytes:
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(repr(tokens).encode()).digest()[:8]))
    return rng.standard_normal(VOCAB_SIZE).astype("<f4").tobytes()


@dataclass
class _Sequence:
    submission: Submission
    num_tokens: int
    num_computed: int = 0
    is_prefilled: bool = False
    drawn: list[list[int]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.submission.request.prompt_tokens


class ScriptedEngine:
    """One sequence a step, one chunk or one token of every choice at a time."""

    def __init__(self, cache: PrefixCache, *, chunk_tokens: int = 2 * BLOCK_TOKENS) -> None:
        self.cache = cache
        self.chunk_tokens = chunk_tokens
        self.num_layers_run = 0
        self.is_full = False
        """Refuse submissions as overloaded."""
        self.end_after: int | None = None
        """Draw END_TOKEN, a stop, as the token of this index."""
        self.crash_next = False
        self.first_token: int | None = None
        """Draw this as the first token of every choice, whatever anybody else would draw."""
        self.prefill_step_s = 0.0
        """How long a prefill step takes."""
        self.prefill_tokens_per_s = 0.0
        """What `load` claims."""
        self.prefill_share = 1.0
        self.gate = threading.Event()
        """Cleared: steps wait, as in a step that takes long."""
        self.gate.set()
        self.max_prefill_steps: int | None = None
        """After so many prefill steps, every further one waits for the gate that it clears."""
        self.places = [
            (group, index)
            for group, spec in enumerate(cache.layout.groups)
            for index in range(spec.pages_per_block)
        ]
        """(group, index) of every page of a block."""
        self._queue: list[_Sequence] = []
        self._ended: list[EngineEvent] = []
        self._step_count = 0

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._ended)

    def submit(self, submission: Submission) -> None:
        if self.is_full:
            raise Overloaded("the queue is full")
        if max(submission.request.prompt_tokens) >= VOCAB_SIZE:
            raise BadRequest("no such token")
        choices = submission.request.num_choices
        drawn = [list(tokens) for tokens in submission.forced_tokens] or [
            [] for _ in range(choices)
        ]
        sequence = _Sequence(
            submission=submission, num_tokens=submission.table.num_tokens, drawn=drawn
        )
        max_tokens = submission.request.sampling.max_tokens
        sequence.open = {
            index
            for index, tokens in enumerate(drawn)
            if len(tokens) < max_tokens and END_TOKEN not in tokens
        }
        self._check_pages(submission.table, sequence.prompt)
        self._queue.append(sequence)

    def abort(self, request_id: str) -> None:
        for sequence in self._queue:
            if sequence.submission.request.request_id == request_id:
                self._end(sequence)
                return

    def stop_choice(self, request_id: str, choice_index: int) -> None:
        for sequence in self._queue:
            if sequence.submission.request.request_id == request_id:
                sequence.open.discard(choice_index)
                if not sequence.open:
                    self._end(sequence)
                return

    def set_prefill_share(self, share: float) -> None:
        self.prefill_share = share

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=len(self._queue[:1]),
            num_waiting=len(self._queue[1:]),
            num_waiting_tokens=sum(len(s.prompt) - s.num_tokens for s in self._queue),
            kv_used_bytes=0,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            step_count=self._step_count,
        )

    def step(self) -> list[EngineEvent]:
        assert self.gate.wait(120), "nobody opened the gate"
        if self.crash_next:
            self.crash_next = False
            raise RuntimeError("scripted crash")
        self._step_count += 1
        events, self._ended = self._ended, []
        if self._queue:
            sequence = self._queue.pop(0)
            self._queue.append(sequence)
            events += self._advance(sequence)
            events += self._ended
            self._ended = []
        return events

    def _advance(self, sequence: _Sequence) -> list[EngineEvent]:
        if sequence.num_tokens < len(sequence.prompt):
            if self.max_prefill_steps is not None:
                self.max_prefill_steps -= 1
                if self.max_prefill_steps == 0:
                    self.gate.clear()
            self._prefill(sequence)
            if sequence.num_tokens < len(sequence.prompt):
                return []
        return self._draw(sequence)

    def _prefill(self, sequence: _Sequence) -> None:
        table, layout, sink = sequence.submission.table, self.cache.layout, sequence.submission.sink
        start = sequence.num_tokens
        end = min(len(sequence.prompt), start + self.chunk_tokens)
        if sink is not None and not sequence.num_computed:
            sink.progress(start)
        time.sleep(self.prefill_step_s)
        is_last = end == len(sequence.prompt)
        whole = range(start // BLOCK_TOKENS, end // BLOCK_TOKENS)
        blocks = list(whole)
        if is_last and end % BLOCK_TOKENS and sink is not None:
            blocks.append(end // BLOCK_TOKENS)
        for group, index in self.places:
            for block in blocks:
                self._write(sequence, group, index, block, end)
            self.num_layers_run += 1
        for group in range(len(layout.groups)):
            for block in whole:
                if table.pages(group, block) is not None:
                    table.commit(group, block)
        sequence.num_computed += end - start
        sequence.num_tokens = end
        if sink is not None:
            sink.progress(end)

    def _write(self, sequence: _Sequence, group: int, index: int, block: int, end: int) -> None:
        table, layout, sink = sequence.submission.table, self.cache.layout, sequence.submission.sink
        if table.is_committed(group, block):
            return
        stop = min(end, (block + 1) * BLOCK_TOKENS)
        num_prompt = len(sequence.prompt)
        is_kept = stop in (num_prompt, replay_boundary(num_prompt, BLOCK_TOKENS))
        if isinstance(layout.groups[group], StateSpec) and not is_kept:
            return
        pages = table.try_allocate(group, block)
        if pages is None:
            return
        data = page_bytes(layout, group, index, block, sequence.prompt[:end])
        table.view(pages[index])[: len(data)] = data
        needed = needed_blocks(layout.groups[group], len(sequence.prompt), BLOCK_TOKENS)
        if sink is not None and block in needed:
            num_tokens = min(BLOCK_TOKENS, end - block * BLOCK_TOKENS)
            sink.page_ready(group, index, block, num_tokens, pages[index])

    def _draw(self, sequence: _Sequence) -> list[EngineEvent]:
        submission, request = sequence.submission, sequence.submission.request
        events: list[EngineEvent] = []
        if not sequence.is_prefilled and submission.return_logits:
            events.append(
                FirstLogits(request_id=request.request_id, logits=first_logits(sequence.prompt))
            )
        sequence.is_prefilled = True
        for index in sorted(sequence.open):
            tokens = sequence.drawn[index]
            token = drawn_token((*sequence.prompt, *tokens), request.sampling.seed, index)
            if not tokens and self.first_token is not None:
                token = self.first_token
            if self.end_after is not None and len(tokens) == self.end_after:
                token = END_TOKEN
            tokens.append(token)
            is_stop = token == END_TOKEN
            is_last = is_stop or len(tokens) == request.sampling.max_tokens
            if is_last:
                sequence.open.discard(index)
            events.append(
                TokenEvent(
                    request_id=request.request_id,
                    choice_index=index,
                    token_id=token,
                    logprobs=None
                    if request.sampling.num_logprobs is None
                    else TokenLogprobs(logprob=-0.5, top=((token, -0.5),)),
                    finish_reason=("stop" if is_stop else "length") if is_last else None,
                )
            )
        if submission.prefill_only or not sequence.open:
            self._end(sequence)
        return events

    def _end(self, sequence: _Sequence) -> None:
        self._queue.remove(sequence)
        sequence.submission.table.release()
        self._ended.append(
            RequestEnded(
                request_id=sequence.submission.request.request_id,
                num_tokens_computed=sequence.num_computed,
            )
        )

    def _check_pages(self, table: BlockTable, prompt: Sequence[int]) -> None:
        layout = self.cache.layout
        for group, index in self.places:
            for block in held_blocks(layout.groups[group], table.num_tokens, BLOCK_TOKENS):
                pages = table.pages(group, block)
                assert pages is not None, f"group {group} block {block} is missing"
                data = page_bytes(layout, group, index, block, prompt[: table.num_tokens])
                page = table.view(pages[index])
                assert page[: len(data)] == data, f"group {group} page {index} block {block}"
