"""Runs the recurrence of a linear mixer over a batch, and keeps its states.

Default: the tokens of a prompt are computed in chunks between the multiples of CHUNK_TOKENS, at
absolute positions, and those after it one by one. So the bits are a function of the tokens and the
prompt's length, as long as every cut lies on that grid.

Strict: a row is always computed as a row of the whole chunk it lies in, from the state at the grid
line and the input rows since, zeros after it. So the bits do not depend on any cut, at the price of
a chunk for each decoded token.

Shapes: T rows of the batch, R width of an input row, X width of an output row, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from prfaas.engine.batch import Batch
from prfaas.engine.states import CHUNK_TOKENS, LayerState, State


class Recurrence(Protocol):
    """A mixer's fold over tokens, between its input and output projections."""

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
        """Return [S, X] by the sequential form: one row of each of S sequences, and their states.

        A sequence's bits do not depend on the others.
        """
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
        if layer_state.replay_dim is not None:
            _replay(core, rows_TR[rows], layer_state, position, out_TX[rows])
            continue
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


def _replay(
    core: Recurrence, rows_TR: Tensor, layer_state: LayerState, position: int, out_TX: Tensor
) -> None:
    """Compute rows from `position` on as rows of whole chunks."""
    *carried, kept_CR = layer_state.at(position)
    num_kept = position % CHUNK_TOKENS
    if num_kept:
        rows_TR = torch.cat([kept_CR[:num_kept], rows_TR])
    first, num_rows = position - num_kept, len(rows_TR)
    end = first + num_rows
    last_line = end - end % CHUNK_TOKENS
    lines = {at for at in (*layer_state.wanted, last_line) if first < at <= last_line}
    stops = sorted(at - first for at in lines)
    out, states = core.scan(rows_TR, tuple(carried), stops)
    out_TX.copy_(out[num_kept:])
    for stop, state in zip(stops, states, strict=True):
        carried = list(state)
        layer_state.hold(first + stop, (*state, torch.zeros_like(kept_CR)))
    if end > last_line:
        since_CR = torch.zeros_like(kept_CR)
        since_CR[: end - last_line] = rows_TR[last_line - first :]
        layer_state.hold(end, (*carried, since_CR))
