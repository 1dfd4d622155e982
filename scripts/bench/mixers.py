#!/usr/bin/env python
"""One layer's mixer of every kind, and its experts: prefill tokens/s, beside transformers and a plain recurrence.

Each is measured with its projections, in float32, without norms and what else is around it: prfaas's in
pieces as `prfaas serve` computes a prompt, states or KV kept; transformers' in one call with its torch
fallback, nothing kept, where it has the family; and the recurrence token by token in plain torch
(mixer_sequential.py), on short prompts. All run in this process on the same threads, in turn, so that
a busy machine slows all; judge by the ratios. Weights are random, of equal shapes.

`decode` is the time of one token, projections included. `growth` is the time of the longest prompt over that of an eighth of it, divided by 8: 1 is linear.

    scripts/bench/mixers.py --json
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.engine.batch import Batch, Rows, Segment
from prfaas.engine.config import model_from_hf
from prfaas.engine.linear import ExactPacking, Packing
from prfaas.engine.loading.build import build_model
from prfaas.engine.options import EngineOptions
from prfaas.engine.sequence_kv import SequenceKv
from scripts.bench.mixer_families import FAMILIES, SHARED, Family
from scripts.bench.mixer_sequential import Run, sequential

DECODE_TOKENS = 32
SEQUENTIAL_TOKENS = 2048
"""Longer prompts are not walked: the time of a token does not change."""
WARM_TOKENS = 1024
SEQUENTIAL_WARM_TOKENS = 32


class RandomTensors:
    """A checkpoint of random tensors, as the loader asks for them."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def has(self, name: str) -> bool:
        return not name.endswith("_blocks")

    def take(self, name: str, *shape: int) -> Tensor:
        if len(shape) == 1:
            return torch.rand(shape, generator=self._generator)
        weight = torch.randn(shape, generator=self._generator)
        return weight.mul_(shape[-1] ** -0.5)


class Ours:
    """prfaas's mixer of a family."""

    def __init__(self, family: Family, packing: Packing, chunk_tokens: int) -> None:
        spec = model_from_hf(SHARED | family.config)
        model = build_model(spec, RandomTensors(), packing, model_fingerprint="")
        layer = model.layers[family.layer]
        self.mixer, self.ffn = layer.mixer, layer.ffn if family.part == "ffn" else None
        self.spec = spec.layers[family.layer]
        self.chunk_tokens = chunk_tokens

    def prefill(self, x_TD: Tensor) -> None:
        if self.ffn is not None:
            for chunk_TD in torch.split(x_TD, self.chunk_tokens):
                self.ffn(chunk_TD)
            return
        kv = SequenceKv([self.spec], capacity_tokens=len(x_TD), block_tokens=64)
        for start, stop in pairwise([*range(0, len(x_TD), self.chunk_tokens), len(x_TD)]):
            self._forward(kv, x_TD[start:stop])

    def decode(self, x_TD: Tensor) -> None:
        """Take all rows one by one."""
        kv = SequenceKv([self.spec], capacity_tokens=len(x_TD), block_tokens=64)
        for row_1D in torch.split(x_TD, 1):
            self._forward(kv, row_1D)

    def _forward(self, kv: SequenceKv, x_TD: Tensor) -> None:
        segment = Segment(kv=kv, tokens=[0] * len(x_TD), num_logits=0)
        kv.begin_forward(())
        assert self.mixer is not None
        self.mixer(x_TD, Rows(Batch([segment])), 0, lambda _: None)
        kv.num_tokens += len(x_TD)


class Theirs:
    """transformers' mixer of a family."""

    def __init__(self, family: Family) -> None:
        import transformers

        self.version: str = transformers.__version__
        config = transformers.AutoConfig.for_model(**(SHARED | family.config))
        config._attn_implementation = "sdpa"  # noqa: SLF001
        torch.manual_seed(0)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32).eval().model
        assert family.attribute is not None
        self.mixer: Any = getattr(model.layers[family.layer], family.attribute)
        self.name = family.name
        self.model: Any = model
        self.window_tokens = int(family.config.get("sliding_window", 0))

    def prefiller(self, x_TD: Tensor) -> Callable[[], object]:
        x_1TD = x_TD[None]
        match self.name:
            case "lightning":
                return lambda: self.mixer(x_1TD, None, None)
            case "mla":
                return lambda: self.mixer(x_1TD, attention_mask=None)
            case "swa":
                positions = torch.arange(len(x_TD))
                turns = self.model.rotary_emb(x_1TD, positions[None], "sliding_attention")
                distance = positions[:, None] - positions
                mask = ((distance >= 0) & (distance < self.window_tokens))[None, None]
                return lambda: self.mixer(x_1TD, position_embeddings=turns, attention_mask=mask)
            case _:
                return lambda: self.mixer(x_1TD)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement; tokens/s are medians, the ratio is the median of the runs' ratios."""

    name: str
    tokens: int
    num_runs: int
    prfaas_tokens_per_s: float
    transformers_tokens_per_s: float | None
    ratio_vs_transformers: float | None
    transformers_left_out: str | None
    sequential_tokens_per_s: float | None
    """Of the recurrence, token by token in plain torch; None: there is none, or the prompt is long."""
    ratio_vs_sequential: float | None


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The median time of the longer prompt over that of the shorter, over that of their lengths."""

    name: str
    tokens: int
    longer_tokens: int
    num_runs: int
    growth: float
    is_linear: bool


@dataclass(frozen=True, kw_only=True)
class Decode:
    """What a decoded token costs in one layer; a median."""

    name: str
    num_runs: int
    ms_per_token: float


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def rows_of(num_tokens: int) -> Tensor:
    return torch.randn(
        num_tokens, SHARED["hidden_size"], generator=torch.Generator().manual_seed(0)
    )


def num_runs_of(family: Family, num_tokens: int, args: argparse.Namespace) -> int:
    """Long prompts are steady in themselves; the time of a square allows one."""
    if num_tokens <= 4096:
        return int(args.runs)
    return max(1, args.runs // 2) if family.is_linear else 1


def measure(
    family: Family,
    ours: Ours,
    theirs: Theirs | None,
    walked: Run | None,
    num_tokens: int,
    num_runs: int,
) -> Row:
    """Run all in turn `num_runs` times, after an unmeasured run of each on a short prompt."""
    x_TD = rows_of(num_tokens)
    short_TD = x_TD[:WARM_TOKENS]
    ours.prefill(short_TD)
    runs: dict[str, Callable[[], object]] = {"prfaas": lambda: ours.prefill(x_TD)}
    if theirs is not None and num_tokens <= (family.most_tokens or num_tokens):
        theirs.prefiller(short_TD)()
        runs["transformers"] = theirs.prefiller(x_TD)
    if walked is not None and num_tokens <= SEQUENTIAL_TOKENS:
        walked(x_TD[:SEQUENTIAL_WARM_TOKENS])
        runs["sequential"] = partial(walked, x_TD)
    rounds = [{name: seconds(run) for name, run in runs.items()} for _ in range(num_runs)]
    rates: dict[str, float | None] = dict.fromkeys(("transformers", "sequential"))
    ratios = dict(rates)
    for name in runs:
        rates[name] = round(num_tokens / statistics.median(each[name] for each in rounds), 1)
        ratios[name] = round(statistics.median(each[name] / each["prfaas"] for each in rounds), 3)
    assert rates["prfaas"] is not None
    return Row(
        name=family.name,
        tokens=num_tokens,
        num_runs=num_runs,
        prfaas_tokens_per_s=rates["prfaas"],
        transformers_tokens_per_s=rates["transformers"],
        ratio_vs_transformers=ratios["transformers"],
        transformers_left_out=None if "transformers" in runs else family.left_out,
        sequential_tokens_per_s=rates["sequential"],
        ratio_vs_sequential=ratios["sequential"],
    )


def measure_growth(family: Family, ours: Ours, longer_tokens: int, num_runs: int) -> Growth:
    """Time both lengths in turn, the shorter one eight times."""
    tokens = longer_tokens // 8
    long_TD = rows_of(longer_tokens)
    short_TD = long_TD[:tokens]
    ours.prefill(short_TD)
    ratios = []
    for _ in range(num_runs):
        short_s = statistics.median(seconds(lambda: ours.prefill(short_TD)) for _ in range(8))
        ratios.append(seconds(lambda: ours.prefill(long_TD)) / short_s / 8)
    return Growth(
        name=family.name,
        tokens=tokens,
        longer_tokens=longer_tokens,
        num_runs=num_runs,
        growth=round(statistics.median(ratios), 3),
        is_linear=family.is_linear,
    )


def measure_decode(family: Family, ours: Ours, num_runs: int) -> Decode:
    """Decode a few tokens, again and again."""
    x_TD = rows_of(DECODE_TOKENS)
    ours.decode(x_TD)
    median_s = statistics.median(seconds(lambda: ours.decode(x_TD)) for _ in range(num_runs))
    return Decode(
        name=family.name,
        num_runs=num_runs,
        ms_per_token=round(1e3 * median_s / DECODE_TOKENS, 3),
    )


def bench(args: argparse.Namespace) -> Iterator[Row | Growth | Decode]:
    longest = max(args.tokens)
    for family in FAMILIES:
        if family.name not in args.mixers:
            continue
        ours = Ours(family, args.packing, args.chunk_tokens)
        theirs = Theirs(family) if family.attribute is not None else None
        walked = sequential(family)
        for num_tokens in args.tokens:
            num_runs = num_runs_of(family, num_tokens, args)
            yield measure(family, ours, theirs, walked, num_tokens, num_runs)
        if family.part == "mixer" and ours.spec.states:
            yield measure_decode(family, ours, args.runs)
        if longest >= 8 * args.chunk_tokens:
            yield measure_growth(family, ours, longest, num_runs_of(family, longest, args))


@contextmanager
def threads(number: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    yield torch.get_num_threads()
    torch.set_num_threads(before)


def parse(argv: list[str] | None) -> argparse.Namespace:
    names = [family.name for family in FAMILIES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mixers", nargs="*", choices=names, default=names)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 32768])
    parser.add_argument("--runs", type=int, default=5, help="half of it on long prompts")
    parser.add_argument("--threads", type=int, help="torch threads of both (default: torch's)")
    parser.add_argument("--chunk-tokens", type=int, default=EngineOptions().chunk_tokens)
    parser.add_argument("--packing", choices=get_args(ExactPacking), default="fma-f32")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser.parse_args(argv)


def line(result: Row | Growth | Decode) -> str:
    if isinstance(result, Decode):
        return f"{result.name:15} decode: {result.ms_per_token} ms a token"
    if isinstance(result, Growth):
        kind = "linear" if result.is_linear else "quadratic"
        return f"{result.name:15} {result.longer_tokens:6} tokens: growth {result.growth} ({kind})"
    text = f"{result.name:15} {result.tokens:6} tokens: {result.prfaas_tokens_per_s:8.0f} tokens/s"
    if result.ratio_vs_sequential is not None:
        text += f", token by token {result.sequential_tokens_per_s:6.0f}"
        text += f", ratio {result.ratio_vs_sequential:.2f}"
    if result.transformers_left_out is not None:
        return f"{text}, transformers not run ({result.transformers_left_out})"
    ratio = f"ratio {result.ratio_vs_transformers:.2f}"
    return f"{text}, transformers {result.transformers_tokens_per_s:8.0f}, {ratio}"


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    results: list[Row | Growth | Decode] = []
    with threads(args.threads) as num_threads, torch.inference_mode():
        for result in bench(args):
            results.append(result)
            print(line(result), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        import transformers

        settings = {
            "threads": num_threads,
            "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "packing": args.packing,
            "chunk_tokens": args.chunk_tokens,
            "shared": SHARED,
            "mixers": {f.name: f.config for f in FAMILIES if f.name in args.mixers},
        }
        rows = [asdict(result) for result in results if isinstance(result, Row)]
        growth = [asdict(result) for result in results if isinstance(result, Growth)]
        decode = [asdict(result) for result in results if isinstance(result, Decode)]
        print(json.dumps(settings | {"rows": rows, "growth": growth, "decode": decode}, indent=2))


if __name__ == "__main__":
    main()
