"""The least that a prefix hit must compute: its uncached tail, on an engine that holds all the rest.

The engine is the node's own, in this process, with the same model, weights and threads. Its working
copy holds keys, values and states of the cached tokens already (random numbers: they take as long as
others), computes the tail in one forward and draws the largest logit. Nothing else is in that time:
no HTTP, no tokenizer, no lookup, no filling of the working copy, no pages written.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from prfaas.cache.block_table import BlockTable
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout, bytes_of_page, held_blocks
from prfaas.engine.loader import load_model
from prfaas.engine.model import Segment
from prfaas.engine.page_loading import load_pages
from prfaas.engine.sequence_kv import SequenceKv


class TailEngine:
    """Holds a prompt's first `prefix_tokens`, whole blocks, in pages."""

    def __init__(
        self, model_dir: Path, prefix_tokens: int, block_tokens: int, num_threads: int
    ) -> None:
        torch.set_num_threads(num_threads)
        self.model = load_model(model_dir)
        self.layout = self.model.layout(block_tokens)
        self.prefix_tokens = prefix_tokens
        page_bytes = self.layout.page_bytes
        self._cache = PrefixCache(
            layout=self.layout,
            ram_bytes=page_bytes * max(1, self.layout.pages_needed(prefix_tokens + 1)),
            root=lambda _: bytes(32),
        )
        self._table = self._cache.lookup((), prefix_tokens + 1)
        self.num_bytes = fill(self._table, self.layout, prefix_tokens)

    def working_copy(self, capacity_tokens: int) -> tuple[SequenceKv, float]:
        """Return a working copy of the prefix, and the seconds that making it took."""
        began_s = time.perf_counter()
        kv = self.model.new_kv(
            capacity_tokens=capacity_tokens, block_tokens=self.layout.block_tokens
        )
        load_pages(
            kv,
            self._table,
            self.layout,
            stored_tokens=self.prefix_tokens,
            num_tokens=self.prefix_tokens,
        )
        return kv, time.perf_counter() - began_s

    def compute_s(self, tail: Sequence[int]) -> tuple[float, float]:
        """Return the seconds to compute the tail and draw a token, and those of the filling."""
        num_tokens = self.prefix_tokens + len(tail)
        kv, fill_s = self.working_copy(num_tokens)
        segment = Segment(kv=kv, tokens=list(tail), num_logits=1)
        began_s = time.perf_counter()
        logits_1V = self.model.forward([segment])
        int(logits_1V.argmax())
        return time.perf_counter() - began_s, fill_s

    def working_copy_bytes(self, num_tokens: int) -> int:
        return self.model.kv_capacity_bytes(num_tokens)


def fill(table: BlockTable, layout: CacheLayout, num_tokens: int) -> int:
    """Fill the pages of so many tokens, whole blocks, with small random numbers; return their bytes."""
    numbers = np.random.default_rng(0).standard_normal(-(-layout.page_bytes // 4)) / 8
    page_data = numbers.astype(np.float32).tobytes()[: layout.page_bytes]
    num_bytes = 0
    for group, spec in enumerate(layout.groups):
        for block in held_blocks(spec, num_tokens, layout.block_tokens):
            pages = table.try_allocate(group, block)
            assert pages is not None, "the pool is too small"
            for index, page in enumerate(pages):
                table.view(page)[:] = page_data
                num_bytes += bytes_of_page(spec, index, layout.block_tokens, layout.block_tokens)
    table.set_num_tokens(num_tokens)
    return num_bytes
