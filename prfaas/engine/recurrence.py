"""Runs the recurrence of a linear mixer over a batch, and keeps its states.

On a CPU our own kernels take token after token (`begin`, and `Part.hold`): a state and an output
follow from the tokens before alone, however they were cut, in prefill and in decode.

Elsewhere torch computes (`run`): a segment in chunks of CHUNK_TOKENS from where it begins, a single
token by itself. Bits depend on that, too.

Shapes: T rows of the batch, R width of an input row, X width of an output row, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from prfaas.engine.batch import Batch
from prfaas.engine.native.recurrence import Piece
from prfaas.engine.states import LayerState, State

CHUNK_TOKENS = 64
"""Rows that torch's forms take at once."""


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

    def scan(self, rows_TR: Tensor, state: State) -> tuple[Tensor, State]:
        """Return [T, X] by the chunked form, and the state after the rows."""
        ...

    def step(self, rows_SR: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        """Return [S, X] by the sequential form: one row of each of S sequences, and their states."""
        ...


def run(core: Recurrence, rows_TR: Tensor, batch: Batch, layer: int, out_TX: Tensor) -> None:
    """Write the output rows of all segments to `out_TX`, and hold their layers' states.

    Each segment's layer must hold a state at kv.num_tokens; it then also holds one at each of its
    `wanted` positions that lie in the segment, and at the segment's end.
    """
    steps: list[Part] = []
    for part in begin(batch, layer):
        if part.rows.stop - part.rows.start == 1:
            steps.append(part)
            continue
        states, start, state = [], part.rows.start, part.state
        for stop in part.stops:
            out_TX[start:stop], state = core.scan(rows_TR[start:stop], state)
            states.append(state)
            start = stop
        part.hold(states)
    if steps:
        rows = torch.tensor([part.rows.start for part in steps], device=rows_TR.device)
        out_SX, after = core.step(rows_TR[rows], [part.state for part in steps])
        out_TX[rows] = out_SX
        for part, state in zip(steps, after, strict=True):
            part.hold([state])
