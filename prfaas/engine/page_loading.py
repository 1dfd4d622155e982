"""Fills working copies from pages: hits, what came from a peer, and preempted sequences.

Whole blocks of K and V are gathered by the layer, straight from the pool into the working copy, on
all of torch's threads: a call for each block and layer costs more than the copy where pages are
small.
"""

from collections.abc import Sequence

import torch

from prfaas.cache.block_table import BlockTable
from prfaas.cache.spec import CacheLayout, StateSpec, held_blocks
from prfaas.engine.pages import BlockCopy
from prfaas.engine.sequence_kv import SequenceKv


def load_pages(
    kv: SequenceKv, table: BlockTable, layout: CacheLayout, *, stored_tokens: int, num_tokens: int
) -> None:
    """Make `kv` hold the first `num_tokens` of the `stored_tokens` tokens that the pages hold.

    In a model with states the pages must hold one at exactly `num_tokens`.
    """
    block_tokens = layout.block_tokens
    for group, spec in enumerate(layout.groups):
        blocks = held_blocks(spec, num_tokens, block_tokens)
        first_alone = blocks.start
        if not isinstance(spec, StateSpec):
            first_alone = max(blocks.start, min(blocks.stop, stored_tokens // block_tokens))
            whole = range(blocks.start, first_alone)
            _load_whole(kv, table, layout, group, whole)
        for block in range(first_alone, blocks.stop):
            copy = BlockCopy(
                kv=kv,
                table=table,
                layout=layout,
                group=group,
                block=block,
                num_tokens=min(block_tokens, stored_tokens - block * block_tokens),
                pages=_pages(table, layout, group, block),
            )
            copy.read_all()
    if num_tokens:
        kv.set_num_tokens(num_tokens)


def _load_whole(
    kv: SequenceKv, table: BlockTable, layout: CacheLayout, group: int, blocks: Sequence[int]
) -> None:
    """Take whole blocks that follow each other, of all layers of a group with K and V."""
    if not blocks:
        return
    pages_BL = torch.tensor([_pages(table, layout, group, block) for block in blocks])
    for layer, pages_B in zip(layout.groups[group].layers, pages_BL.unbind(1), strict=True):
        kv.import_blocks(layer, blocks[0], table.arena, layout.page_bytes, pages_B)


def _pages(table: BlockTable, layout: CacheLayout, group: int, block: int) -> tuple[int, ...]:
    pages = table.pages(group, block)
    assert pages is not None, f"{layout.groups[group].name} block {block} is not here"
    return pages
