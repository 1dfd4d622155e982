"""TTFT of a repeated prompt over a node's HTTP API, beside the least that it has to do.

For each prompt: cold once, then from RAM several times, each beside the tail alone (hit_tail.py).
Then the node starts again twice on the same cache directory: first the files lie in the page cache,
then that is dropped. Beside them a plain file of as many bytes is read and its checksums are taken, with
O_DIRECT where the page cache was dropped.
"""

import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import O_DIRECT
from pathlib import Path
from typing import Any

from prfaas.text.tokenizer import Tokenizer
from scripts.bench.hit_node import RSS_PEAK, HitNode, running
from scripts.bench.hit_tail import TailEngine
from scripts.bench.store import Pages, checksum, drop_page_cache, plain_load

BLOCK_TOKENS = 64
RECORD_BYTES = 384 << 10
"""Of a plain file's pieces: a block of three layers of 128 KiB."""
WORDS = re.findall(
    r"\w+",
    """a long prompt is read by the node far away and its keys and values come back over the wire
    so that the first word of the answer is here before the coffee gets cold in the small cup""",
)


@dataclass(kw_only=True)
class Prompt:
    """A text and its tokens."""

    text: str
    tokens: list[int]

    @property
    def prefix_tokens(self) -> int:
        return (len(self.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(kw_only=True)
class Times:
    """Seconds, a list a figure."""

    cold: list[float] = field(default_factory=list)
    ram: list[float] = field(default_factory=list)
    tail: list[float] = field(default_factory=list)
    fill: list[float] = field(default_factory=list)
    tokenise: list[float] = field(default_factory=list)
    http: list[float] = field(default_factory=list)
    cached_disk: list[float] = field(default_factory=list)
    cached_plain: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)


def prompt_of(tokenizer: Tokenizer, seed: int, num_tokens: int) -> Prompt:
    """Return a prompt of `num_tokens` tokens, or as many fewer as the last word takes."""
    words = random.Random(seed).choices(WORDS, k=num_tokens)
    low, high = 1, num_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if len(tokenizer.encode(" ".join(words[:middle]), add_bos=True)) <= num_tokens:
            low = middle
        else:
            high = middle - 1
    text = " ".join(words[:low])
    return Prompt(text=text, tokens=tokenizer.encode(text, add_bos=True))


def seconds(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def hit(node: HitNode, prompt: Prompt, times: Times | None = None) -> float:
    """Ask again; the whole blocks must be found, and a token left."""
    answer = node.ask(prompt.text)
    if (answer.prompt_tokens, answer.tokens_reused) != (len(prompt.tokens), prompt.prefix_tokens):
        raise RuntimeError(f"{answer} of {len(prompt.tokens)} tokens is no whole hit")
    if times is not None:
        times.http.append(answer.ttft_s - answer.node_ttft_s)
    return answer.ttft_s


def measure_ram(
    node: HitNode,
    prompts: Sequence[Prompt],
    engine: TailEngine,
    tokenizer: Tokenizer,
    times: Times,
    num_hits: int,
) -> None:
    node.ask(prompts[0].text[:600])  # what only a first request takes
    for prompt in prompts:
        times.cold.append(node.ask(prompt.text).ttft_s)
        hit(node, prompt)
        tail = prompt.tokens[prompt.prefix_tokens :]
        engine.compute_s(tail)
        for _ in range(num_hits):
            times.ram.append(hit(node, prompt, times))
            tail_s, fill_s = engine.compute_s(tail)
            times.tail.append(tail_s)
            times.fill.append(fill_s)
            encode = partial(tokenizer.encode, prompt.text, add_bos=True)
            times.tokenise.append(seconds(encode))


def peak_bytes(node: HitNode, prompt: Prompt) -> int:
    """Return by how much the node grows while it serves a hit."""
    node.forget_peak()
    before_bytes = node.rss_bytes()
    hit(node, prompt)
    return node.rss_bytes(RSS_PEAK) - before_bytes


def measure_disk(
    node: HitNode, prompts: Sequence[Prompt], pages: Pages, plain: Path, flags: int
) -> tuple[list[float], list[float], int]:
    """Return the seconds of hits and of plain reads, and the bytes of one hit."""
    node.ask(prompts[0].text[:600][::-1])
    hits, reads = [], []
    before_bytes = node.read_bytes()
    for prompt in prompts:
        hits.append(hit(node, prompt))
        reads.append(seconds(partial(plain_load, plain, pages, flags)))
    return hits, reads, (node.read_bytes() - before_bytes) // len(prompts)


def write_plain(path: Path, num_bytes: int) -> Pages:
    """Write a file like a hit's bytes; return where it is read to."""
    record_bytes = min(RECORD_BYTES, num_bytes // 4096 * 4096)
    pages = Pages(record_bytes, 128 << 10, max(num_bytes, record_bytes))
    path.write_bytes(pages.arena)
    for parts in pages.records:
        checksum(parts)
    return pages


def hit_figures(
    model: Path, *, num_tokens: int, num_prompts: int, num_hits: int, num_threads: int
) -> dict[str, Any]:
    """Return the medians and ratios of one model."""
    tokenizer = Tokenizer.load(model)
    prompts = [prompt_of(tokenizer, seed, num_tokens) for seed in range(num_prompts)]
    engine = TailEngine(model, prompts[0].prefix_tokens, BLOCK_TOKENS, num_threads)
    times = Times()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        with running(model, work, num_threads) as node:
            measure_ram(node, prompts, engine, tokenizer, times, num_hits)
            grown_bytes = peak_bytes(node, prompts[-1])
        plain = work / "plain"
        pages = write_plain(plain, engine.num_bytes)
        plain_load(plain, pages)
        with running(model, work, num_threads) as node:
            times.cached_disk, times.cached_plain, read_bytes = measure_disk(
                node, prompts, pages, plain, 0
            )
        drop_page_cache([plain, *(work / "cache").rglob("*.seg")])
        with running(model, work, num_threads) as node:
            times.disk, times.plain, _ = measure_disk(node, prompts, pages, plain, O_DIRECT)
    return report(times, prompts[0]) | {
        "hit_bytes": read_bytes,
        "plain_bytes": pages.num_bytes,
        "grown_in_hit_bytes": grown_bytes,
        "working_copy_bytes": engine.working_copy_bytes(len(prompts[0].tokens)),
    }


def report(times: Times, prompt: Prompt) -> dict[str, Any]:
    """Return each figure's median in ms, and ratios of what ran side by side."""

    def median_ms(values: Sequence[float]) -> float:
        return round(1e3 * statistics.median(values), 2)

    def ratio(over: Sequence[float], under: Sequence[float]) -> float:
        return round(statistics.median(a / b for a, b in zip(over, under, strict=True)), 3)

    ram_s = statistics.median(times.ram)
    in_engine = [
        ram - http - tokenise
        for ram, http, tokenise in zip(times.ram, times.http, times.tokenise, strict=True)
    ]
    return {
        "prompt_tokens": len(prompt.tokens),
        "tail_tokens": len(prompt.tokens) - prompt.prefix_tokens,
        "num_prompts": len(times.cold),
        "num_hits": len(times.ram),
        "cold_ttft_ms": median_ms(times.cold),
        "ram_ttft_ms": median_ms(times.ram),
        "tail_ms": median_ms(times.tail),
        "fill_ms": median_ms(times.fill),
        "http_ms": median_ms(times.http),
        "tokenise_ms": median_ms(times.tokenise),
        "disk_cached_ttft_ms": median_ms(times.cached_disk),
        "plain_cached_ms": median_ms(times.cached_plain),
        "disk_ttft_ms": median_ms(times.disk),
        "plain_direct_ms": median_ms(times.plain),
        "ram_over_tail": ratio(times.ram, times.tail),
        "ram_without_http_and_tokenising_over_tail": ratio(in_engine, times.tail),
        "disk_cached_over_ram_and_plain": ratio(
            times.cached_disk, [ram_s + plain_s for plain_s in times.cached_plain]
        ),
        "disk_over_ram_and_plain": ratio(times.disk, [ram_s + plain_s for plain_s in times.plain]),
        "cold_over_ram": round(statistics.median(times.cold) / ram_s, 2),
    }
