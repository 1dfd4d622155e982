"""Measures how long an engine takes: T_prefill of a length, T_decode of a batch.

The engine is driven step by step as a node's thread drives it, with its own cache, in the chunks that it
serves in. Nobody else has requests meanwhile. Prompts are random tokens that no earlier one begins
with, so that every token is computed, and their pages are written as for a peer.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Protocol

from prfaas.cache.block_table import BlockTable
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import bytes_of_page
from prfaas.clock import Clock
from prfaas.engine.submission import EngineEvent, EngineLoad, Submission
from prfaas.errors import ConfigError, EngineError
from prfaas.types import Request, RequestEnded, SamplingParams, TokenEvent

Progress = Callable[[str, int, int], None]

FIRST_TOKENS = 64
"""The shortest prompt that is measured; each next one is twice as long."""
MIN_RUNS, MAX_RUNS = 3, 9
SHARE_OF_LENGTH = 0.04
"""Of the time for prompts: more runs of a length than MIN_RUNS stay within it."""
PREFILL_SHARE = 0.7
"""Of all the time; the rest is for decoding."""
MIN_STEPS, MAX_STEPS = 5, 64
DECODE_CONTEXT_TOKENS = 512
"""Of each sequence whose decoding is measured, where context and time allow."""


class Engine(Protocol):
    """What is measured: `engine.runner.Runner`, or what has its face."""

    max_context_tokens: int

    def submit(self, submission: Submission) -> None:
        """Queue a request."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request at the next step."""
        ...

    def step(self) -> list[EngineEvent]:
        """Do one batch's work; return what happened."""
        ...

    def load(self) -> EngineLoad:
        """Return how busy it is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one length, or one batch, took in each run."""

    size: int
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle one."""
        return median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """What an engine was found to take."""

    prefill: tuple[Timing, ...]
    """By length in tokens: from the submission to the first token."""
    decode: tuple[Timing, ...]
    """By batch: one step."""
    decode_context_tokens: int
    """That each decoding sequence began with."""
    kv_bytes: tuple[int, ...]
    """Of the pages that each length of `prefill` made: what a transfer would send."""


class _PageCounter:
    """A sink that counts the bytes of a prompt's pages, as a transfer would read them."""

    def __init__(self, cache: PrefixCache, table: BlockTable) -> None:
        self.num_bytes = 0
        self._layout = cache.layout
        self._table = table

    def page_ready(self, group: int, index: int, block: int, num_tokens: int, page: int) -> None:
        layout = self._layout
        size = bytes_of_page(layout.groups[group], index, num_tokens, layout.block_tokens)
        self.num_bytes += len(self._table.view(page)[:size])

    def progress(self, num_tokens: int) -> None:
        return None


class EngineBench:
    """One engine and its cache, with nothing else to do.

    Args:
        engine: no request is in it.
        cache: the engine's.
        vocab_size: prompts are random tokens below it.
        clock: seconds.
        seed: of the prompts.
    """

    def __init__(
        self, engine: Engine, cache: PrefixCache, *, vocab_size: int, clock: Clock, seed: int = 0
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._vocab_size = vocab_size
        self._clock = clock
        self._random = random.Random(seed)
        self._ids = count()

    def prefill(self, num_tokens: int) -> tuple[float, int] | None:
        """Return the seconds to a prompt's first token and the bytes of the pages it made.

        None if the cache has no room for its pages. Raises EngineError if the engine fails, or if
        it made other pages than the layout says.
        """
        request = self._request(num_tokens, max_tokens=1)
        began_s = self._clock()
        table = self._look_up(request)
        sink = _PageCounter(self._cache, table)
        if not table.try_reserve(num_tokens):
            table.release()
            return None
        self._engine.submit(Submission(request=request, table=table, sink=sink, prefill_only=True))
        first_s: float | None = None
        for event in self._until_ended({request.request_id}):
            if isinstance(event, TokenEvent) and first_s is None:
                first_s = self._clock()
        assert first_s is not None, "a prompt ended without a token"
        expected = self._cache.layout.bytes_needed(num_tokens)
        if sink.num_bytes != expected:
            raise EngineError(
                f"a prompt of {num_tokens} tokens made pages of {sink.num_bytes} bytes; its layout "
                f"says {expected}"
            )
        return first_s - began_s, sink.num_bytes

    def decode(self, batches: Sequence[int], context_tokens: int, seconds: float) -> list[Timing]:
        """Return what a step of each batch takes, with about so many tokens before each sequence.

        `batches` rise. All are measured on the sequences of the largest, of which some leave for each smaller
        one. Each gets an equal part of `seconds`, but MIN_STEPS at least.

        Raises:
            ConfigError: context, or memory for running sequences, are too small for the largest batch.
        """
        room_tokens = self._engine.max_context_tokens - context_tokens
        requests = [
            self._request(context_tokens, max_tokens=room_tokens) for _ in range(batches[-1])
        ]
        for request in requests:
            self._engine.submit(Submission(request=request, table=self._look_up(request)))
        room_tokens -= self._begin_all(len(requests))
        max_steps = min(MAX_STEPS, room_tokens // len(batches) - 1)
        if max_steps < MIN_STEPS:
            raise ConfigError(
                f"a context of {self._engine.max_context_tokens} tokens is too small to measure decoding"
            )
        timings = []
        for batch in reversed(batches):
            for request in requests[batch:]:
                self._engine.abort(request.request_id)
            requests = requests[:batch]
            timings.append(self._steps(batch, seconds / len(batches), max_steps))
        for request in requests:
            self._engine.abort(request.request_id)
        for _ in self._until_ended({request.request_id for request in requests}):
            pass
        return timings[::-1]

    def _begin_all(self, num_requests: int) -> int:
        """Step until each request has drawn a token; return the tokens that one has drawn at most."""
        begun: set[str] = set()
        num_steps = 0
        while len(begun) < num_requests:
            num_begun = len(begun)
            drawn = {e.request_id for e in self._step() if isinstance(e, TokenEvent)}
            begun |= drawn
            num_steps += bool(drawn)
            load = self._engine.load()
            if len(begun) == num_begun == load.num_running and load.num_waiting:
                raise _too_many(num_requests)  # the others had a step to be let in
        return num_steps

    def _steps(self, batch: int, seconds: float, max_steps: int) -> Timing:
        """Return what steps took in which each of `batch` sequences drew a token."""
        self._draw(batch)  # not counted: those that have left go in it
        taken_s: list[float] = []
        begin_s = self._clock()
        while len(taken_s) < MIN_STEPS or (
            len(taken_s) < max_steps - 1 and self._clock() - begin_s < seconds
        ):
            began_s = self._clock()
            self._draw(batch)
            taken_s.append(self._clock() - began_s)
        return Timing(size=batch, seconds=tuple(taken_s))

    def _draw(self, batch: int) -> None:
        """Let each of `batch` sequences draw one token. A replayed engine takes several steps for it."""
        num_drawn = 0
        while not num_drawn:
            num_drawn = sum(isinstance(event, TokenEvent) for event in self._step())
        if num_drawn != batch:
            raise _too_many(batch)

    def _request(self, num_tokens: int, *, max_tokens: int) -> Request:
        """Return a request for a prompt of its own, sampled as clients get it by default."""
        number = next(self._ids)
        return Request(
            request_id=f"profile-{number}",
            prompt_tokens=tuple(self._random.choices(range(self._vocab_size), k=num_tokens)),
            sampling=SamplingParams(max_tokens=max_tokens, seed=number),
            cache_salt=number.to_bytes(8, "big"),
        )

    def _look_up(self, request: Request) -> BlockTable:
        tokens, salt = request.prompt_tokens, request.cache_salt
        keys = self._cache.block_keys(tokens, salt)
        return self._cache.lookup(keys, len(tokens), salt=salt, is_counted=False)

    def _step(self) -> list[EngineEvent]:
        events = self._engine.step()
        for event in events:
            if isinstance(event, RequestEnded) and event.error is not None:
                raise EngineError(event.error)
        return events

    def _until_ended(self, request_ids: set[str]) -> Iterator[EngineEvent]:
        """Yield events until these requests have ended."""
        while request_ids:
            for event in self._step():
                yield event
                if isinstance(event, RequestEnded):
                    request_ids.discard(event.request_id)


def _too_many(batch: int) -> ConfigError:
    return ConfigError(
        f"--kv-ram-bytes does not hold {batch} sequences at once; raise it, or lower "
        "--max-batch-sequences"
    )


def measure_engine(
    bench: EngineBench,
    *,
    max_prompt_tokens: int,
    max_batch: int,
    decodes: bool,
    seconds: float,
    clock: Clock,
    progress: Progress,
) -> EngineFigures:
    """Return T_prefill and T_decode, measured in about so many seconds.

    Args:
        bench: the engine.
        max_prompt_tokens: no prompt is longer.
        max_batch: the largest batch; with 1, 2, 4 ... below it.
        decodes: measure T_decode, too.
        seconds: for all of it. Two lengths and MIN_STEPS of each batch are measured in any case.
        clock: seconds.
        progress: told the stage.

    Raises:
        ConfigError: the context, the cache or the memory is too small to measure anything.
        EngineError: the engine failed.
    """
    share = PREFILL_SHARE if decodes else 1.0
    prefill, kv_bytes = _measure_prefill(
        bench, max_prompt_tokens, seconds * share, clock=clock, progress=progress
    )
    decode: list[Timing] = []
    context_tokens = 0
    if decodes:
        batches = [2**power for power in range(max_batch.bit_length()) if 2**power < max_batch]
        context_tokens = _decode_context(prefill, max_prompt_tokens, max_batch, seconds)
        progress("decode", 0, 1)
        decode = bench.decode([*batches, max_batch], context_tokens, seconds * (1 - share))
        progress("decode", 1, 1)
    return EngineFigures(
        prefill=tuple(prefill),
        decode=tuple(decode),
        decode_context_tokens=context_tokens,
        kv_bytes=tuple(kv_bytes),
    )


def _measure_prefill(
    bench: EngineBench,
    max_prompt_tokens: int,
    seconds: float,
    *,
    clock: Clock,
    progress: Progress,
) -> tuple[list[Timing], list[int]]:
    """Return T_prefill and the pages' bytes of lengths, each twice the one before, while there is time."""
    lengths = lengths_up_to(max_prompt_tokens)
    if len(lengths) < 2 or bench.prefill(lengths[1]) is None:  # which warms up, too
        raise ConfigError(
            f"a context of {max_prompt_tokens + 1} tokens and this cache are too small to measure"
        )
    began_s = clock()
    timings: list[Timing] = []
    kv_bytes: list[int] = []
    progress("prefill", 0, 100)
    for length in lengths:
        left_s = began_s + seconds - clock()
        if len(timings) >= 2 and MIN_RUNS * _expected_s(timings, length) > left_s:
            break
        runs: list[float] = []
        num_bytes = 0
        while len(runs) < MIN_RUNS or (
            len(runs) < MAX_RUNS and sum(runs) < SHARE_OF_LENGTH * seconds
        ):
            measured = bench.prefill(length)
            if measured is None:  # the cache is too small, and so it is for longer ones
                break
            run_s, num_bytes = measured
            runs.append(run_s)
            progress("prefill", min(99, round(100 * (clock() - began_s) / seconds)), 100)
        if len(runs) < MIN_RUNS:
            break
        timings.append(Timing(size=length, seconds=tuple(runs)))
        kv_bytes.append(num_bytes)
    progress("prefill", 100, 100)
    return timings, kv_bytes


def lengths_up_to(max_tokens: int) -> list[int]:
    """Return FIRST_TOKENS, twice that and so on, and the longest prompt unless it is near the last.

    Where there is no room for two, the shorter one is half of the longest.
    """
    lengths = [max(1, min(FIRST_TOKENS, max_tokens // 2))]
    while 2 * lengths[-1] <= max_tokens:
        lengths.append(2 * lengths[-1])
    if 1.25 * lengths[-1] < max_tokens:
        lengths.append(max_tokens)
    return lengths


def _expected_s(timings: Sequence[Timing], length: int) -> float:
    """Return what a run of the next length may take: it grows from length to length at least as before."""
    last, before = timings[-1], timings[-2]
    growth = max(last.median_s / before.median_s, length / last.size)
    return last.median_s * growth


def _decode_context(
    prefill: Sequence[Timing], max_prompt_tokens: int, max_batch: int, seconds: float
) -> int:
    """Return the context of decoding sequences: short enough to prefill them all in a part of the time."""
    context = min(DECODE_CONTEXT_TOKENS, max(1, max_prompt_tokens // 2))
    for timing in reversed(prefill):
        if timing.size <= context and timing.median_s * max_batch <= (1 - PREFILL_SHARE) * seconds:
            return timing.size
    return min(context, prefill[0].size)


def not_falling(values: Sequence[float]) -> list[float]:
    """Return the values nearest to these of which none is below the one before.

    Neighbours in the wrong order get their mean (pool adjacent violators).
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            other, num = pools.pop()
            mean, size = (mean * size + other * num) / (size + num), size + num
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]
