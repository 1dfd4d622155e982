#!/usr/bin/env python
"""llama.cpp over llama-cpp-python's low-level API; run by scripts/bench/engine.py.

Needs a Python with llama-cpp-python and nothing of prfaas. Micro-batches of 512 tokens, no flash attention
and a cache of the window alone in windowed layers: on the CPUs tried it was slower with other settings,
llama-cpp-python's own defaults among them.
"""

import argparse
import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench.engine_pipe import serve

MICRO_BATCH_TOKENS = 512


class Llama:
    """A GGUF file, and a context of as many tokens and sequences as are asked for."""

    def __init__(self, path: Path, num_threads: int) -> None:
        import llama_cpp  # type: ignore[import-not-found]  # an own environment's

        self._api: Any = llama_cpp
        self._num_threads = num_threads
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab_size: int = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self.about = {
            "version": llama_cpp.__version__,
            "weights": path.name,
            "micro_batch_tokens": MICRO_BATCH_TOKENS,
            "flash_attention": False,
            "full_size_window_cache": False,
            "system": llama_cpp.llama_print_system_info().decode(),
        }
        self._context: Any = None
        self._room = (0, 0)
        self._batch: Any = llama_cpp.llama_batch_init(MICRO_BATCH_TOKENS, 0, 1)
        self._next: list[int] = []
        self._position = 0

    def prefill(self, tokens: list[int]) -> None:
        self._open(len(tokens), 1)
        self._fill(tokens)

    def begin(self, tokens: list[int], batch: int, num_steps: int) -> None:
        self._open(len(tokens) + num_steps, batch)
        self._fill(tokens)
        memory = self._api.llama_get_memory(self._context)
        for sequence in range(1, batch):
            self._api.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        self._next, self._position = tokens[:batch], len(tokens)

    def step(self) -> None:
        rows = [(token, self._position, number) for number, token in enumerate(self._next)]
        self._next = self._decode(rows, len(rows)).argmax(-1).tolist()
        self._position += 1

    def end(self) -> None:
        self._next = []

    def logits(self, windows: list[list[int]], num_scored: int, path: str) -> None:
        shape = (len(windows), num_scored, self._vocab_size)
        out = np.memmap(path, np.float32, "w+", shape=shape)
        for index, window in enumerate(windows):
            self._open(len(window), 1)
            self._fill(window[:-num_scored])
            first = len(window) - num_scored
            for start in range(first, len(window), MICRO_BATCH_TOKENS):
                piece = window[start : start + MICRO_BATCH_TOKENS]
                rows = [(token, start + offset, 0) for offset, token in enumerate(piece)]
                out[index, start - first :][: len(rows)] = self._decode(rows, len(rows))

    def _open(self, num_tokens: int, num_sequences: int) -> None:
        """Empty the context; make one if it has too little room, or is for more sequences."""
        if num_tokens <= self._room[0] and num_sequences == self._room[1]:
            self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
            return
        if self._context is not None:
            self._api.llama_free(self._context)
        params = self._api.llama_context_default_params()
        params.n_ctx = num_tokens * num_sequences
        params.n_batch = params.n_ubatch = MICRO_BATCH_TOKENS
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = self._num_threads
        params.flash_attn_type = 0
        params.swa_full = False
        params.no_perf = True
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no context of {params.n_ctx} tokens")
        self._room = num_tokens, num_sequences

    def _fill(self, tokens: list[int]) -> None:
        for start in range(0, len(tokens), MICRO_BATCH_TOKENS):
            piece = tokens[start : start + MICRO_BATCH_TOKENS]
            rows = [(token, start + offset, 0) for offset, token in enumerate(piece)]
            self._decode(rows, int(start + len(piece) == len(tokens)))

    def _decode(self, rows: list[tuple[int, int, int]], num_logits: int) -> Any:
        """Compute (token, position, sequence) rows; return the last ones' logits."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = int(index >= len(rows) - num_logits)
        failure = self._api.llama_decode(self._context, batch)
        if failure:
            raise RuntimeError(f"llama_decode: {failure}")
        if not num_logits:
            return np.empty((0, self._vocab_size), np.float32)
        logits = self._api.llama_get_logits(self._context)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (num_logits, self._vocab_size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    serve(lambda: Llama(args.model, args.threads))


if __name__ == "__main__":
    main()
