#!/usr/bin/env python
"""Engine against transformers: prefill and decode tokens/s on the same weights, in the same run.

Both run in this process on the same threads, one after the other for each measurement, so that a
busy machine slows both; judge by `ratio_vs_transformers`. transformers gets a plain model of the
checkpoint in float32 with sdpa attention, and a dynamic cache; prfaas runs in the settings that
`prfaas serve` has by default, in chunks, and samples nothing in either.

    scripts/bench/engine.py --model gemma-3-270m --json
"""

import argparse
import inspect
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.engine.loader import Weights, load_model
from prfaas.engine.model import Model, Segment
from prfaas.engine.options import EngineOptions
from prfaas.engine.sequence_kv import SequenceKv
from prfaas.models.store import resolve

Dtype = Literal["float16", "float32"]
MEASURED_DTYPES = get_args(Dtype)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement; tokens/s are medians, the ratio is the median of the runs' ratios."""

    name: str
    context_tokens: int
    batch: int
    num_runs: int
    prfaas_tokens_per_s: float
    transformers_tokens_per_s: float
    ratio_vs_transformers: float


class Ours:
    """prfaas's engine."""

    def __init__(self, model: Model, chunk_tokens: int) -> None:
        self.model = model
        self.chunk_tokens = chunk_tokens

    def prefill(self, tokens: list[int], room: int) -> SequenceKv:
        kv = self.model.new_kv(capacity_tokens=len(tokens) + room)
        cuts = [*range(0, len(tokens), self.chunk_tokens), len(tokens)]
        for start, stop in pairwise(cuts):
            num_logits = int(stop == len(tokens))
            self.model.forward([Segment(kv=kv, tokens=tokens[start:stop], num_logits=num_logits)])
        return kv

    def decoder(self, tokens: list[int], batch: int, num_steps: int) -> Callable[[], object]:
        first = self.prefill(tokens, num_steps)
        kvs = [first, *(first.fork() for _ in range(batch - 1))]

        def step() -> object:
            segments = [Segment(kv=kv, tokens=tokens[:1], num_logits=1) for kv in kvs]
            return self.model.forward(segments).argmax(-1)

        return step


class Theirs:
    """transformers' model of the same weights."""

    def __init__(self, model_dir: Path) -> None:
        import transformers
        from transformers.initialization import no_init_weights

        self.transformers: Any = transformers
        fields = json.loads((model_dir / "config.json").read_text())
        config = transformers.AutoConfig.for_model(**fields)
        auto: Any = transformers.AutoModelForCausalLM
        weights = Weights(model_dir)
        with no_init_weights():
            model = auto.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        state = {name: weights.tensor(name) for name in weights.names}
        missing, unexpected = model.load_state_dict(state, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise RuntimeError(f"transformers wants {missing}, has no place for {unexpected}")
        model.tie_weights()
        self.model: Any = model.eval()
        # transformers 5.24 renamed the parameter and warns about the older name.
        accepted = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"

    def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return the last position's logits; the cache grows."""
        logits: torch.Tensor = self.model(
            ids, use_cache=True, logits_to_keep=1, **{self.cache_name: cache}
        ).logits
        return logits

    def prefill(self, tokens: list[int], batch: int = 1) -> Any:
        cache = self.transformers.DynamicCache(config=self.model.config)
        self.forward(torch.tensor([tokens] * batch), cache)
        return cache

    def decoder(self, tokens: list[int], batch: int) -> Callable[[], object]:
        cache = self.prefill(tokens, batch)
        ids = torch.tensor([tokens[:1]] * batch)

        def step() -> object:
            return self.forward(ids, cache).argmax(-1)

        return step


def seconds(run: Callable[[], object], repeat: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        run()
    return time.perf_counter() - start


def measure(
    row: Row, ours: Callable[[], object], theirs: Callable[[], object], num_tokens: int, steps: int
) -> Row:
    """Run both in turn `row.num_runs` times, after one unmeasured run of each."""
    ours()
    theirs()
    runs = [(seconds(ours, steps), seconds(theirs, steps)) for _ in range(row.num_runs)]
    return replace(
        row,
        prfaas_tokens_per_s=round(num_tokens / statistics.median(a for a, _ in runs), 1),
        transformers_tokens_per_s=round(num_tokens / statistics.median(b for _, b in runs), 1),
        ratio_vs_transformers=round(statistics.median(b / a for a, b in runs), 3),
    )


def blank_row(name: str, context_tokens: int, batch: int, num_runs: int) -> Row:
    return Row(
        name=name,
        context_tokens=context_tokens,
        batch=batch,
        num_runs=num_runs,
        prfaas_tokens_per_s=0.0,
        transformers_tokens_per_s=0.0,
        ratio_vs_transformers=0.0,
    )


def bench(ours: Ours, theirs: Theirs, args: argparse.Namespace) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    vocab_size = ours.model.config.vocab_size
    longest = max([*args.prefill, args.decode_context])
    tokens = torch.randint(3, vocab_size, (longest,), generator=generator).tolist()
    for length in args.prefill:
        prompt = tokens[:length]
        # A long prefill is steady in itself; short ones need more runs.
        num_runs = max(1, args.runs if length <= 2048 else args.runs // 2)
        yield measure(
            blank_row("prefill", length, 1, num_runs),
            partial(ours.prefill, prompt, 0),
            partial(theirs.prefill, prompt),
            length,
            steps=1,
        )
    for batch in args.decode_batch:
        prompt = tokens[: args.decode_context]
        num_steps = args.decode_steps * (args.runs + 1) + 1
        yield measure(
            blank_row("decode", args.decode_context, batch, args.runs),
            ours.decoder(prompt, batch, num_steps),
            theirs.decoder(prompt, batch),
            batch * args.decode_steps,
            args.decode_steps,
        )


@contextmanager
def threads(number: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    yield torch.get_num_threads()
    torch.set_num_threads(before)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="gemma-3-270m", help="a fetched name or a directory")
    parser.add_argument("--dtype", choices=MEASURED_DTYPES, default=EngineOptions().dtype)
    parser.add_argument("--threads", type=int, help="torch threads of both (default: torch's)")
    parser.add_argument("--chunk-tokens", type=int, default=EngineOptions().chunk_tokens)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048, 8192])
    parser.add_argument("--decode-batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--decode-context", type=int, default=512)
    parser.add_argument("--decode-steps", type=int, default=16, help="steps of one run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with threads(args.threads) as num_threads, torch.inference_mode():
        model_dir = resolve(args.model)
        ours = Ours(load_model(model_dir, dtype=args.dtype), args.chunk_tokens)
        theirs = Theirs(model_dir)
        settings = {
            "model": args.model,
            "threads": num_threads,
            "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "torch": torch.__version__,
            "prfaas": {
                "numerics": ours.model.numerics_fingerprint,
                "dtype": args.dtype,
                "chunk_tokens": args.chunk_tokens,
            },
            "transformers": {
                "version": theirs.transformers.__version__,
                "dtype": "float32",
                "attention": "sdpa",
            },
        }
        rows = []
        for row in bench(ours, theirs, args):
            rows.append(asdict(row))
            print(
                f"{row.name:8} context {row.context_tokens:5} batch {row.batch}: "
                f"{row.prfaas_tokens_per_s:7.1f} tokens/s, transformers "
                f"{row.transformers_tokens_per_s:7.1f}, ratio {row.ratio_vs_transformers:.2f}",
                file=sys.stderr if args.json else sys.stdout,
                flush=True,
            )
        if args.json:
            print(json.dumps(settings | {"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
