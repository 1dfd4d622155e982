"""Copies between working copies and pages: hits in, finished blocks out, preempted sequences both.

A page is written while the forward runs, layer by layer, and committed after it; one that is
committed is never written again. What is committed is a function of its tokens alone, whether
prefill made it or decode.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.cache.block_table import BlockTable
from prfaas.cache.spec import (
    CacheLayout,
    GroupSpec,
    StateSpec,
    bytes_of_page,
    held_blocks,
    needed_blocks,
    replay_boundary,
    snapshot_of_block,
)
from prfaas.engine.submission import PageSink
from prfaas.errors import EngineError

if TYPE_CHECKING:
    from prfaas.engine.sequence_kv import SequenceKv


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """The pages of one block of one group, and the part of a working copy that belongs there."""

    kv: "SequenceKv"
    table: BlockTable
    layout: CacheLayout
    group: int
    block: int
    num_tokens: int
    """Tokens of the block, up to where its pages are exact; fewer than a block only in the last."""
    pages: tuple[int, ...]

    def write(self, layer: int, layer_index: int) -> Iterator[tuple[int, int]]:
        """Fill the pages of `layer`, the group's number `layer_index`; yield (index, page) of each."""
        spec = self.layout.groups[self.group]
        for index, start in self._pages_of(layer_index):
            page = self.pages[index]
            out = self._view(index)
            if isinstance(spec, StateSpec):
                self.kv.state_of(layer).write_to(self._position, out, start)
            else:
                self.kv.export_block(layer, self.block, self.num_tokens, out)
            yield index, page

    def read(self, layer: int, layer_index: int) -> None:
        """Take from the pages what `write` put there."""
        spec = self.layout.groups[self.group]
        for index, start in self._pages_of(layer_index):
            data = self._view(index)
            if isinstance(spec, StateSpec):
                self.kv.state_of(layer).read_from(self._position, data, start)
            else:
                self.kv.import_block(layer, self.block, self.num_tokens, data)

    def write_all(self) -> None:
        """Fill the pages of all layers."""
        for layer_index, layer in enumerate(self.layout.groups[self.group].layers):
            for _ in self.write(layer, layer_index):
                pass

    def read_all(self) -> None:
        """Take from the pages of all layers."""
        for layer_index, layer in enumerate(self.layout.groups[self.group].layers):
            self.read(layer, layer_index)

    @property
    def _position(self) -> int:
        return self.block * self.layout.block_tokens + self.num_tokens

    def _pages_of(self, layer_index: int) -> Iterator[tuple[int, int]]:
        """Yield each page's index in the block and its start in what the layer keeps."""
        spec = self.layout.groups[self.group]
        num_slices = spec.slices_per_layer if isinstance(spec, StateSpec) else 1
        for number in range(num_slices):
            yield layer_index * num_slices + number, number * spec.page_bytes

    def _view(self, index: int) -> memoryview:
        layout = self.layout
        spec = layout.groups[self.group]
        size = bytes_of_page(spec, index, self.num_tokens, layout.block_tokens)
        return self.table.view(self.pages[index])[:size]


def _new_copy(
    kv: "SequenceKv",
    table: BlockTable,
    layout: CacheLayout,
    group: int,
    block: int,
    num_tokens: int,
) -> BlockCopy | None:
    """Return a copy to pages that are allocated for it; None: there are not enough."""
    pages = table.try_allocate(group, block)
    if pages is None:
        return None
    return BlockCopy(
        kv=kv,
        table=table,
        layout=layout,
        group=group,
        block=block,
        num_tokens=num_tokens,
        pages=pages,
    )


def drop_private_pages(table: BlockTable, layout: CacheLayout) -> None:
    """Let go of what only this table holds, once it is in a working copy, in a model with states.

    A state is of no use but at its one position, and may be as large as the KV of thousands of
    tokens.
    """
    if layout.has_states:
        for group in range(len(layout.groups)):
            table.drop_private(group)


def save_pages(kv: "SequenceKv", table: BlockTable, layout: CacheLayout) -> bool:
    """Put what it takes to go on at `kv.num_tokens` into pages; False if that cannot be done.

    There may not be enough of them, or it is not finite. Whole blocks are committed, a cut one stays
    private.
    """
    block_tokens = layout.block_tokens
    for group, spec in enumerate(layout.groups):
        for block in held_blocks(spec, kv.num_tokens, block_tokens):
            if table.is_committed(group, block):
                continue
            in_block = min(block_tokens, kv.num_tokens - block * block_tokens)
            copy = _new_copy(kv, table, layout, group, block, in_block)
            if copy is None:
                return False
            try:
                copy.write_all()
            except EngineError:
                return False
            if in_block == block_tokens:
                table.commit(group, block)
    return True


def save_end(kv: "SequenceKv", table: BlockTable, layout: CacheLayout) -> None:
    """Commit the states at the last block boundary that `kv` has passed, where there are pages.

    All else that it takes to go on there has been committed as it was computed.
    """
    block = kv.num_tokens // layout.block_tokens - 1
    for group, spec in enumerate(layout.groups):
        if not isinstance(spec, StateSpec) or block < 0 or table.is_committed(group, block):
            continue
        position = (block + 1) * layout.block_tokens
        if not all(kv.state_of(layer).holds(position) for layer in spec.layers):
            return  # it went on from pages, and has not come to the next boundary
        copy = _new_copy(kv, table, layout, group, block, layout.block_tokens)
        if copy is None:
            return
        copy.write_all()
        table.commit(group, block)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWrite:
    """One block of one group that the running forward brings to its end."""

    copy: BlockCopy
    sink: PageSink | None
    """Who is told of each written page."""
    is_whole: bool
    """It may be published after the forward."""

    def write(self, layer: int, layer_index: int) -> None:
        """Copy what `layer`, the group's number `layer_index`, has just written."""
        copy = self.copy
        for index, page in copy.write(layer, layer_index):
            if self.sink is not None:
                self.sink.page_ready(copy.group, index, copy.block, copy.num_tokens, page)

    def commit(self) -> None:
        """Publish the block if it is whole."""
        if self.is_whole:
            self.copy.table.commit(self.copy.group, self.copy.block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing:
    """What becomes of the pages of one request's tokens."""

    prompt_tokens: int
    kept_every_tokens: int = 0
    """Snapshots of the prompt for later prompts: whole blocks; 0: none."""
    sent_every_tokens: int = 0
    """Snapshots that the sink hears of, too: whole blocks; 0: none."""
    sink: PageSink | None = None

    def is_sent(self, spec: GroupSpec, block: int, block_tokens: int) -> bool:
        """Return whether the sink hears of the block: someone will go on with it elsewhere."""
        if self.sink is None:
            return False
        is_in_snapshot = snapshot_of_block(
            spec,
            block,
            every_tokens=self.sent_every_tokens,
            num_tokens=self.prompt_tokens,
            block_tokens=block_tokens,
        )
        return bool(is_in_snapshot) or block in needed_blocks(
            spec, self.prompt_tokens, block_tokens
        )

    def keep_snapshots(self, table: BlockTable) -> None:
        """Tell the table which windows and states of its prompt others may go on from."""
        for every_tokens, is_held in (
            (self.kept_every_tokens, False),
            (self.sent_every_tokens, True),
        ):
            if every_tokens:
                table.keep_snapshots(every_tokens, self.prompt_tokens, is_held=is_held)


def plan_snapshots(
    table: BlockTable, layout: CacheLayout, publishing: Publishing, *, start: int, end: int
) -> tuple[int, ...]:
    """Return the positions at whose state a forward from `start` to `end` is to keep a copy.

    Those on the block grid that are worth their pages: the prompt's replay boundary, where others
    will go on, and the snapshots asked for.
    """
    if not layout.has_states:
        return ()
    prompt_tokens = publishing.prompt_tokens
    wanted = {replay_boundary(prompt_tokens, layout.block_tokens), *table.landmarks}
    for every_tokens in (publishing.kept_every_tokens, publishing.sent_every_tokens):
        if every_tokens:
            first = (start // every_tokens + 1) * every_tokens
            wanted.update(range(first, min(end, prompt_tokens) + 1, every_tokens))
    return tuple(sorted(at for at in wanted if start < at <= end))


def plan_writes(
    kv: "SequenceKv",
    table: BlockTable,
    layout: CacheLayout,
    publishing: Publishing,
    *,
    end: int,
    snapshots: tuple[int, ...],
) -> Iterator[BlockWrite]:
    """Yield the writes of a forward that takes `kv` from its num_tokens to `end`.

    Those are the blocks it makes whole and, for a sink, the prompt's cut last one; of states the
    `snapshots` and, for a sink, that at the prompt's end. A block that the pool has no pages for is
    left out: it is not cached. The sink hears of those needed to go on after the prompt, whose
    pages are reserved, and of those of its snapshots that there are pages for.
    """
    block_tokens = layout.block_tokens
    is_last = publishing.sink is not None and end == publishing.prompt_tokens
    last = end // block_tokens
    if is_last:
        last = -(-end // block_tokens)
    state_blocks = {at // block_tokens - 1 for at in snapshots}
    if is_last:
        state_blocks.add(last - 1)
    for block in range(kv.num_tokens // block_tokens, last):
        num_tokens = min(block_tokens, end - block * block_tokens)
        for group, spec in enumerate(layout.groups):
            if isinstance(spec, StateSpec) and block not in state_blocks:
                continue
            if table.is_committed(group, block):
                continue  # computed again after a preemption that saved nothing
            copy = _new_copy(kv, table, layout, group, block, num_tokens)
            if copy is None:
                continue
            yield BlockWrite(
                copy=copy,
                sink=publishing.sink if publishing.is_sent(spec, block, block_tokens) else None,
                is_whole=num_tokens == block_tokens,
            )


def announce_hit(
    table: BlockTable, layout: CacheLayout, publishing: Publishing, *, known_tokens: int
) -> None:
    """Tell the sink of what the table's hit holds for it.

    It knows of the blocks within `known_tokens` that are needed after the prompt.
    """
    sink = publishing.sink
    if sink is None:
        return
    block_tokens = layout.block_tokens
    for group, spec in enumerate(layout.groups):
        needed = needed_blocks(spec, publishing.prompt_tokens, block_tokens)
        for block in held_blocks(spec, table.hit_tokens, block_tokens):
            if block in needed and block < known_tokens // block_tokens:
                continue
            pages = table.pages(group, block)
            if pages is not None and publishing.is_sent(spec, block, block_tokens):
                for index, page in enumerate(pages):
                    sink.page_ready(group, index, block, block_tokens, page)
