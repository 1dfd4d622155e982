#!/usr/bin/env python
"""prfaas's engine in the settings that `prfaas serve` has by default; run by scripts/bench/engine.py."""

import argparse
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.engine.loader import load_model
from prfaas.engine.model import Model, Segment
from prfaas.engine.sequence_kv import SequenceKv
from scripts.bench.engine_pipe import serve


class Ours:
    """The model's forward as the runner calls it: chunks of a prompt, then steps of a batch."""

    def __init__(self, model: Model, chunk_tokens: int) -> None:
        self.about = {
            "version": "here",
            "numerics": model.numerics_fingerprint,
            "chunk_tokens": chunk_tokens,
        }
        self.model = model
        self.chunk_tokens = chunk_tokens
        self._kvs: list[SequenceKv] = []
        self._next: list[int] = []

    def prefill(self, tokens: list[int]) -> None:
        self._filled(tokens, 0)

    def begin(self, tokens: list[int], batch: int, num_steps: int) -> None:
        first = self._filled(tokens, num_steps)
        self._kvs = [first, *(first.fork() for _ in range(batch - 1))]
        self._next = tokens[:batch]

    def step(self) -> None:
        segments = [
            Segment(kv=kv, tokens=[token], num_logits=1)
            for kv, token in zip(self._kvs, self._next, strict=True)
        ]
        found = self.model.largest(segments)
        self._next = found if isinstance(found, list) else found.argmax(-1).tolist()

    def end(self) -> None:
        self._kvs = []

    def logits(self, windows: list[list[int]], num_scored: int, path: str) -> None:
        """Decode the scored tokens, all windows side by side: a row's bits are those of a prefill."""
        vocab_size = self.model.config.vocab_size
        shape = (len(windows), num_scored, vocab_size)
        out = np.memmap(path, np.float32, "w+", shape=shape)
        kvs = [self._filled(window[:-num_scored], num_scored) for window in windows]
        for index in range(num_scored):
            at = index - num_scored
            segments = [
                Segment(kv=kv, tokens=[window[at]], num_logits=1)
                for kv, window in zip(kvs, windows, strict=True)
            ]
            out[:, index] = self.model.forward(segments).numpy()

    def _filled(self, tokens: list[int], room: int) -> SequenceKv:
        kv = self.model.new_kv(capacity_tokens=len(tokens) + room)
        cuts = [*range(0, len(tokens), self.chunk_tokens), len(tokens)]
        for start, stop in pairwise(cuts):
            num_logits = int(stop == len(tokens))
            self.model.forward([Segment(kv=kv, tokens=tokens[start:stop], num_logits=num_logits)])
        return kv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--chunk-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        serve(lambda: Ours(load_model(args.model, dtype=args.dtype), args.chunk_tokens))


if __name__ == "__main__":
    main()
