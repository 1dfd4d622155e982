"""Runs the recurrence of a linear mixer over a batch, and keeps its states.

On a CPU our own kernels take token after token (`begin`, and `Part.hold`): a state and an output
follow from the tokens before alone, however they were cut, in prefill and in decode.

Elsewhere torch computes (`run`): the tokens of a prompt in chunks between the multiples of
CHUNK_TOKENS, at absolute positions, and those after it one by one. Bits depend on that, too.

Shapes: T rows of the batch, R width of an input row, X width of an output row, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from prfaas.engine.batch import Batch
from prfaas.engine.native.recurrence import Piece
from prfaas.engine.states import CHUNK_TOKENS, LayerState, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows of one sequence in a batch, and where a layer's state is to be kept."""

    rows: slice
    state: State
    """Before the first of them."""
    stops: Sequence[int]
    """Rows of the batch, ascending, before which a state is kept; the last is the rows' end."""
    layer_state: LayerState
    position: int
    """Of the first row."""

    def hold(self, states: Sequence[State]) -> None:
        """Keep the state at each of `stops`."""
        for stop, state in zip(self.stops, states, strict=True):
            self.layer_state.hold(self.position + stop - self.rows.start, state)

    def piece(self, index: int) -> Piece:
        """Return the rows for a kernel that makes the state's tensor `index`, in new memory."""
        tensor = self.state[index]
        ends = [(stop, torch.empty_like(tensor)) for stop in self.stops]
        return Piece(start=self.rows.start, stop=self.rows.stop, state_HKV=tensor, ends=ends)


def begin(batch: Batch, layer: int) -> list[Part]:
    """Return the parts of a batch; a layer must hold each one's state at kv.num_tokens."""
    parts = []
    for rows, segment in batch.parts:
        layer_state, position = segment.kv.state_of(layer), segment.kv.num_tokens
        end = position + rows.stop - rows.start
        stops = [*(at for at in layer_state.wanted if position < at < end), end]
        parts.append(
            Part(
                rows=rows,
                state=layer_state.at(position),
                stops=[rows.start + at - position for at in stops],
                layer_state=layer_state,
                position=position,
            )
        )
    return parts


class Recurrence(Protocol):
    """A mixer's fold over tokens by torch, between its input and output projections."""

    row_dim: int
    """R."""
    out_dim: int
    """X."""

    def scan(
        self, rows_TR: Tensor, state: State, stops: Sequence[int]
    ) -> tuple[Tensor, list[State]]:
        """Return [T, X] by the chunked form, and the state after each of `stops` rows.

        Chunks lie at rows 0, CHUNK_TOKENS, ...; the last is padded such that it leaves the state as
        its rows made it. Stops ascend; each is a multiple of CHUNK_TOKENS, but the last may be T.
        """
        ...

    def step(self, rows_SR: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        """Return [S, X] by the sequential form: one row of each of S sequences, and their states."""
        ...


@dataclass(slots=True, kw_only=True)
class _Walk:
    """Rows of one sequence that are to be taken one by one."""

    layer_state: LayerState
    state: State
    position: int
    """Of the next row."""
    row: int
    stop: int


def run(core: Recurrence, rows_TR: Tensor, batch: Batch, layer: int, out_TX: Tensor) -> None:
    """Write the output rows of all segments to `out_TX`; their layers hold the states wanted.

    Each segment's layer must hold a state at kv.num_tokens; it then also holds one at each of its
    `wanted` positions that lie in the segment, and at the segment's end.
    """
    walks: list[_Walk] = []
    for rows, segment in batch.parts:
        layer_state = segment.kv.state_of(layer)
        position = segment.kv.num_tokens
        num_rows = rows.stop - rows.start
        end = segment.prompt_end
        num_scanned = num_rows if end is None else min(num_rows, max(0, end - position))
        split = rows.start + num_scanned
        state = layer_state.at(position)
        scanned = slice(rows.start, split)
        state = _scan(core, rows_TR[scanned], layer_state, position, state, out_TX[scanned])
        if split < rows.stop:
            walk = _Walk(
                layer_state=layer_state,
                state=state,
                position=position + num_scanned,
                row=split,
                stop=rows.stop,
            )
            walks.append(walk)
    while walks:
        _step(core, rows_TR, walks, out_TX)
        walks = [walk for walk in walks if walk.row < walk.stop]


def _scan(
    core: Recurrence,
    rows_TR: Tensor,
    layer_state: LayerState,
    position: int,
    state: State,
    out_TX: Tensor,
) -> State:
    """Compute rows from `position` on by chunks; return the state after them."""
    start, num_rows = 0, len(rows_TR)
    to_grid = min(num_rows, -position % CHUNK_TOKENS)
    # The rows up to the next grid line make a chunk of their own.
    for stop in (to_grid, num_rows):
        if start == stop:
            continue
        first = position + start
        inside = [at - first for at in layer_state.wanted if first < at < position + stop]
        stops = [*inside, stop - start]
        out_TX[start:stop], states = core.scan(rows_TR[start:stop], state, stops)
        for offset, state in zip(stops, states, strict=True):
            if (at := first + offset) in layer_state.wanted or at == position + num_rows:
                layer_state.hold(at, state)
        start = stop
    return state


def _step(core: Recurrence, rows_TR: Tensor, walks: Sequence[_Walk], out_TX: Tensor) -> None:
    """Take one row of each walk."""
    rows = torch.tensor([walk.row for walk in walks], device=rows_TR.device)
    out_SX, states = core.step(rows_TR[rows], [walk.state for walk in walks])
    out_TX[rows] = out_SX
    for walk, state in zip(walks, states, strict=True):
        walk.state = state
        walk.row += 1
        walk.position += 1
        if walk.row == walk.stop or walk.position in walk.layer_state.wanted:
            walk.layer_state.hold(walk.position, state)
