#!/usr/bin/env python
"""What it costs to find a long prompt in an index of a million blocks, and to let it go again.

    scripts/bench/lookup.py --json

Each lookup is of another prompt than the last, under keys just made, so that neither the processor's
caches nor Python's have seen it. Hashing is timed beside bare hashlib over the same bytes.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import repeat
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.cache.block_table import BlockTable
from prfaas.cache.groups import pinned_blocks
from prfaas.cache.hashing import block_keys
from prfaas.cache.pool import PageKey
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec, WindowSpec
from prfaas.cache.store import StoreStats
from prfaas.cache.tiers import PageStore, Promotion

BLOCK_TOKENS = 64
PAGE_BYTES = 64
LAYOUT = CacheLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(
        FullSpec(name="full", layers=(0,), page_bytes=PAGE_BYTES),
        WindowSpec(name="window", layers=(1,), page_bytes=PAGE_BYTES, window_tokens=1024),
        StateSpec(name="state", layers=(2,), page_bytes=PAGE_BYTES, state_bytes=8 * PAGE_BYTES),
    ),
)
"""Pages are tiny: none is read or written here."""


class KnownStore(PageStore):
    """An index of records such as the store keeps, without a disk."""

    def __init__(self) -> None:
        self.where: dict[PageKey, int] = {}
        self._done: list[Callable[[bool], None]] = []

    def put(
        self,
        key: PageKey,
        parts: Sequence[memoryview],
        *,
        tenant: bytes = b"",
        done: Callable[[bool], None] | None = None,
    ) -> bool:
        """Note a record."""
        self.where[key] = len(self.where)
        assert done is not None
        self._done.append(done)
        return True

    def write(self) -> None:
        """Say that all is on disk."""
        for done in self._done:
            done(True)
        self._done.clear()

    def known(self, key: PageKey) -> bool:
        """Return whether the key was put."""
        return key in self.where

    def num_known(self, group: int, keys: Sequence[bytes]) -> int:
        """Return whether all were put, as the store finds that out."""
        wanted = zip(repeat(group), keys, strict=False)
        return len(keys) if all(map(self.where.__contains__, wanted)) else 0

    def get_many(self, wanted: Sequence[tuple[PageKey, Sequence[memoryview]]]) -> list[bool]:
        """Read nothing."""
        return [True] * len(wanted)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Look each up, as the store does."""
        for key in keys:
            self.where.get(key)

    def take_removed(self) -> Sequence[PageKey]:
        """Return nothing: whatever was put stays."""
        return ()

    def stats(self) -> StoreStats:
        """Not asked for here."""
        raise NotImplementedError

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """There is nothing to close."""


def tokens_of(prompt: int, num_tokens: int) -> "array[int]":
    """Return the tokens of a prompt that shares no block with another."""
    return array("I", range(prompt << 12, (prompt << 12) + num_tokens))


def bare_hashing(tokens: "array[int]") -> bytes:
    """Hash the same bytes in the same chain with hashlib alone."""
    data, step, key = tokens.tobytes(), 4 * BLOCK_TOKENS, bytes(32)
    for start in range(0, len(data), step):
        key = sha256(key + data[start : start + step]).digest()
    return key


def fill(cache: PrefixCache, keys: Sequence[bytes]) -> None:
    """Publish what a prompt of these blocks leaves: its KV, its last window and state."""
    table = cache.lookup(keys, 0)
    for group, blocks in enumerate(pinned_blocks(LAYOUT, len(keys))):
        for block in blocks:
            assert table.try_allocate(group, block) is not None
            table.commit(group, block)
    table.release()


def timed(run: Callable[[], Any], times: list[float]) -> Any:
    """Note how many milliseconds a call takes; return what it returns."""
    start = time.perf_counter()
    result = run()
    times.append(1e3 * (time.perf_counter() - start))
    return result


def lookup_figures(
    num_indexed: int = 1_000_000, prompt_tokens: int = 128_000, num_runs: int = 60
) -> dict[str, Any]:
    """Return the median time to find and to release a prompt in RAM, and to find one on disk."""
    num_blocks = prompt_tokens // BLOCK_TOKENS
    num_prompts = num_indexed // num_blocks
    pages = num_prompts * sum(
        len(blocks) * spec.pages_per_block
        for spec, blocks in zip(LAYOUT.groups, pinned_blocks(LAYOUT, num_blocks), strict=True)
    )
    ram_bytes = (pages + 4 * num_blocks) * PAGE_BYTES
    store = KnownStore()
    cache = PrefixCache(layout=LAYOUT, ram_bytes=ram_bytes, root=lambda _: bytes(32), store=store)
    for prompt in range(num_prompts):
        fill(cache, block_keys(bytes(32), tokens_of(prompt, prompt_tokens), BLOCK_TOKENS))
        store.write()
    for prompt in range(num_prompts, num_prompts + num_runs):  # on disk only
        keys = block_keys(bytes(32), tokens_of(prompt, prompt_tokens), BLOCK_TOKENS)
        for group, blocks in enumerate(pinned_blocks(LAYOUT, num_blocks)):
            store.where.update(((group, keys[block]), 0) for block in blocks)
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {
        name: [] for name in ("ram", "release", "known_on_disk", "missing", "hashing", "hashlib")
    }
    for run in range(num_runs):
        for prompt in lookups_of(run, num_prompts):
            tokens = tokens_of(prompt, prompt_tokens)
            timed(partial(bare_hashing, tokens), times["hashlib"])
            keys = timed(partial(block_keys, bytes(32), tokens, BLOCK_TOKENS), times["hashing"])
            kind = "ram" if prompt < num_prompts else "known_on_disk"
            kind = "missing" if prompt >= num_prompts + num_runs else kind
            found = timed(partial(cache.find, keys, prompt_tokens + 1), times[kind])
            if kind == "known_on_disk":
                assert isinstance(found, Promotion)
                assert found.num_records > num_blocks
                found.release()
                continue
            assert isinstance(found, BlockTable)
            assert found.hit_tokens == (prompt_tokens if kind == "ram" else 0)
            timed(found.release, times["release"] if kind == "ram" else [])
    gc.unfreeze()
    cache.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "indexed_blocks": num_prompts * num_blocks,
        "prompt_tokens": prompt_tokens,
        "prompt_blocks": num_blocks,
        **{f"{name}_ms": round(value, 3) for name, value in medians.items()},
        "hashing_ratio": round(
            statistics.median(
                a / b for a, b in zip(times["hashing"], times["hashlib"], strict=True)
            ),
            3,
        ),
    }


def lookups_of(run: int, num_prompts: int) -> Iterator[int]:
    """Yield a prompt in RAM, one on disk and one that is nowhere."""
    yield run * 97 % num_prompts
    yield num_prompts + run
    yield (1 << 18) + run


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--indexed-blocks", type=int, default=1_000_000)
    parser.add_argument("--prompt-tokens", type=int, default=128_000)
    parser.add_argument("--runs", type=int, default=60)
    options = parser.parse_args()
    figures = lookup_figures(options.indexed_blocks, options.prompt_tokens, options.runs)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        print(*(f"{name}={value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
