#!/usr/bin/env python
"""What the prefix cache costs and saves: TTFT of a repeated prompt, lookups, hashing, hit rates.

    scripts/bench/cache.py --json
    scripts/bench/cache.py --json --trace mooncake_conversation.jsonl

TTFT goes over the HTTP API of a real node: cold, again from RAM, again from disk after a restart, and
beside them what is left to compute: the prompt's uncached tail alone. Everything is a ratio to
something run beside it; both go in turn.
"""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp

from prfaas.cache.block_table import BlockTable
from prfaas.cache.hashing import block_keys
from prfaas.cache.options import CacheOptions
from prfaas.cache.prefix import PrefixCache
from prfaas.config.options import HttpOptions, LogOptions, ModelOptions, NodeConfig
from prfaas.config.traces import read_trace
from prfaas.engine.options import EngineOptions
from prfaas.log import configure_logging
from prfaas.server.app import serve
from prfaas.server.listening import bind_socket
from prfaas.server.pd import load_pd_node
from scripts.bench.cache_replay import ATTENTION, replay, sample

BLOCK_TOKENS = 64


def seconds(run: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# ------------------------------------------------------------ lookups and hashing


def lookup_figures(num_indexed: int, prompt_tokens: int, num_runs: int) -> dict[str, Any]:
    """Return the time of a lookup beyond hashing, and of hashing beside bare hashlib."""
    num_blocks = prompt_tokens // BLOCK_TOKENS
    layout = type(ATTENTION)(
        block_tokens=BLOCK_TOKENS,
        groups=tuple(
            type(spec)(
                **{name: getattr(spec, name) for name in spec.__slots__} | {"page_bytes": 64}
            )
            for spec in ATTENTION.groups
        ),
    )
    cache = PrefixCache(layout=layout, ram_bytes=64 * (num_indexed + 1), root=lambda _: bytes(32))
    tokens = tuple(range(prompt_tokens))
    keys = cache.block_keys(tokens, b"")
    others = [n.to_bytes(32, "big") for n in range(num_indexed - num_blocks)]
    for chain in [keys, *(others[n : n + 1024] for n in range(0, len(others), 1024))]:
        table = cache.lookup(chain, 1 << 30)
        for block in range(len(chain)):
            table.try_allocate(0, block)
            table.commit(0, block)
        table.release()

    def look_up() -> BlockTable:
        table = cache.find(keys, prompt_tokens + 1)
        assert isinstance(table, BlockTable)
        assert table.hit_tokens == prompt_tokens
        return table

    lookups, ours, bare = [], [], []
    for _ in range(num_runs):
        start = time.perf_counter()
        table = look_up()
        lookups.append(time.perf_counter() - start)
        table.release()
        ours.append(seconds(lambda: block_keys(bytes(32), tokens, BLOCK_TOKENS)))
        bare.append(seconds(lambda: bare_hashing(tokens)))
    return {
        "indexed_blocks": num_indexed,
        "prompt_tokens": prompt_tokens,
        "lookup_beyond_hashing_ms": round(1e3 * statistics.median(lookups), 3),
        "hashing_ms": round(1e3 * statistics.median(ours), 3),
        "hashlib_ms": round(1e3 * statistics.median(bare), 3),
        "hashing_ratio": round(
            statistics.median(a / b for a, b in zip(ours, bare, strict=True)), 3
        ),
    }


def bare_hashing(tokens: tuple[int, ...]) -> bytes:
    """Hash the same bytes in the same chain with hashlib alone."""
    data = array("I", tokens).tobytes()
    step, key = 4 * BLOCK_TOKENS, bytes(32)
    for start in range(0, len(data), step):
        key = hashlib.sha256(key + data[start : start + step]).digest()
    return key


# ------------------------------------------------------------ time to the first token


@asynccontextmanager
async def serving(model: Path, directory: Path) -> Any:
    """Run a node with a cache on disk; yield its URL."""
    with bind_socket("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    config = NodeConfig(
        model=ModelOptions(model=str(model), served_model_name="bench"),
        http=HttpOptions(port=port),
        engine=EngineOptions(dtype="float32", max_context_tokens=1 << 15),
        cache=CacheOptions(dir=str(directory), block_tokens=BLOCK_TOKENS),
        log=LogOptions(level="warning"),
    )
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(load_pd_node, config, on_ready=lambda *_: ready.set()))
        await ready.wait()
        yield f"http://127.0.0.1:{port}"
        os.kill(os.getpid(), signal.SIGTERM)


async def ttft_s(url: str, tokens: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token's event, and the prompt tokens that were reused."""
    body = {"model": "bench", "prompt": tokens, "max_tokens": 1, "temperature": 0}
    async with aiohttp.ClientSession() as session:
        start = time.perf_counter()
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            await response.read()
            elapsed_s = time.perf_counter() - start
            return elapsed_s, int(response.headers["X-Prfaas-Tokens-Reused"])


async def ttft_figures(model: Path, num_tokens: int, num_runs: int) -> dict[str, Any]:
    """Return TTFT cold, from RAM and from disk, beside the uncached tail alone."""
    tail = (num_tokens - 1) % BLOCK_TOKENS + 1
    figures: dict[str, list[float]] = {"cold": [], "ram": [], "disk": [], "tail": []}
    with tempfile.TemporaryDirectory() as directory:
        for run in range(num_runs):
            prompt = [5 + (i * i + run) % 250 for i in range(num_tokens)]
            async with serving(model, Path(directory)) as url:
                figures["cold"].append((await ttft_s(url, prompt))[0])
                for again in range(3):
                    took_s, reused = await ttft_s(url, prompt)
                    assert reused == num_tokens - tail, reused
                    figures["ram"].append(took_s)
                    short = [5 + (i * 7 + run + 97 * again) % 250 for i in range(tail)]
                    figures["tail"].append((await ttft_s(url, short))[0])
            async with serving(model, Path(directory)) as url:
                await ttft_s(url, prompt[:3])
                took_s, reused = await ttft_s(url, prompt)
                assert reused == num_tokens - tail, reused
                figures["disk"].append(took_s)
    medians = {name: statistics.median(times) for name, times in figures.items()}
    return {
        "prompt_tokens": num_tokens,
        "tail_tokens": tail,
        **{f"{name}_ttft_ms": round(1e3 * value, 2) for name, value in medians.items()},
        "ram_to_tail_ratio": round(medians["ram"] / medians["tail"], 3),
        "disk_to_ram_ratio": round(medians["disk"] / medians["ram"], 3),
        "cold_to_ram_ratio": round(medians["cold"] / medians["ram"], 2),
    }


# ------------------------------------------------------------ all of it


def hit_rates(trace: Path | None, num_prompts: int, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Yield hit rates on a trace, or on a sample like one."""
    prompts = sample(num_prompts)
    if trace is not None:
        prompts = [request.block_ids for request in read_trace(trace, "mooncake")][:num_prompts]
    for figures in replay(prompts, sizes):
        yield {"trace": "sample" if trace is None else trace.name, **figures}


def main() -> None:
    """Print the figures that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--model", type=Path, help="for TTFT; without one it is left out")
    parser.add_argument("--prompt-tokens", type=int, default=8191)
    parser.add_argument("--indexed-blocks", type=int, default=1_000_000)
    parser.add_argument("--trace", type=Path, action="append", help="Mooncake's JSON lines")
    parser.add_argument("--prompts", type=int, default=2000, help="of each trace")
    parser.add_argument("--pages", type=int, nargs="+", default=[2000, 8000, 32_000])
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    configure_logging(level="warning")
    report: dict[str, Any] = {
        "hit_rates": [
            rates
            for trace in options.trace or [None]
            for rates in hit_rates(trace, options.prompts, options.pages)
        ],
        "lookup": lookup_figures(options.indexed_blocks, 128 * 1024, 10 * options.runs),
    }
    if options.model is not None:
        report["ttft"] = asyncio.run(
            ttft_figures(options.model, options.prompt_tokens, options.runs)
        )
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for name, figures in report.items():
        for row in figures if isinstance(figures, list) else [figures]:
            print(name, *(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
