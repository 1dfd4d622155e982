"""What every linear mixer is tested for, through its core and through batches.

Shapes: T rows, R width of a projected row, D model dim.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.batch import Batch, OnWritten, Rows, Segment
from prfaas.engine.linear import Linear, Packing, pack
from prfaas.engine.mixer_spec import MixerSpec
from prfaas.engine.recurrence import Recurrence
from prfaas.engine.sequence_kv import SequenceKv
from prfaas.engine.states import State

PACKING: Packing = "fma-f32"


class Mixer(Protocol):
    def __call__(self, x_TD: Tensor, rows: Rows, layer: int, on_written: OnWritten) -> Tensor: ...


def linear(num_outputs: int, num_inputs: int, generator: torch.Generator) -> Linear:
    """Return a random layer that keeps the size of its rows' values."""
    weight_NK = torch.randn(num_outputs, num_inputs, generator=generator) * num_inputs**-0.5
    return pack(weight_NK, PACKING)


@st.composite
def cuts(draw: st.DrawFn, *, grid: int = 1, max_tokens: int = 200) -> list[int]:
    """Draw 0, ..., the number of tokens, ascending, all but the last multiples of `grid`."""
    num_tokens = draw(st.integers(1, max_tokens))
    last = (num_tokens - 1) // grid
    inner = draw(st.sets(st.integers(1, last), max_size=4)) if last else set()
    return [0, *sorted(cut * grid for cut in inner), num_tokens]


def zero_state(spec: MixerSpec) -> State:
    return tuple(torch.zeros(state.shape) for state in spec.states)


def same_bits(left: State, right: State) -> bool:
    return all(map(torch.equal, left, right))


def steps(core: Recurrence, rows_TR: Tensor, state: State) -> tuple[Tensor, State]:
    """Return the outputs and the last state by the step form."""
    out = []
    for row_R in rows_TR:
        row, [state] = core.step(row_R[None], [state])
        out.append(row)
    return torch.cat(out), state


def scan(core: Recurrence, rows_TR: Tensor, state: State) -> tuple[Tensor, State]:
    """Return the outputs and the last state by the chunked form."""
    return core.scan(rows_TR, state)


def new_kv(spec: MixerSpec) -> SequenceKv:
    return SequenceKv([spec], capacity_tokens=1024, block_tokens=64)


def mix(
    mixer: Mixer,
    parts: Sequence[tuple[SequenceKv, Tensor]],
    wanted: Sequence[int] = (),
) -> list[Tensor]:
    """Return the output rows of (kv, input rows), in one forward."""
    segments = [Segment(kv=kv, tokens=[0] * len(x_TD), num_logits=0) for kv, x_TD in parts]
    for kv, _ in parts:
        kv.begin_forward(wanted)
    batch = Batch(segments)
    written: list[Batch] = []
    out_TD = mixer(torch.cat([x_TD for _, x_TD in parts]), Rows(batch), 0, written.append)
    assert written == [batch]
    for kv, x_TD in parts:
        kv.num_tokens += len(x_TD)
    return [out_TD[rows] for rows, _ in batch.parts]


def mixed(mixer: Mixer, kv: SequenceKv, x_TD: Tensor, at: Sequence[int]) -> Iterator[Tensor]:
    """Yield the output rows of one sequence, cut at `at`."""
    for start, stop in pairwise(at):
        [rows] = mix(mixer, [(kv, x_TD[start:stop])])
        yield rows


def check_mixer_cuts(mixer: Mixer, spec: MixerSpec, x_TD: Tensor, at: Sequence[int]) -> None:
    """Forwards cut anywhere give the bits of one: rows, states at the cuts, and those at the end."""
    whole, pieces = new_kv(spec), new_kv(spec)
    [expected] = mix(mixer, [(whole, x_TD)], wanted=at[1:])
    for start, stop in pairwise(at):
        [rows] = mix(mixer, [(pieces, x_TD[start:stop])])
        assert torch.equal(rows, expected[start:stop])
        assert same_bits(pieces.state_of(0).at(stop), whole.state_of(0).at(stop))


def check_mixer_threads(mixer: Mixer, spec: MixerSpec, x_TD: Tensor) -> None:
    """The number of threads changes no bit."""
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            kv = new_kv(spec)
            [rows] = mix(mixer, [(kv, x_TD)])
            results.append((rows, *kv.state_of(0).at(len(x_TD))))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def check_mixer_neighbours(mixer: Mixer, spec: MixerSpec, x_TD: Tensor) -> None:
    """A prompt and a decode step beside each other have the bits of each alone."""
    half = len(x_TD) // 2
    alone, beside, stepping, stepping_beside = (new_kv(spec) for _ in range(4))
    [rows] = mix(mixer, [(alone, x_TD[:half])])
    for kv in (stepping, stepping_beside):
        mix(mixer, [(kv, x_TD[half:-1])])
    [step_rows] = mix(mixer, [(stepping, x_TD[-1:])])
    first, second = mix(mixer, [(stepping_beside, x_TD[-1:]), (beside, x_TD[:half])])
    assert torch.equal(first, step_rows)
    assert torch.equal(second, rows)
    assert same_bits(beside.state_of(0).at(half), alone.state_of(0).at(half))
    end = len(x_TD) - half
    assert same_bits(stepping_beside.state_of(0).at(end), stepping.state_of(0).at(end))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected value."""
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max())
