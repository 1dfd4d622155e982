#!/usr/bin/env python
"""Quality beside speed: perplexity, greedy agreement and the largest logit difference, of the same weights.

The text is Python's own documentation (`pydoc_data.topics`), cut into windows that begin with the BOS token;
the last tokens of each are scored. transformers in float32 is what the others are compared with:
prfaas in its default and with its other dtypes, and llama.cpp on the GGUF file that the weights came from,
which also quantises activations. prfaas decodes what is scored, token by token, all windows side by side.

    scripts/bench/quality.py --json
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import get_args

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.engine.config import model_from_hf
from prfaas.engine.numerics import packing_of
from prfaas.engine.options import EngineOptions, WeightDtype
from prfaas.errors import ConfigError
from prfaas.models.store import resolve
from prfaas.text.tokenizer import Tokenizer
from scripts.bench.engine_peers import (
    PeerMissingError,
    Setup,
    default_peers_dir,
    ours_command,
    peer_command,
)
from scripts.bench.engine_pipe import EngineProcess

REFERENCE = "transformers"
CHARACTERS_PER_TOKEN = 6
"""More than any tokenizer packs into a token of prose, with room."""

Logits = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine in one setting; differences are to the reference."""

    name: str
    settings: dict[str, object]
    perplexity: float
    perplexity_ratio: float
    greedy_agreement: float
    """The share of the scored positions at which the likeliest token is the same."""
    max_logit_difference: float
    mean_logit_difference: float


def windows_of(tokenizer: Tokenizer, num_windows: int, num_tokens: int) -> list[list[int]]:
    """Return windows of the text, evenly spread over it."""
    text = "\n".join(topics[name] for name in sorted(topics))
    num_characters = CHARACTERS_PER_TOKEN * num_tokens
    stride = (len(text) - num_characters) // num_windows
    windows = []
    for number in range(num_windows):
        start = text.index("\n", number * stride)
        piece = text[start : start + num_characters].strip()
        windows.append(tokenizer.encode(piece, add_bos=True)[:num_tokens])
    if any(len(window) != num_tokens for window in windows):
        raise RuntimeError(f"the text has no {num_windows} windows of {num_tokens} tokens")
    return windows


def nll(logits_WSV: Logits, windows: list[list[int]]) -> list[float]:
    """Return -log p of each scored token but each window's first: logits are of the token after."""
    found = []
    for logits_SV, window in zip(logits_WSV, windows, strict=True):
        targets = window[len(window) - len(logits_SV) + 1 :]
        for row_V, target in zip(logits_SV[:-1], targets, strict=True):
            top = float(row_V.max())
            total = float(np.exp(row_V - top).sum(dtype=np.float64))
            found.append(top + math.log(total) - float(row_V[target]))
    return found


def compared(
    name: str,
    settings: dict[str, object],
    logits: Logits,
    reference: Logits,
    windows: list[list[int]],
) -> Row:
    perplexity, expected = (
        math.exp(statistics.fmean(nll(each, windows))) for each in (logits, reference)
    )
    largest, means, agreed = 0.0, [], []
    for row_WSV, other_WSV in zip(logits, reference, strict=True):
        difference = np.abs(row_WSV - other_WSV)
        largest = max(largest, float(difference.max()))
        means.append(float(difference.mean(dtype=np.float64)))
        agreed.append(float((row_WSV.argmax(-1) == other_WSV.argmax(-1)).mean()))
    return Row(
        name=name,
        settings=settings,
        perplexity=round(perplexity, 4),
        perplexity_ratio=round(perplexity / expected, 6),
        greedy_agreement=round(statistics.fmean(agreed), 5),
        max_logit_difference=round(largest, 5),
        mean_logit_difference=round(statistics.fmean(means), 6),
    )


def own_dtypes() -> list[str]:
    """Return the dtypes that prfaas has on a CPU, the default first."""
    found = []
    for dtype in get_args(WeightDtype):
        try:
            packing_of(dtype)
        except ConfigError:
            continue
        found.append(dtype)
    return sorted(found, key=lambda dtype: dtype != EngineOptions().weight_dtype)


@contextmanager
def computed(
    name: str, command: list[str], windows: list[list[int]], shape: tuple[int, int, int], work: Path
) -> Iterator[tuple[dict[str, object], Logits]]:
    """Run an engine over all windows; its logits are on disk for the length of the block."""
    path = work / f"{name}.logits"
    process = EngineProcess(name, command, work / f"{name}.log", len(os.sched_getaffinity(0)))
    try:
        process.run("logits", windows, shape[1], str(path))
    finally:
        process.close()
    yield process.about, np.memmap(path, np.float32, "r", shape=shape)
    path.unlink()


def bench(args: argparse.Namespace, work: Path) -> Iterator[Row]:
    model = resolve(args.model)
    windows = windows_of(Tokenizer.load(model), args.windows, args.window_tokens)
    vocab_size = model_from_hf(json.loads((model / "config.json").read_text())).vocab_size
    shape = (args.windows, args.scored_tokens, vocab_size)
    setup = Setup(
        model=args.model,
        dtype=EngineOptions().weight_dtype,
        chunk_tokens=EngineOptions().chunk_tokens,
        num_threads=args.threads,
        max_tokens=args.window_tokens,
        peers_dir=args.peers_dir,
    )
    with computed(REFERENCE, peer_command(REFERENCE, setup), windows, shape, work) as expected:
        about, reference = expected
        yield compared(REFERENCE, about, reference, reference, windows)
        commands = {
            f"prfaas {dtype}": ours_command(replace(setup, dtype=dtype)) for dtype in own_dtypes()
        }
        try:
            commands["llama.cpp"] = peer_command("llama.cpp", setup)
        except PeerMissingError as error:
            print(f"without llama.cpp: {error}", file=sys.stderr)
        for name, command in commands.items():
            with computed(name, command, windows, shape, work) as (about, logits):
                yield compared(name, about, logits, reference, windows)


def line(row: Row) -> str:
    return (
        f"{row.name:16} perplexity {row.perplexity:.3f} ({row.perplexity_ratio:.5f} of transformers'),"
        f" greedy agreement {row.greedy_agreement:.2%}, logits differ by up to"
        f" {row.max_logit_difference:.4f}, {row.mean_logit_difference:.5f} in the mean"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gemma-3-270m", help="a fetched name or a directory")
    parser.add_argument("--peers-dir", type=Path, default=default_peers_dir(), help="%(default)s")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window-tokens", type=int, default=512)
    parser.add_argument("--scored-tokens", type=int, default=128, help="of each window")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args(argv)
    if not 1 < args.scored_tokens < args.window_tokens:
        parser.error("--scored-tokens: from 2 to less than a window")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for row in bench(args, Path(work)):
            rows.append(asdict(row))
            print(line(row), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        scored = args.windows * (args.scored_tokens - 1)
        found = {"model": args.model, "scored_tokens": scored, "window_tokens": args.window_tokens}
        print(json.dumps(found | {"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
