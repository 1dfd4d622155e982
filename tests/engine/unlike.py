"""A program that computes as on another CPU, and prints what came out: run by test_portability.

Arguments: "own", or the name of a LLVM CPU, "+" and "-" features of it, and "wide" for kernels written
for vectors of 16, separated by colons; then model directories.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding as llvm

from prfaas.engine.loader import load_model
from prfaas.engine.native import activations, machine, product
from prfaas.engine.segment import Segment
from prfaas.engine.sequence_kv import SequenceKv

TOKENS = [4 + (31 * i * i + 7 * i) % 500 for i in range(201)]
NUM_DECODED = 4
BLOCK_TOKENS = 64


def results(model_dir: Path) -> dict[str, str | list[int]]:
    """Return the fingerprint, hashes of logits and of keys, values and states, and greedy tokens."""
    model = load_model(model_dir)
    kv = model.new_kv(capacity_tokens=2 * len(TOKENS))
    rows_V, drawn = [], []
    pieces = [TOKENS[:70], TOKENS[70:200], TOKENS[200:]]
    for piece in pieces:
        rows_V.append(model.forward([Segment(kv=kv, tokens=piece, num_logits=1)]))
    for _ in range(NUM_DECODED):
        drawn.append(int(rows_V[-1].argmax()))
        rows_V.append(model.forward([Segment(kv=kv, tokens=drawn[-1:], num_logits=1)]))
    return {
        "fingerprint": model.numerics_fingerprint,
        "logits": hashlib.sha256(torch.cat(rows_V).numpy().tobytes()).hexdigest(),
        "kept": hashlib.sha256(kept(kv)).hexdigest(),
        "tokens": drawn,
    }


def kept(kv: SequenceKv) -> bytes:
    """Return the last whole block of every layer's keys and values, and the states."""
    data = bytearray()
    block, size = kv.num_tokens // BLOCK_TOKENS - 1, BLOCK_TOKENS
    for layer, (layer_kv, state) in enumerate(zip(kv.layers, kv.states, strict=True)):
        if layer_kv is not None:
            page = bytearray(size * layer_kv.spec.values_per_token * 4)
            kv.export_block(layer, block, size, memoryview(page))
            data += page
        if state is not None:
            page = bytearray(state.nbytes)
            state.write_to(kv.num_tokens, memoryview(page), 0)
            data += page
    return bytes(data)


def main() -> None:
    torch.set_num_threads(1)
    generator, *directories = sys.argv[1:]
    if generator != "own":
        cpu, features, width = generator.split(":")
        known = llvm.get_host_cpu_features() if width == "wide" else None
        machine.target = lambda: (cpu, features if known is None else known.flatten())
        if width == "wide":
            written: list[Any] = [activations, product]
            for module in written:
                module.vector_lanes = lambda: 16
    sys.stdout.write(json.dumps([results(Path(directory)) for directory in directories]))


if __name__ == "__main__":
    main()
