"""Copies between working copies and pages: hits in, finished blocks out, preempted sequences both.

A block of one group is one page a layer. A page is written while the forward runs, layer by layer,
and committed after it; one that is committed is never written again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prfaas.cache.prefix import BlockTable
from prfaas.cache.spec import CacheLayout, bytes_of_block, held_blocks, needed_blocks
from prfaas.engine.sequence_kv import SequenceKv
from prfaas.engine.submission import PageSink


def load_pages(
    kv: SequenceKv, table: BlockTable, layout: CacheLayout, *, stored_tokens: int, num_tokens: int
) -> None:
    """Make `kv` hold the first `num_tokens` of the `stored_tokens` tokens that the pages hold."""
    for group, spec in enumerate(layout.groups):
        for block in held_blocks(spec, num_tokens, layout.block_tokens):
            pages = table.pages(group, block)
            assert pages is not None, f"{spec.name} block {block} is not here"
            in_block = min(layout.block_tokens, stored_tokens - block * layout.block_tokens)
            size = bytes_of_block(spec, in_block, layout.block_tokens)
            for layer, page in zip(spec.layers, pages, strict=True):
                kv.import_block(layer, block, in_block, table.view(page)[:size])
    if num_tokens:
        kv.set_num_tokens(num_tokens)


def save_pages(kv: SequenceKv, table: BlockTable, layout: CacheLayout) -> bool:
    """Put what it takes to go on at `kv.num_tokens` into pages; False if there were not enough."""
    for group, spec in enumerate(layout.groups):
        for block in held_blocks(spec, kv.num_tokens, layout.block_tokens):
            if table.is_committed(group, block):
                continue
            pages = table.try_allocate(group, block)
            if pages is None:
                return False
            in_block = min(layout.block_tokens, kv.num_tokens - block * layout.block_tokens)
            size = bytes_of_block(spec, in_block, layout.block_tokens)
            for layer, page in zip(spec.layers, pages, strict=True):
                kv.export_block(layer, block, in_block, table.view(page)[:size])
            if in_block == layout.block_tokens:
                table.commit(group, block)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWrite:
    """One block of one group that the running forward brings to its end."""

    kv: SequenceKv
    table: BlockTable
    group: int
    block: int
    num_tokens: int
    """Tokens of the block; fewer than a block only at the end of a prompt."""
    num_bytes: int
    """Of each page."""
    pages: tuple[int, ...]
    sink: PageSink | None
    """Who is told of each written page."""
    is_whole: bool
    """It may be published after the forward."""

    def write(self, layer: int, index: int) -> None:
        """Copy the K and V that `layer`, the group's number `index`, has just written."""
        page = self.pages[index]
        out = self.table.view(page)[: self.num_bytes]
        self.kv.export_block(layer, self.block, self.num_tokens, out)
        if self.sink is not None:
            self.sink.page_ready(self.group, layer, self.block, self.num_tokens, page)


def plan_writes(
    kv: SequenceKv,
    table: BlockTable,
    layout: CacheLayout,
    *,
    end: int,
    prompt_tokens: int,
    sink: PageSink | None,
) -> Iterator[BlockWrite]:
    """Yield the writes of a forward that takes `kv` from its num_tokens to `end`.

    Those are the blocks it makes whole and, for a sink, the prompt's cut last one. A block that the
    pool has no pages for is left out: it is not cached. The sink hears of those needed to go on
    after the prompt; their pages are reserved.
    """
    block_tokens = layout.block_tokens
    last = end // block_tokens
    if sink is not None and end == prompt_tokens:
        last = -(-end // block_tokens)
    for block in range(kv.num_tokens // block_tokens, last):
        num_tokens = min(block_tokens, end - block * block_tokens)
        for group, spec in enumerate(layout.groups):
            if table.is_committed(group, block):
                continue  # computed again after a preemption that saved nothing
            pages = table.try_allocate(group, block)
            if pages is None:
                continue
            is_announced = block in needed_blocks(spec, prompt_tokens, block_tokens)
            yield BlockWrite(
                kv=kv,
                table=table,
                group=group,
                block=block,
                num_tokens=num_tokens,
                num_bytes=bytes_of_block(spec, num_tokens, block_tokens),
                pages=pages,
                sink=sink if is_announced else None,
                is_whole=num_tokens == block_tokens,
            )
