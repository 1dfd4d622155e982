#!/usr/bin/env python
"""The engine beside others: prefill and decode tokens/s on the same weights, in the same run.

Every engine has a process of its own, which is stopped while another is measured. A round runs prfaas
and a peer in turn, one pair for each peer, so that a busy machine slows both: judge by the ratios, each the
median of the rounds' own. The prompt is a text; decoding is greedy. prfaas runs in the settings that `prfaas serve` has by default, transformers in
float32, llama.cpp with the GGUF file that the weights came from, vLLM in float32. Peers that are not
installed are left out, with what installs them.

    scripts/bench/engine.py --json
    scripts/bench/engine.py --peer llama.cpp --peer vllm --json
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.engine.options import EngineOptions
from prfaas.models.store import resolve
from prfaas.text.tokenizer import Tokenizer
from scripts.bench.engine_peers import DEFAULT_PEERS, PEERS, Setup, default_peers_dir, started
from scripts.bench.engine_pipe import EngineProcess
from scripts.bench.quality import windows_of

WARM_TOKENS = 2048
"""A longer prompt's unmeasured run is cut to it, and it has half of the rounds: it is steady in itself."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is measured: a prompt, or steps of a batch behind one."""

    name: Literal["prefill", "decode"]
    context_tokens: int
    batch: int
    num_rounds: int
    num_steps: int
    """Of one run."""

    @property
    def num_tokens(self) -> int:
        """That one run computes."""
        return self.context_tokens if self.name == "prefill" else self.batch * self.num_steps


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task; tokens/s are medians, the ratios the medians of the rounds' ratios, by peer."""

    name: str
    context_tokens: int
    batch: int
    num_rounds: int
    tokens_per_s: dict[str, float]
    ratio_vs: dict[str, float]
    ratio_range_vs: dict[str, tuple[float, float]]
    """The least and the largest of the rounds."""


def tasks(args: argparse.Namespace) -> Iterator[Task]:
    for length in args.prefill:
        rounds = args.rounds if length <= WARM_TOKENS else max(1, args.rounds // 2)
        yield Task(name="prefill", context_tokens=length, batch=1, num_rounds=rounds, num_steps=1)
    behind = [(args.decode_context, batch) for batch in args.decode_batch]
    for context, batch in [*behind, *((context, 1) for context in args.decode_after)]:
        yield Task(
            name="decode",
            context_tokens=context,
            batch=batch,
            num_rounds=args.rounds,
            num_steps=args.decode_steps,
        )


def measure(
    task: Task, tokens: Sequence[int], ours: EngineProcess, peers: Sequence[EngineProcess]
) -> Row:
    """Run prfaas and each peer in turn, after one unmeasured run of each."""
    prompt = list(tokens[: task.context_tokens])
    engines = [ours, *peers]
    for engine in engines:
        if task.name == "prefill":
            engine.run("prefill", prompt[:WARM_TOKENS])
        else:
            # prfaas runs once for every peer, and all once before.
            num_runs = task.num_rounds * max(1, len(peers)) + 1
            engine.run("begin", prompt, task.batch, task.num_steps * num_runs)
            engine.run("step", repeat=task.num_steps)

    def seconds(engine: EngineProcess) -> float:
        if task.name == "prefill":
            return engine.run("prefill", prompt)
        return engine.run("step", repeat=task.num_steps)

    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    ratios: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for _ in range(task.num_rounds):
        for peer in peers:
            our_s, peer_s = seconds(ours), seconds(peer)
            times[ours.name].append(our_s)
            times[peer.name].append(peer_s)
            ratios[peer.name].append(peer_s / our_s)
        if not peers:
            times[ours.name].append(seconds(ours))
    if task.name == "decode":
        for engine in engines:
            engine.run("end")
    return Row(
        name=task.name,
        context_tokens=task.context_tokens,
        batch=task.batch,
        num_rounds=task.num_rounds,
        tokens_per_s={
            name: round(task.num_tokens / statistics.median(of), 1) for name, of in times.items()
        },
        ratio_vs={name: round(statistics.median(of), 3) for name, of in ratios.items()},
        ratio_range_vs={
            name: (round(min(of), 3), round(max(of), 3)) for name, of in ratios.items()
        },
    )


def line(row: Row) -> str:
    text = f"{row.name:8} context {row.context_tokens:5} batch {row.batch:2}:"
    text += f" {row.tokens_per_s['prfaas']:7.1f} tokens/s"
    for peer, ratio in row.ratio_vs.items():
        low, high = row.ratio_range_vs[peer]
        text += f" | {peer} {row.tokens_per_s[peer]:.1f}, ratio {ratio:.2f} ({low:.2f}-{high:.2f})"
    return text


def parse(argv: list[str] | None) -> argparse.Namespace:
    options = EngineOptions()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gemma-3-270m", help="a fetched name or a directory")
    parser.add_argument(
        "--peer",
        action="append",
        choices=PEERS,
        help=f"again for more ({', '.join(DEFAULT_PEERS)})",
    )
    parser.add_argument("--no-peers", action="store_true", help="prfaas alone")
    parser.add_argument(
        "--peers-dir",
        type=Path,
        default=default_peers_dir(),
        help="has an environment for each peer, named like it (%(default)s)",
    )
    parser.add_argument("--dtype", default=options.weight_dtype, help="prfaas's (%(default)s)")
    parser.add_argument("--chunk-tokens", type=int, default=options.chunk_tokens)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048, 8192])
    parser.add_argument("--decode-batch", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--decode-context", type=int, default=512)
    parser.add_argument(
        "--decode-after", type=int, nargs="*", default=[8192], help="contexts, one sequence each"
    )
    parser.add_argument("--decode-steps", type=int, default=16, help="of one run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser.parse_args(argv)


def settings(
    args: argparse.Namespace, engines: Sequence[EngineProcess], missing: dict[str, str]
) -> dict[str, Any]:
    return {
        "model": args.model,
        "threads": args.threads,
        "machine": platform.machine(),
        "load_average": os.getloadavg(),
        "engines": {engine.name: engine.about for engine in engines},
        "missing": missing,
    }


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    longest = max([*args.prefill, args.decode_context, *args.decode_after])
    [tokens] = windows_of(Tokenizer.load(resolve(args.model)), 1, longest)
    peers = [] if args.no_peers else list(dict.fromkeys(args.peer or DEFAULT_PEERS))
    num_runs = args.rounds * max(1, len(peers)) + 1
    setup = Setup(
        model=args.model,
        dtype=args.dtype,
        chunk_tokens=args.chunk_tokens,
        num_threads=args.threads,
        max_tokens=len(tokens) + num_runs * args.decode_steps + 128,
        peers_dir=args.peers_dir,
    )
    with started(peers, setup) as (ours, others, missing):
        found = settings(args, [ours, *others], missing)
        rows = []
        for task in tasks(args):
            row = measure(task, tokens, ours, others)
            rows.append(asdict(row))
            print(line(row), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        print(json.dumps(found | {"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
