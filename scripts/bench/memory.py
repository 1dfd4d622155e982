#!/usr/bin/env python
"""What a model takes in memory beside what prfaas accounts for it.

Loads the model in the default settings, prefills a prompt, and reads the process's resident
anonymous memory before and after each. Weights should be there once, and the working copy of the
prompt as `kv_capacity_bytes` counts it; the rest of the peak is torch itself and what a chunk needs.

    scripts/bench/memory.py --model gemma-3-270m --tokens 8192 --json
"""

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.engine.batch import Segment
from prfaas.engine.loader import load_model
from prfaas.engine.options import EngineOptions
from prfaas.models.store import resolve


def status_bytes(field: str) -> int:
    """Return a field of /proc/self/status, such as RssAnon or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    before = status_bytes("RssAnon")
    model = load_model(resolve(args.model))
    loaded = status_bytes("RssAnon")
    values = model.config.num_parameters
    kv = model.new_kv(capacity_tokens=args.tokens)
    cuts = [*range(0, args.tokens, EngineOptions().chunk_tokens), args.tokens]
    with torch.no_grad():
        for start, stop in pairwise(cuts):
            tokens = [token % model.config.vocab_size for token in range(start, stop)]
            model.forward([Segment(kv=kv, tokens=tokens, num_logits=0)])
    filled = status_bytes("RssAnon")
    row = {
        "model": args.model,
        "packing": model.packing,
        "tokens": args.tokens,
        "parameters": values,
        "weights_accounted_bytes": values * (2 if model.packing == "fma-fp16" else 4),
        "weights_resident_bytes": loaded - before,
        "kv_accounted_bytes": model.kv_capacity_bytes(args.tokens),
        "kv_held_bytes": kv.nbytes,
        "prefill_resident_bytes": filled - loaded,
        "peak_rss_bytes": status_bytes("VmHWM"),
    }
    if args.json:
        print(json.dumps(row))
        return
    for name, value in row.items():
        print(
            f"{name:26} {value / 2**20:10.1f} MiB"
            if name.endswith("bytes")
            else f"{name:26} {value}"
        )


if __name__ == "__main__":
    main()
