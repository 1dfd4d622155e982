#!/usr/bin/env python
"""Where a decode step and a prefill chunk go: torch's profiler over the engine's parts and operators.

Parts are what the layers are made of; `rest` of a mixer is rope, norms of q and k, and writing KV. The
profiler itself takes time, which `plain_ms`, the same work without it, shows. In both layers are run part by
part; `served_ms` is that of steps as they are served, from a recording of all layers. `limit_ms` is the time to
read once the weights that a step of one sequence cannot do without, at the rate this machine reads memory.

    scripts/bench/engine_profile.py --json
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.engine.layers.gqa import GqaMixer
from prfaas.engine.layers.mla import MlaMixer
from prfaas.engine.loader import load_model
from prfaas.engine.model import Model, Segment
from prfaas.engine.native.kernel import Kernel
from prfaas.engine.options import EngineOptions
from prfaas.engine.recording import NUM_PLAIN, Recordings
from prfaas.models.store import resolve
from prfaas.text.tokenizer import Tokenizer
from scripts.bench.quality import windows_of

SCOPE = "prfaas."
KERNEL = "kernel: "
MIXER_SCOPES = {
    "qkv_proj": "projections",
    "o_proj": "projections",
}
ATTENTION = "attention"
READ_BYTES = 256 << 20
NUM_UNTIMED = NUM_PLAIN + 1
"""Until a step is recorded."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A part, or an operator, of one forward."""

    name: str
    calls: float
    ms: float
    fraction: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of forward; figures are of one, in the mean of those that were profiled."""

    name: str
    served_ms: float
    plain_ms: float
    profiled_ms: float
    parts: list[Share]
    operators: list[Share]


def scoped(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` as a part that the profiler sees."""

    def call(*args: object, **kwargs: object) -> Any:
        with record_function(SCOPE + name):
            return run(*args, **kwargs)

    return call


@contextmanager
def named_kernels() -> Iterator[None]:
    """Let the profiler see the engine's own kernels, as operators."""
    run = Kernel.__call__

    def call(kernel: Kernel, *values: float, **options: int) -> None:
        with record_function(KERNEL + kernel.name):
            run(kernel, *values, **options)

    setattr(Kernel, "__call__", call)  # noqa: B010
    try:
        yield
    finally:
        setattr(Kernel, "__call__", run)  # noqa: B010


class ScopedAttention:
    """A layer's attention as a part that the profiler sees."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention

    def of(self, *rows: torch.Tensor) -> Callable[..., Any]:
        """Return what computes it for these rows."""
        return scoped(ATTENTION, self._attention.of(*rows))


def name_parts(model: Model) -> None:
    """Let the profiler see the model's parts."""
    model.embed_tokens = scoped("embedding", model.embed_tokens)  # type: ignore[assignment]
    model.lm_head = scoped("head", model.lm_head)
    if model.greedy_head is not None:
        setattr(model.greedy_head, "largest", scoped("head", model.greedy_head.largest))  # noqa: B010
    layers = []
    for layer in model.layers:
        for attribute, part in MIXER_SCOPES.items():
            if hasattr(layer.mixer, attribute):
                setattr(layer.mixer, attribute, scoped(part, getattr(layer.mixer, attribute)))
        if isinstance(layer.mixer, GqaMixer | MlaMixer):
            setattr(layer.mixer, "attend", ScopedAttention(layer.mixer.attend))  # noqa: B010
        layers.append(
            replace(
                layer,
                mixer=None if layer.mixer is None else scoped("mixer", layer.mixer),
                ffn=None if layer.ffn is None else scoped("feed-forward", layer.ffn),
            )
        )
    model.layers = tuple(layers)


def median_ms(run: Callable[[], object], num_runs: int) -> float:
    """Return the time of a run, after NUM_UNTIMED."""
    times_s = []
    for _ in range(NUM_UNTIMED + num_runs):
        began_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - began_s)
    return round(1e3 * statistics.median(times_s[NUM_UNTIMED:]), 3)


def profiled(name: str, run: Callable[[], object], num_runs: int, served_ms: float) -> Profile:
    """Run some times plainly, then as often under the profiler."""
    plain_ms = median_ms(run, num_runs)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        began_s = time.perf_counter()
        for _ in range(num_runs):
            run()
        whole_ms = 1e3 * (time.perf_counter() - began_s) / num_runs
    totals: dict[str, tuple[float, float]] = {}
    operators = []
    for event in seen.key_averages():
        calls = event.count / num_runs
        if event.key.startswith(SCOPE):
            total_ms = event.cpu_time_total / 1e3 / num_runs
            totals[event.key.removeprefix(SCOPE)] = (calls, total_ms)
        else:
            operators.append((event.key, calls, event.self_cpu_time_total / 1e3 / num_runs))
    operators.sort(key=lambda each: -each[2])

    def share(part: str, calls: float, ms: float) -> Share:
        fraction = round(ms / whole_ms, 4)
        return Share(name=part, calls=round(calls, 1), ms=round(ms, 3), fraction=fraction)

    return Profile(
        name=name,
        served_ms=served_ms,
        plain_ms=plain_ms,
        profiled_ms=round(whole_ms, 3),
        parts=[share(*each) for each in parts_of(totals, whole_ms)],
        operators=[share(*each) for each in operators],
    )


def parts_of(
    totals: dict[str, tuple[float, float]], whole_ms: float
) -> Iterator[tuple[str, float, float]]:
    """Yield parts that add up to the whole; (name, calls, ms)."""
    none = (0.0, 0.0)
    num_mixers, mixer_ms = totals.get("mixer", none)
    names = [*dict.fromkeys(MIXER_SCOPES.values()), ATTENTION]
    inside = {part: totals.get(part, none) for part in names}
    outside = {part: totals.get(part, none) for part in ("embedding", "feed-forward", "head")}
    for part, (calls, ms) in inside.items():
        yield f"mixer: {part}", calls, ms
    yield "mixer: rest", num_mixers, mixer_ms - sum(ms for _, ms in inside.values())
    for part, (calls, ms) in outside.items():
        yield part, calls, ms
    yield "norms, residuals, rest", 1, whole_ms - mixer_ms - sum(ms for _, ms in outside.values())


def forwards(
    model: Model, tokens: list[int], args: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is profiled: greedy steps behind a context, and a prompt's second chunk."""
    prompt = tokens[: args.context]
    for batch in args.batch:
        kv = model.new_kv(capacity_tokens=args.context + 2 * args.runs + NUM_UNTIMED)
        model.forward([Segment(kv=kv, tokens=prompt, num_logits=0)])
        kvs = [kv, *(kv.fork() for _ in range(batch - 1))]

        def step(kvs: list[Any] = kvs) -> object:
            return model.largest(
                [
                    Segment(kv=kv, tokens=[token], num_logits=1)
                    for token, kv in zip(tokens, kvs, strict=False)
                ]
            )

        yield f"decode, batch {batch}", step
    for size in args.chunk_tokens:
        first = model.new_kv(capacity_tokens=2 * size)
        model.forward([Segment(kv=first, tokens=tokens[:size], num_logits=0)])

        def chunk(size: int = size, first: Any = first) -> object:
            return model.forward(
                [Segment(kv=first.fork(), tokens=tokens[size : 2 * size], num_logits=0)]
            )

        yield f"prefill, chunk of {size}", chunk


def read_bytes_per_s() -> float:
    """Return the best rate at which all threads read memory in ten tries."""
    values = torch.ones(READ_BYTES // 4)
    best_s = float("inf")
    for _ in range(10):
        began_s = time.perf_counter()
        values.sum()
        best_s = min(best_s, time.perf_counter() - began_s)
    return READ_BYTES / best_s


def weight_bytes(model: Model) -> int:
    """Return the bytes of weights that a greedy step of one sequence reads: of an embedding, next to none."""
    spec = model.config
    head = spec.vocab_size * spec.hidden_size
    others = spec.num_parameters - head * (1 if spec.has_tied_embeddings else 2)
    width = 2 if "16" in model.packing else 4
    return others * width + head * (width if model.greedy_head is None else 1)


def lines(found: Profile, num_operators: int) -> Iterator[str]:
    yield (
        f"{found.name}: {found.served_ms:.2f} ms, {found.plain_ms:.2f} without a recording, "
        f"{found.profiled_ms:.2f} under the profiler"
    )
    for kind, shares in (("part", found.parts), ("operator", found.operators[:num_operators])):
        yield f"  {kind:44} {'calls':>7} {'ms':>9} {'share':>7}"
        for share in shares:
            yield f"  {share.name:44} {share.calls:7.0f} {share.ms:9.3f} {share.fraction:7.1%}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    options = EngineOptions()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gemma-3-270m", help="a fetched name or a directory")
    parser.add_argument("--dtype", default=options.weight_dtype)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunk-tokens", type=int, nargs="*", default=[options.chunk_tokens])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--operators", type=int, default=12, help="lines of a table")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    output = sys.stderr if args.json else sys.stdout
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with torch.inference_mode():
            model = load_model(resolve(args.model), dtype=args.dtype)
            [tokens] = windows_of(
                Tokenizer.load(resolve(args.model)),
                1,
                max([args.context, *args.batch, *(2 * size for size in args.chunk_tokens)]),
            )
            rate = read_bytes_per_s()
            limit_ms = 1e3 * weight_bytes(model) / rate
            print(
                f"{weight_bytes(model) / 1e6:.0f} MB of weights, read at {rate / 1e9:.1f} GB/s in"
                f" {limit_ms:.2f} ms",
                file=output,
            )
            served_ms = [median_ms(run, args.runs) for _, run in forwards(model, tokens, args)]
            model.recordings = Recordings(model.layers, max_bytes=0)
            name_parts(model)
            found = []
            with named_kernels():
                forwards_ms = zip(forwards(model, tokens, args), served_ms, strict=True)
                for (name, run), ms in forwards_ms:
                    found.append(profiled(name, run, args.runs, ms))
                    print("\n".join(lines(found[-1], args.operators)), file=output, flush=True)
    finally:
        torch.set_num_threads(before)
    if args.json:
        head = {
            "model": args.model,
            "threads": args.threads,
            "numerics": model.numerics_fingerprint,
            "weight_bytes": weight_bytes(model),
            "read_bytes_per_s": round(rate),
            "limit_ms": round(limit_ms, 3),
        }
        print(json.dumps(head | {"profiles": [asdict(each) for each in found]}, indent=2))


if __name__ == "__main__":
    main()
