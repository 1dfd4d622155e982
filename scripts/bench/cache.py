#!/usr/bin/env python
"""What the prefix cache costs and saves: TTFT of a repeated prompt, the disk, lookups, hit rates.

    scripts/bench/cache.py --json --model gemma-3-270m
    scripts/bench/cache.py --json --only ttft --tiny kimi_linear qwen3_next minimax
    scripts/bench/cache.py --json --trace mooncake_conversation.jsonl
    scripts/bench/cache.py --quick

ttft goes over the HTTP API of one `prfaas serve` process in its default settings: a text sent again,
served from RAM, and from disk after a restart. Beside a hit runs the tail alone: the same engine, in
this process, with keys, values and states of the cached tokens in its working copy already, computes
the same uncached tokens and draws one. docs/observability.md says what each figure is. Everything is
a ratio to something run beside it, in turn, so that a busy machine slows both.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.log import configure_logging
from scripts.bench.cache_replay import prompts_of, replay, sample
from scripts.bench.lookup import lookup_figures
from scripts.bench.store import Pages, throughput

PARTS = ("ttft", "store", "lookup", "hit_rates")
QUICK = {
    "prompt_tokens": 1024,
    "runs": 1,
    "hits": 2,
    "indexed_blocks": 4000,
    "prompts": 100,
    "pages": [2000],
    "total_mib": 8,
}
RECORD_BYTES, PAGE_BYTES = 384 << 10, 128 << 10
"""Of a block of the default model's full attention."""


def ttft(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield TTFT of hits beside the tail alone, of each model."""
    from prfaas.models.store import resolve  # loads torch
    from scripts.bench.hit_times import hit_figures
    from tests.tiny_models import write_tiny_model

    def figures(model: str) -> dict[str, Any]:
        return hit_figures(
            resolve(model),
            num_tokens=options.prompt_tokens,
            num_prompts=options.runs,
            num_hits=options.hits,
            num_threads=options.threads,
        )

    for model in options.model:
        yield {"model": model, **figures(model)}
    for family in options.tiny:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / family
            write_tiny_model(path, family)
            yield {"model": f"tiny {family}", **figures(str(path))}


def store(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the disk tier's store and load in GB/s beside a plain file with the same checksum."""
    pages = Pages(RECORD_BYTES, PAGE_BYTES, options.total_mib << 20)
    with tempfile.TemporaryDirectory() as directory:
        for row in throughput(Path(directory), pages, RECORD_BYTES, options.runs):
            yield asdict(row)


def lookup(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what finding a long prompt costs."""
    prompt_tokens = min(128_000, 16 * options.indexed_blocks)  # a quarter of the index
    yield lookup_figures(options.indexed_blocks, prompt_tokens, 20 * options.runs)


def hit_rates(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield hit rates on traces, or on a sample like one."""
    for trace in options.trace or [None]:
        prompts = sample(options.prompts) if trace is None else prompts_of(trace, options.prompts)
        for figures in replay(prompts, options.pages):
            yield {"trace": "sample" if trace is None else trace.name, **figures}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="seconds, on a tiny model")
    parser.add_argument("--model", nargs="+", default=[], help="names or directories, for ttft")
    parser.add_argument("--tiny", nargs="+", default=[], help="families of tiny models, for ttft")
    parser.add_argument("--prompt-tokens", type=int, help="8192: its tail has 64")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of node and tail")
    parser.add_argument("--runs", type=int, help="prompts of ttft, runs of the others: 3")
    parser.add_argument("--hits", type=int, help="from RAM, of each prompt: 5")
    parser.add_argument("--indexed-blocks", type=int, help="for lookup: 1,000,000")
    parser.add_argument("--trace", type=Path, action="append", help="Mooncake's JSON lines")
    parser.add_argument("--prompts", type=int, help="of each trace: 2000")
    parser.add_argument("--pages", type=int, nargs="+", help="of the cache: 2000 8000 32000")
    parser.add_argument("--total-mib", type=int, help="of a run of store: 256")
    full = {
        "prompt_tokens": 8192,
        "runs": 3,
        "hits": 5,
        "indexed_blocks": 1_000_000,
        "prompts": 2000,
        "pages": [2000, 8000, 32_000],
        "total_mib": 256,
    }
    options = parser.parse_args(argv)
    for name, value in (QUICK if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.quick and not options.model:
        options.tiny = options.tiny or ["gemma3"]
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    configure_logging(level="warning")
    measures: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
        "ttft": ttft,
        "store": store,
        "lookup": lookup,
        "hit_rates": hit_rates,
    }
    report: dict[str, Any] = {"threads": options.threads}
    for part in options.only:
        report[part] = []
        for row in measures[part](options):
            report[part].append(row)
            if not options.json:
                print(part, *(f"{name}={value}" for name, value in row.items()), flush=True)
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
