"""Prefill beside decode in one engine, and the event loop beside torch: parts of sharing.py."""

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

import torch

from prfaas.bench.load_report import quantile
from prfaas.cache.hashing import root_key
from prfaas.cache.prefix import PrefixCache
from prfaas.engine.model import Model, Segment
from prfaas.engine.options import EngineOptions
from prfaas.engine.runner import Runner
from prfaas.engine.submission import EngineEvent, Submission
from prfaas.types import Request, RequestEnded, SamplingParams, TokenEvent

BLOCK_TOKENS = 64
CACHE_BYTES = 1 << 30
ALONE_STEPS = 8
NAP_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """A prompt beside sequences that decode, in chunks of one size; medians of the rounds."""

    chunk_tokens: int
    num_decoding: int
    prompt_tokens: int
    num_rounds: int
    prefill_alone_tokens_per_s: float
    itl_alone_ms: float
    ttft_s: float
    itl_p50_ms: float
    """While the prompt is computed; every sequence has a token each step."""
    itl_max_ms: float
    decode_tokens_per_s: float
    """Of all sequences together, meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Lag:
    """How late an event loop woke that slept for 2 ms again and again."""

    beside: str
    threads: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class Mixed:
    """One engine, with sequences that decode and prompts that come in between."""

    def __init__(self, model: Model, chunk_tokens: int) -> None:
        layout = model.layout(BLOCK_TOKENS)
        self.cache = PrefixCache(
            layout=layout,
            ram_bytes=CACHE_BYTES,
            root=lambda salt: root_key(
                model_fingerprint=model.model_fingerprint,
                numerics_fingerprint=model.numerics_fingerprint,
                kv_dtype=model.kv_dtype,
                layout=layout,
                salt=salt,
            ),
        )
        options = replace(
            EngineOptions(), chunk_tokens=chunk_tokens, mixed_chunk_tokens=chunk_tokens
        )
        self.runner = Runner(
            model=model, cache=self.cache, options=options, clock=time.perf_counter
        )
        self._vocab = range(3, model.config.vocab_size)
        self._random = Random(0)
        self._ids = count()

    def submit(self, num_tokens: int, max_tokens: int) -> str:
        number = next(self._ids)
        sampling = SamplingParams(max_tokens=max_tokens, seed=number)
        request = Request(
            request_id=str(number),
            prompt_tokens=tuple(self._random.choices(self._vocab, k=num_tokens)),
            sampling=sampling,
            cache_salt=number.to_bytes(8, "big"),
        )
        keys = self.cache.block_keys(request.prompt_tokens, request.cache_salt)
        table = self.cache.lookup(keys, num_tokens, salt=request.cache_salt, is_counted=False)
        self.runner.submit(Submission(request=request, table=table))
        return request.request_id

    def step(self) -> tuple[list[EngineEvent], float]:
        began_s = time.perf_counter()
        events = self.runner.step()
        seconds = time.perf_counter() - began_s
        for event in events:
            if isinstance(event, RequestEnded) and event.error is not None:
                raise RuntimeError(event.error)
        return events, seconds

    def steps_to_first(self, request_ids: set[str]) -> list[float]:
        """Step until each of these requests has a token; return what the steps took."""
        taken_s, waiting = [], set(request_ids)
        while waiting:
            events, seconds = self.step()
            taken_s.append(seconds)
            waiting -= {event.request_id for event in events if isinstance(event, TokenEvent)}
        return taken_s

    def abort(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            self.runner.abort(request_id)
        while self.runner.has_work:
            self.step()


@dataclass(frozen=True, kw_only=True)
class _Round:
    alone_s: float
    itl_alone_s: float
    steps_s: list[float]


def _round(mixed: Mixed, num_decoding: int, context_tokens: int, prompt_tokens: int) -> _Round:
    alone = {mixed.submit(prompt_tokens, 1)}
    alone_s = sum(mixed.steps_to_first(alone))
    mixed.abort(alone)
    decoding = {mixed.submit(context_tokens, prompt_tokens) for _ in range(num_decoding)}
    mixed.steps_to_first(decoding)
    itl_alone_s = statistics.median(mixed.step()[1] for _ in range(ALONE_STEPS))
    prompt = mixed.submit(prompt_tokens, 1)
    steps_s = mixed.steps_to_first({prompt})
    mixed.abort(decoding | {prompt})
    return _Round(alone_s=alone_s, itl_alone_s=itl_alone_s, steps_s=steps_s)


def chunkings(
    model: Model,
    chunk_sizes: list[int],
    *,
    num_decoding: int,
    context_tokens: int,
    prompt_tokens: int,
    num_rounds: int,
) -> Iterator[Chunking]:
    """Measure all sizes in turn, round by round, after a short one that is not counted."""
    engines = {size: Mixed(model, size) for size in chunk_sizes}
    for mixed in engines.values():
        _round(mixed, 1, BLOCK_TOKENS, min(prompt_tokens, 4 * BLOCK_TOKENS))
    rounds: dict[int, list[_Round]] = {size: [] for size in chunk_sizes}
    for _ in range(num_rounds):
        for size, mixed in engines.items():
            rounds[size].append(_round(mixed, num_decoding, context_tokens, prompt_tokens))
    for size, found in rounds.items():
        ttft_s = statistics.median(sum(each.steps_s) for each in found)
        num_steps = len(found[0].steps_s)
        yield Chunking(
            chunk_tokens=size,
            num_decoding=num_decoding,
            prompt_tokens=prompt_tokens,
            num_rounds=num_rounds,
            prefill_alone_tokens_per_s=round(
                prompt_tokens / statistics.median(each.alone_s for each in found), 1
            ),
            itl_alone_ms=_ms(statistics.median(each.itl_alone_s for each in found)),
            ttft_s=round(ttft_s, 3),
            itl_p50_ms=_ms(statistics.median(s for each in found for s in each.steps_s)),
            itl_max_ms=_ms(statistics.median(max(each.steps_s) for each in found)),
            decode_tokens_per_s=round(num_decoding * num_steps / ttft_s, 1),
        )


def lags(model: Model, threads: list[int], seconds: float) -> Iterator[Lag]:
    """Measure the loop alone, then beside a thread that prefills without a pause."""
    yield _lag("nothing", 0, asyncio.run(_naps(seconds)))
    for number in threads:
        is_over = threading.Event()
        engine = threading.Thread(target=_prefill_until, args=(model, number, is_over))
        engine.start()
        try:
            late_s = asyncio.run(_naps(seconds))
        finally:
            is_over.set()
            engine.join()
        yield _lag("prefill", number, late_s)


def _prefill_until(model: Model, num_threads: int, is_over: threading.Event) -> None:
    torch.set_num_threads(num_threads)
    chunk = [3] * EngineOptions().chunk_tokens
    while not is_over.is_set():
        kv = model.new_kv(capacity_tokens=len(chunk))
        model.forward([Segment(kv=kv, tokens=chunk, num_logits=1)])


async def _naps(seconds: float) -> list[float]:
    late_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < end_s:
        await asyncio.sleep(NAP_S)
        late_s.append(time.perf_counter() - began_s - NAP_S)
    return sorted(late_s)


def _lag(beside: str, threads: int, late_s: list[float]) -> Lag:
    p50, p99 = (_ms(quantile(late_s, part)) for part in (0.5, 0.99))
    return Lag(beside=beside, threads=threads, p50_ms=p50, p99_ms=p99, max_ms=_ms(late_s[-1]))


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
