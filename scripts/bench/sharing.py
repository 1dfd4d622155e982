#!/usr/bin/env python
"""Who shares a machine, and what it costs: two nodes, prefill beside decode, the event loop beside torch.

- two nodes: two engines in processes of their own compute at once, with all cores as threads each and with
  half of them; `shares` are their speeds over that of one alone with all cores, whose sum is 1 if nothing is lost.
- chunks: a prompt is computed in chunks while sequences decode in the same engine: its TTFT, and their ITL.
- loop: how late an event loop wakes while the engine's thread prefills.

The recommendation comes from these figures: threads of each of two nodes; of the chunk sizes the smallest whose
prefill alone is within 5% of the fastest; beside decodes the one at which tokens wait least.

    scripts/bench/sharing.py --json
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.engine.loader import load_model
from prfaas.engine.options import EngineOptions
from prfaas.models.store import resolve
from scripts.bench.engine_peers import Setup, default_peers_dir, ours_command
from scripts.bench.engine_pipe import EngineProcess
from scripts.bench.sharing_node import Chunking, Lag, chunkings, lags

PARTS = ("nodes", "chunks", "loop")
WORKS = ("prefill", "decode")
PAIRS = (("prefill", "prefill"), ("prefill", "decode"), ("decode", "decode"))
GOOD_ENOUGH = 0.95
TOKEN = 3


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two engines at once; medians of the rounds."""

    works: tuple[str, str]
    threads_each: int
    shares: tuple[float, float]


class Two:
    """Two engines with equal threads; each has a sequence to decode."""

    def __init__(self, undo: ExitStack, setup: Setup, args: argparse.Namespace) -> None:
        work = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        self.num_threads = setup.num_threads
        self._prompt = [TOKEN] * args.prompt_tokens
        self.engines = []
        for number in range(2):
            log = work / f"{number}.log"
            engine = EngineProcess(f"node {number}", ours_command(setup), log, setup.num_threads)
            undo.callback(engine.close)
            self.engines.append(engine)

    def begin(self, num_steps: int) -> None:
        for engine in self.engines:
            engine.run("begin", self._prompt, 1, num_steps)

    def alone(self, work: str, repeat: int) -> float:
        """Return seconds of one call by the first engine."""
        return self.engines[0].run(*self._ask(work), repeat=repeat) / repeat

    def together(self, works: Sequence[str], repeats: Sequence[int]) -> list[float]:
        """Return seconds of one call by each."""
        for engine, work, repeat in zip(self.engines, works, repeats, strict=True):
            engine.start(*self._ask(work), repeat=repeat)
        return [
            engine.wait() / repeat for engine, repeat in zip(self.engines, repeats, strict=True)
        ]

    def _ask(self, work: str) -> list[Any]:
        return ["prefill", self._prompt] if work == "prefill" else ["step"]


def pairs(setup: Setup, args: argparse.Namespace) -> Iterator[Pair]:
    """Measure all pairs at all threads, after what one alone with all cores takes, in every round."""
    cores = setup.num_threads
    with ExitStack() as undo:
        ways = [Two(undo, setup, args)]
        if cores > 1:
            ways.append(Two(undo, replace(setup, num_threads=cores // 2), args))
        first = ways[0]
        for two in ways:
            two.begin(0)
        step_s, prompt_s = _calibrated(first)
        repeats = {"prefill": args.repeat, "decode": max(1, round(args.repeat * prompt_s / step_s))}
        num_steps = repeats["decode"] * (3 * args.rounds + 1) + 64
        for two in ways:
            two.begin(num_steps)
        found: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for _ in range(args.rounds):
            alone_s = {work: first.alone(work, repeats[work]) for work in WORKS}
            for (index, two), (number, works) in product(enumerate(ways), enumerate(PAIRS)):
                times = two.together(works, [repeats[work] for work in works])
                shares = tuple(alone_s[w] / s for w, s in zip(works, times, strict=True))
                found.setdefault((index, number), []).append((shares[0], shares[1]))
    for (index, number), all_shares in found.items():
        one, other = (round(statistics.median(of), 3) for of in zip(*all_shares, strict=True))
        yield Pair(
            works=PAIRS[number],
            threads_each=ways[index].num_threads,
            shares=(one, other),
        )


def _calibrated(two: Two) -> tuple[float, float]:
    """Return about the seconds of a step and of a prompt."""
    two.alone("prefill", 1)
    prompt_s = two.alone("prefill", 1)
    two.begin(8)
    two.alone("decode", 2)
    return two.alone("decode", 4), prompt_s


def recommended(
    both: Sequence[Pair], sizes: Sequence[Chunking], late: Sequence[Lag]
) -> dict[str, Any]:
    """Return what the figures say, of those parts that were measured."""
    found: dict[str, Any] = {}
    if both:
        sums = {
            threads: statistics.fmean(sum(p.shares) for p in both if p.threads_each == threads)
            for threads in {pair.threads_each for pair in both}
        }
        found["threads_of_each_of_two_nodes"] = max(sums, key=lambda threads: sums[threads])
    if sizes:
        fastest = max(size.prefill_alone_tokens_per_s for size in sizes)
        enough = [s for s in sizes if s.prefill_alone_tokens_per_s >= GOOD_ENOUGH * fastest]
        found["chunk_tokens"] = min(size.chunk_tokens for size in enough)
        found["mixed_chunk_tokens"] = min(sizes, key=lambda size: size.itl_p50_ms).chunk_tokens
    beside = [lag for lag in late if lag.threads]
    if beside:
        found["loop_p99_ms_at_all_threads"] = beside[0].p99_ms
    return found


def line(row: Pair | Chunking | Lag) -> str:
    match row:
        case Pair():
            one, other = row.shares
            return (
                f"{row.works[0]} beside {row.works[1]}, {row.threads_each} threads each:"
                f" {one:.2f} + {other:.2f} = {one + other:.2f} of one alone"
            )
        case Chunking():
            return (
                f"chunks of {row.chunk_tokens:4}: prefill {row.prefill_alone_tokens_per_s:.0f} tokens/s"
                f" alone; beside {row.num_decoding} sequences TTFT {row.ttft_s:.2f} s, ITL"
                f" {row.itl_p50_ms:.0f} ms (max {row.itl_max_ms:.0f}, alone {row.itl_alone_ms:.0f})"
            )
        case Lag():
            return (
                f"loop beside {row.beside}, {row.threads} threads: late by {row.p50_ms} ms (P50),"
                f" {row.p99_ms} (P99), {row.max_ms} (max)"
            )


def parse(argv: list[str] | None) -> argparse.Namespace:
    options = EngineOptions()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gemma-3-270m", help="a fetched name or a directory")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="all")
    parser.add_argument(
        "--chunk-tokens", type=int, nargs="*", default=[64, 192, 384, options.chunk_tokens, 1152]
    )
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of two nodes' prompts")
    parser.add_argument("--long-tokens", type=int, default=2304, help="of the prompt in chunks")
    parser.add_argument("--decoding", type=int, default=4, help="sequences beside it")
    parser.add_argument("--repeat", type=int, default=2, help="prompts of one run of a node")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each look at the loop")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    found: dict[str, list[Any]] = {part: [] for part in PARTS}

    def add(part: str, rows: Iterator[Any]) -> None:
        for row in rows:
            found[part].append(row)
            print(line(row), file=sys.stderr if args.json else sys.stdout, flush=True)

    options = EngineOptions()
    setup = Setup(
        model=args.model,
        dtype=options.weight_dtype,
        chunk_tokens=options.chunk_tokens,
        num_threads=args.threads,
        max_tokens=0,
        peers_dir=default_peers_dir(),
    )
    if "nodes" in args.parts:
        add("nodes", pairs(setup, args))
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    if "chunks" in args.parts or "loop" in args.parts:
        model = load_model(resolve(args.model), dtype=options.weight_dtype)
        if "chunks" in args.parts:
            sizes = chunkings(
                model,
                args.chunk_tokens,
                num_decoding=args.decoding,
                context_tokens=args.prompt_tokens,
                prompt_tokens=args.long_tokens,
                num_rounds=args.rounds,
            )
            add("chunks", sizes)
        if "loop" in args.parts:
            threads = sorted({args.threads, max(1, args.threads - 1)}, reverse=True)
            add("loop", lags(model, threads, args.seconds))
    torch.set_num_threads(before)
    advice = recommended(found["nodes"], found["chunks"], found["loop"])
    print(f"recommended: {advice}", file=sys.stderr if args.json else sys.stdout)
    if args.json:
        rows = {part: [asdict(row) for row in of] for part, of in found.items()}
        head = {"model": args.model, "threads": args.threads, "load_average": os.getloadavg()}
        print(json.dumps(head | rows | {"recommended": advice}, indent=2))


if __name__ == "__main__":
    main()
