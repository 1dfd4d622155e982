#!/usr/bin/env python
"""Wire codecs on real KV and on noise: bytes left, GB/s of raw bytes on one core, and what is lost.

Real KV is what a tiny random Kimi Linear and Gemma 3, or the model that --model names, make of pieces of a
text; `ratio` counts all that a transfer carries, states too, which no codec changes. Copying the
same pages runs beside, so that a busy machine shows. `link_mbit_per_s` is the rate below which a
transfer arrives sooner encoded than raw, encoding and sending in turn.

What is lost: each prompt's KV, but for its last token, goes through the codec; then the last token and
an answer are computed from it here, and beside it from the KV as it was. `max_logit_error` and
`mean_logit_error` compare the first token's logits, over all prompts; `logit_spread` is their standard
deviation. `greedy_agreement` is the fraction of the answers' tokens before the first that differs.

    scripts/bench/codec.py --json
    scripts/bench/codec.py --model ~/.local/share/prfaas/models/gemma-3-270m
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from prfaas.cache.spec import StateSpec
from prfaas.engine.loader import load_model
from prfaas.engine.model import Model, Segment
from prfaas.engine.sequence_kv import SequenceKv
from prfaas.text.tokenizer import Tokenizer
from prfaas.transport.codec import LOSSLESS, decode_page, encode_page
from prfaas.transport.kv_numbers import PageNumbers
from prfaas.transport.wire import Codec

BLOCK_TOKENS = 64
CHUNK_TOKENS = 512
TINY_FAMILIES: tuple[Literal["kimi_linear", "gemma3"], ...] = ("kimi_linear", "gemma3")
TEXT = Path(__file__).parents[1] / "texts" / "selm_point.txt"
CODECS = (Codec.ZSTD, Codec.FP16, Codec.INT8, Codec.FP8)


@dataclass(frozen=True, kw_only=True)
class Page:
    """Some bytes of KV, and where they belong; `layer` is None for noise."""

    data: bytes
    numbers: PageNumbers
    layer: int | None = None
    start: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a codec does to answers, over all prompts."""

    max_logit_error: float
    mean_logit_error: float
    logit_spread: float
    greedy_agreement: float
    num_prompts: int
    answer_tokens: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One codec on one kind of pages; speeds are of the fastest run, in seconds of one core."""

    pages: str
    codec: str
    num_pages: int
    num_bytes: int
    ratio: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    copy_gb_per_s: float
    link_mbit_per_s: float
    loss: Loss | None
    """None for noise."""


def seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


# ------------------------------------------------------------ real KV


def prompts(directory: Path, *, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Return pieces of the text that do not overlap."""
    tokens = Tokenizer.load(directory).encode(TEXT.read_text(), add_bos=True)
    if len(tokens) < num_prompts * num_tokens:
        raise SystemExit(f"the text has {len(tokens)} tokens; ask for fewer or shorter prompts")
    return [tokens[i * num_tokens : (i + 1) * num_tokens] for i in range(num_prompts)]


def prefilled(model: Model, tokens: list[int], num_more: int) -> SequenceKv:
    """Return the KV of `tokens`, with room for more."""
    kv = model.new_kv(capacity_tokens=len(tokens) + num_more, block_tokens=BLOCK_TOKENS)
    for start in range(0, len(tokens), CHUNK_TOKENS):
        model.forward([Segment(kv=kv, tokens=tokens[start : start + CHUNK_TOKENS], num_logits=0)])
    return kv


def pages_of(model: Model, kv: SequenceKv) -> Iterator[Page]:
    """Yield what a transfer of the KV carries, each state as one page."""
    layout = model.layout(BLOCK_TOKENS)
    for layer in range(len(kv.layers)):
        for group, _ in layout.groups_of_layer(layer):
            spec = layout.groups[group]
            if isinstance(spec, StateSpec):
                state = kv.state_of(layer)
                data = bytearray(state.nbytes)
                state.write_to(kv.num_tokens, memoryview(data), 0)
                yield Page(data=bytes(data), numbers=PageNumbers(dtype=model.kv_dtype))
            else:
                yield from attention_pages(model, kv, layer, spec.row_items)


def attention_pages(
    model: Model, kv: SequenceKv, layer: int, row_items: int | None
) -> Iterator[Page]:
    layer_kv = kv.kv_of(layer)
    numbers = PageNumbers(dtype=model.kv_dtype, row_items=row_items)
    start = layer_kv.base_tokens
    while start < kv.num_tokens:
        end = min(kv.num_tokens, (start // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
        num_values = (end - start) * layer_kv.spec.values_per_token
        data = bytearray(num_values * layer_kv.dtype.itemsize)
        layer_kv.write_to(start, end - start, memoryview(data))
        yield Page(
            data=bytes(data), numbers=numbers, layer=layer, start=start, num_tokens=end - start
        )
        start = end


def there_and_back(codec: Codec, page: Page) -> bytes:
    used, encoded = encode_page(codec, page.data, page.numbers)
    return bytes(decode_page(used, bytes(encoded), len(page.data), page.numbers))


def received(kv: SequenceKv, codec: Codec, pages: list[Page]) -> SequenceKv:
    """Return a copy of the KV that went through the codec."""
    copy = kv.fork()
    for page in pages:
        if page.layer is not None:
            data = memoryview(there_and_back(codec, page))
            copy.kv_of(page.layer).read_from(page.start, page.num_tokens, data)
    return copy


def answer(
    model: Model, kv: SequenceKv, last_token: int, num_tokens: int
) -> tuple[torch.Tensor, list[int]]:
    """Return the first token's logits, float64, and greedy tokens; the KV goes on with them."""
    first, token, drawn = None, last_token, []
    for _ in range(num_tokens):
        logits = model.forward([Segment(kv=kv, tokens=[token], num_logits=1)])[0]
        first = logits.double() if first is None else first
        token = int(logits.argmax())
        drawn.append(token)
    assert first is not None, "no token was asked for"
    return first, drawn


def num_agreeing(ours: list[int], theirs: list[int]) -> int:
    differing = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return next(differing, len(ours))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt's KV but for the last token, and what follows from it."""

    kv: SequenceKv
    pages: list[Page]
    last_token: int
    logits: torch.Tensor
    drawn: list[int]


def prepare(model: Model, tokens: list[int], answer_tokens: int) -> Prompt:
    kv = prefilled(model, tokens[:-1], answer_tokens + 1)
    pages = list(pages_of(model, kv))
    logits, drawn = answer(model, kv.fork(), tokens[-1], answer_tokens)
    return Prompt(kv=kv, pages=pages, last_token=tokens[-1], logits=logits, drawn=drawn)


def measure_loss(model: Model, codec: Codec, prepared: list[Prompt]) -> Loss:
    errors, agreeing = [], 0
    for prompt in prepared:
        kv = received(prompt.kv, codec, prompt.pages)
        logits, drawn = answer(model, kv, prompt.last_token, len(prompt.drawn))
        errors.append((logits - prompt.logits).abs())
        agreeing += num_agreeing(prompt.drawn, drawn)
    return Loss(
        max_logit_error=float(torch.stack(errors).max()),
        mean_logit_error=float(torch.stack(errors).mean()),
        logit_spread=float(torch.stack([prompt.logits.std() for prompt in prepared]).mean()),
        greedy_agreement=agreeing / sum(len(prompt.drawn) for prompt in prepared),
        num_prompts=len(prepared),
        answer_tokens=len(prepared[0].drawn),
    )


# ------------------------------------------------------------ bytes and time


def measure(name: str, pages: list[Page], codec: Codec, num_runs: int, loss: Loss | None) -> Row:
    encoded = [encode_page(codec, page.data, page.numbers) for page in pages]
    triples = [(used, bytes(data), page) for (used, data), page in zip(encoded, pages, strict=True)]
    if codec in LOSSLESS and any(there_and_back(codec, page) != page.data for page in pages):
        raise AssertionError(f"{codec.name} is not lossless on {name}")
    encode_s, decode_s, copy_s = (
        min(seconds(run) for _ in range(num_runs))
        for run in (
            lambda: [encode_page(codec, page.data, page.numbers) for page in pages],
            lambda: [
                decode_page(used, data, len(page.data), page.numbers)
                for used, data, page in triples
            ],
            lambda: [bytes(bytearray(page.data)) for page in pages],
        )
    )
    num_bytes = sum(len(page.data) for page in pages)
    ratio = sum(len(data) for _, data, _ in triples) / num_bytes
    return Row(
        pages=name,
        codec=codec.name.lower(),
        num_pages=len(pages),
        num_bytes=num_bytes,
        ratio=ratio,
        encode_gb_per_s=num_bytes / encode_s / 1e9,
        decode_gb_per_s=num_bytes / decode_s / 1e9,
        copy_gb_per_s=num_bytes / copy_s / 1e9,
        link_mbit_per_s=max(0.0, (1 - ratio) * num_bytes / encode_s * 8 / 1e6),
        loss=loss,
    )


def model_rows(name: str, directory: Path, args: argparse.Namespace) -> Iterator[Row]:
    model = load_model(directory, dtype="float16", device="cpu")
    texts = prompts(directory, num_prompts=args.prompts, num_tokens=args.tokens)
    prepared = [prepare(model, tokens, args.answer_tokens) for tokens in texts]
    for codec in CODECS:
        loss = measure_loss(model, codec, prepared)
        yield measure(name, prepared[0].pages, codec, args.runs, loss)


def noise_rows(args: argparse.Namespace) -> Iterator[Row]:
    numbers = PageNumbers(dtype="float32", row_items=128)
    for page_bytes in (64 << 10, 1 << 20):
        count = max(1, (8 << 20) // page_bytes)
        normal = torch.randn(count, page_bytes // 4, generator=torch.Generator().manual_seed(0))
        pages = [Page(data=row.numpy().tobytes(), numbers=numbers) for row in normal]
        for codec in CODECS:
            yield measure(f"normal {page_bytes >> 10} KiB", pages, codec, args.runs, None)
        random = [Page(data=os.urandom(page_bytes), numbers=numbers) for _ in range(count)]
        yield measure(f"random {page_bytes >> 10} KiB", random, Codec.ZSTD, args.runs, None)


def all_rows(args: argparse.Namespace) -> Iterator[Row]:
    if args.model is not None:
        yield from model_rows(args.model.name, args.model, args)
        return
    from tests.tiny_models import write_tiny_model

    with tempfile.TemporaryDirectory() as root:
        for family in TINY_FAMILIES:
            directory = write_tiny_model(Path(root, family), family)
            yield from model_rows(f"tiny {family}", directory, args)
    yield from noise_rows(args)


def line(row: Row) -> str:
    text = (
        f"{row.pages:<16} {row.codec:<5} {row.num_bytes / 1e6:>6.2f} MB  ratio {row.ratio:.3f}"
        f"  encode {row.encode_gb_per_s:.2f} GB/s  decode {row.decode_gb_per_s:.2f}"
        f"  copy {row.copy_gb_per_s:.1f}  gains below {row.link_mbit_per_s:>6,.0f} Mbit/s"
    )
    if row.loss is not None:
        text += (
            f"  logits off by {row.loss.max_logit_error:.2g} (mean {row.loss.mean_logit_error:.2g},"
            f" spread {row.loss.logit_spread:.2g})  greedy {row.loss.greedy_agreement:.1%}"
        )
    return text


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench/codec.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default tiny models")
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt (default 256)")
    parser.add_argument("--prompts", type=int, default=4, help="how many (default 4)")
    parser.add_argument("--answer-tokens", type=int, default=32, help="of each (default 32)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if args.tokens < 2 or args.prompts < 1 or args.answer_tokens < 1 or args.runs < 1:
        parser.error("a prompt has 2 tokens or more, and of all else there is one")
    torch.set_num_threads(1)
    rows = []
    for row in all_rows(args):
        rows.append(row)
        if not args.json:
            print(line(row), flush=True)
    if args.json:
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
