#!/usr/bin/env python
"""Wire codecs on real pages and on noise: GB/s of raw bytes each way, and encoded / raw bytes.

Real pages are those that a tiny random model of each family, or the model that --model names, makes of a
prompt; copying the same pages runs beside, so that a busy machine shows. `link_mbit_per_s` is the
rate below which a transfer arrives sooner encoded than raw, encoding and sending in turn.

    scripts/bench/codec.py --json
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from prfaas.engine.kv import LayerKv
from prfaas.engine.loader import load_model
from prfaas.engine.model import Segment
from prfaas.transport.codec import decode_page, encode_page
from prfaas.transport.wire import Codec

BLOCK_TOKENS = 64
FAMILIES: tuple[Literal["gemma3", "llama", "qwen3"], ...] = ("gemma3", "llama", "qwen3")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the runs."""

    pages: str
    codec: str
    page_bytes: int
    num_pages: int
    ratio: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    copy_gb_per_s: float
    link_mbit_per_s: float


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def model_pages(directory: Path, num_tokens: int) -> list[bytes]:
    """Return the KV pages, one a layer and block, that the model makes of random tokens."""
    model = load_model(directory, dtype="float16", numerics="grid", device="cpu")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (num_tokens,), generator=generator)
    kv = model.new_kv(capacity_tokens=num_tokens, block_tokens=BLOCK_TOKENS)
    model.forward([Segment(kv=kv, tokens=tokens.tolist(), num_logits=0)])
    return [
        page for layer in kv.layers if layer is not None for page in layer_pages(layer, num_tokens)
    ]


def layer_pages(layer: LayerKv, num_tokens: int) -> Iterator[bytes]:
    num_bytes = BLOCK_TOKENS * layer.spec.values_per_token * layer.dtype.itemsize
    for block in range(-(-layer.base_tokens // BLOCK_TOKENS), num_tokens // BLOCK_TOKENS):
        page = bytearray(num_bytes)
        layer.write_to(block * BLOCK_TOKENS, BLOCK_TOKENS, memoryview(page))
        yield bytes(page)


def measure(name: str, pages: list[bytes], codec: Codec, num_runs: int) -> Row:
    num_bytes = sum(map(len, pages))
    encoded = [bytes(encode_page(codec, page, 4)) for page in pages]
    pairs = list(zip(encoded, pages, strict=True))
    if [decode_page(codec, data, len(page), 4) for data, page in pairs] != pages:
        raise AssertionError(f"{codec.name} is not lossless on {name}")
    encode_s, decode_s, copy_s = (
        statistics.median(seconds(run) for _ in range(num_runs))
        for run in (
            lambda: [encode_page(codec, page, 4) for page in pages],
            lambda: [decode_page(codec, data, len(page), 4) for data, page in pairs],
            lambda: [bytes(bytearray(page)) for page in pages],
        )
    )
    ratio = sum(map(len, encoded)) / num_bytes
    return Row(
        pages=name,
        codec=codec.name.lower(),
        page_bytes=len(pages[0]),
        num_pages=len(pages),
        ratio=ratio,
        encode_gb_per_s=num_bytes / encode_s / 1e9,
        decode_gb_per_s=num_bytes / decode_s / 1e9,
        copy_gb_per_s=num_bytes / copy_s / 1e9,
        link_mbit_per_s=max(0.0, (1 - ratio) * num_bytes / encode_s * 8 / 1e6),
    )


def page_sets(args: argparse.Namespace) -> Iterator[tuple[str, list[bytes]]]:
    if args.model is not None:
        yield args.model.name, model_pages(args.model, args.tokens)
    else:
        from tests.tiny_models import write_tiny_model

        with tempfile.TemporaryDirectory() as root:
            for family in FAMILIES:
                directory = write_tiny_model(Path(root, family), family)
                yield f"tiny {family}", model_pages(directory, args.tokens)
    for page_bytes in (64 << 10, 1 << 20):
        count = max(1, (8 << 20) // page_bytes)
        yield "random bytes", [os.urandom(page_bytes) for _ in range(count)]
        normal = torch.randn(count, page_bytes // 4, generator=torch.Generator().manual_seed(0))
        yield "normal float32", [row.numpy().tobytes() for row in normal]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench/codec.py", description=__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default tiny models")
    parser.add_argument("--tokens", type=int, default=256, help="of the prompt (default 256)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for name, pages in page_sets(args):
        row = measure(name, pages, Codec.ZSTD, args.runs)
        rows.append(row)
        if not args.json:
            print(
                f"{row.pages:<16} {row.num_pages:>4} x {row.page_bytes:>8} B  {row.codec}"
                f"  ratio {row.ratio:.3f}  encode {row.encode_gb_per_s:.2f} GB/s"
                f"  decode {row.decode_gb_per_s:.2f}  copy {row.copy_gb_per_s:.1f}"
                f"  gains below {row.link_mbit_per_s:,.0f} Mbit/s"
            )
    if args.json:
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
