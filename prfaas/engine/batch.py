"""One forward's rows: the tokens of several sequences, one after another."""

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prfaas.engine.attention import Attending, Layout, placed
from prfaas.engine.kv import CPU
from prfaas.engine.native.store import RowStore
from prfaas.engine.recorder import current
from prfaas.engine.rope import RopeTable
from prfaas.engine.segment import Segment

__all__ = ["Batch", "KeptRows", "OnWritten", "Rows", "Segment"]


OnWritten = Callable[["Batch"], None]
"""Called with the batch once all that a layer keeps of it is in place."""


def _ignore(layer: int) -> None:
    """Nobody waits for this layer's K and V."""


class Batch:
    """The rows of one forward, and whose they are.

    Attributes:
        parts: each segment and its rows.
        spans: position and row of each segment's first token, and how many it has.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device = CPU,
        *,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        """Lay the segments' rows one after another.

        Args:
            segments: at least one.
            device: where their tokens and positions lie.
            on_layer: told of each layer that has written what it keeps.
        """
        tokens: list[int] = []
        positions: list[int] = []
        self.parts: list[tuple[slice, Segment]] = []
        spans: list[tuple[int, int, int]] = []
        for segment in segments:
            start = len(tokens)
            first = segment.kv.num_tokens
            tokens.extend(segment.tokens)
            positions.extend(range(first, first + len(segment.tokens)))
            self.parts.append((slice(start, len(tokens)), segment))
            spans.append((first, start, len(segment.tokens)))
        self.spans = tuple(spans)
        self.tokens_T = torch.tensor(tokens, device=device)
        self.positions_T = torch.tensor(positions, device=device)
        self._end_position = max(positions) + 1
        self.on_layer = on_layer or _ignore
        self._ropes: dict[RopeTable, Tensor] = {}
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._most_tokens = max(len(segment.tokens) for segment in segments)

    @property
    def logit_rows(self) -> list[int]:
        """The rows whose logits are wanted."""
        return [rows.stop - 1 for rows, segment in self.parts if segment.num_logits]

    def write_kv(self, layer: int, rows: "KeptRows") -> None:
        """Put the rows of K and V, or of the latent, into the working copies of their sequences."""
        kvs = [segment.kv.kv_of(layer) for _, segment in self.parts]
        if kvs[0].span.place is None:
            dtype = kvs[0].dtype
            sources = [part_THK.to(dtype) for part_THK in rows.tensors]
            for kv, (own, segment) in zip(kvs, self.parts, strict=True):
                kv.write(segment.kv.num_tokens, *(source[own] for source in sources))
            return
        targets: list[int] = []
        for kv, (position, row, num_tokens) in zip(kvs, self.spans, strict=True):
            targets += (*kv.open(position, num_tokens), row, num_tokens)
        rows.store(array("q", targets), self._most_tokens, kvs[0].strides)

    def attend(self, layer: int, attending: Attending) -> None:
        """Compute a layer's attention of all rows; their keys and values are in place."""
        layout = self._layouts.get(attending.kind)
        if layout is None:  # layers of a kind share it
            layout = self._layouts[attending.kind] = attending.layout(self.spans)
        attending([placed(segment.kv.kv_of(layer).span) for _, segment in self.parts], layout)

    def rope(self, table: RopeTable) -> Tensor:
        """Return the table's turn of every row, gathered once a forward."""
        if table not in self._ropes:
            self._ropes[table] = table.at(self.positions_T, self._end_position)
        return self._ropes[table]


class KeptRows:
    """The rows of K and V, or of the latent, that a layer keeps."""

    def __init__(self, *rows_THK: Tensor) -> None:
        self.tensors = rows_THK
        is_ours = all(rows.is_cpu and rows.dtype == torch.float32 for rows in rows_THK)
        self._store = RowStore(*rows_THK) if is_ours else None

    def store(self, targets: "array[int]", most_tokens: int, strides: tuple[int, int]) -> None:
        """Copy them to a CPU's float32 places (`RowStore.store`)."""
        assert self._store is not None
        self._store.store(targets, most_tokens, strides)


class Rows:
    """A forward's rows as its layers see them: not whose they are, nor where they stand.

    What a layer computes may be recorded, and run for other sequences and positions. So all that
    depends on these is in `each_time`, and a layer cannot know of them elsewhere.
    """

    def __init__(self, batch: Batch | None, num_rows: int | None = None) -> None:
        """Show the batch's rows; or, while they are recorded, so many of nobody's."""
        self._batch = batch
        self._num_rows = num_rows
        self._turns: dict[RopeTable, Tensor] = {}

    def each_time(self, step: Callable[[Batch], object]) -> None:
        """Call `step` with the batch: now, or whenever what is being recorded is run.

        It gets at what was computed before by the tensors that it holds, and hands on what it
        computes by writing to them. What else it holds must stay as it is.
        """
        if self._batch is not None:
            step(self._batch)
        else:
            recorder = current()
            assert recorder is not None
            recorder.each_time(step)

    def rope(self, table: RopeTable) -> Tensor:
        """Return the table's turn of every row, complex [T, 1, K / 2]."""
        if self._batch is not None:
            return self._batch.rope(table)
        if table not in self._turns:
            assert self._num_rows is not None
            turns_T1C = torch.empty(self._num_rows, 1, table.num_pairs, dtype=torch.complex64)
            self._turns[table] = turns_T1C
            self.each_time(lambda batch: turns_T1C.copy_(batch.rope(table)))
        return self._turns[table]
