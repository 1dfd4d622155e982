"""One forward's rows: the tokens of several sequences, one after another."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from prfaas.engine.kv import CPU
from prfaas.engine.native.store import store_rows
from prfaas.engine.rope import RopeTable
from prfaas.engine.segment import Segment

__all__ = ["Batch", "Segment"]


class Batch:
    """The rows of one forward.

    Attributes:
        parts: each segment and its rows.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device = CPU) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        self.parts: list[tuple[slice, Segment]] = []
        for segment in segments:
            start = len(tokens)
            first = segment.kv.num_tokens
            tokens.extend(segment.tokens)
            positions.extend(range(first, first + len(segment.tokens)))
            self.parts.append((slice(start, len(tokens)), segment))
        self.tokens_T = torch.tensor(tokens, device=device)
        self.positions_T = torch.tensor(positions, device=device)
        self._end_position = max(positions) + 1
        self._ropes: dict[RopeTable, Tensor] = {}

    @property
    def logit_rows(self) -> list[int]:
        """The rows whose logits are wanted."""
        return [rows.stop - 1 for rows, segment in self.parts if segment.num_logits]

    def write_kv(self, layer: int, *rows_THK: Tensor) -> None:
        """Put the rows of K and V, or of the latent, into the working copies of their sequences."""
        kvs = [segment.kv.kv_of(layer) for _, segment in self.parts]
        if kvs[0].span.place is None:
            dtype = kvs[0].dtype
            sources = [part_THK.to(dtype) for part_THK in rows_THK]
            for kv, (rows, segment) in zip(kvs, self.parts, strict=True):
                kv.write(segment.kv.num_tokens, *(source[rows] for source in sources))
            return
        targets, most_tokens = array("q"), 1
        for kv, (rows, segment) in zip(kvs, self.parts, strict=True):
            num_tokens = rows.stop - rows.start
            most_tokens = max(most_tokens, num_tokens)
            targets.extend(kv.open(segment.kv.num_tokens, num_tokens))
            targets.extend((rows.start, num_tokens))
        strides = kvs[0].strides
        store_rows(*rows_THK, targets=targets, most_tokens=most_tokens, strides=strides)

    def rope(self, table: RopeTable) -> Tensor:
        """Return the table's turn of every row, gathered once a forward."""
        if table not in self._ropes:
            self._ropes[table] = table.at(self.positions_T, self._end_position)
        return self._ropes[table]
