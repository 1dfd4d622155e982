"""The driver of linear mixers: which rows are walked, scanned and stepped, and what is held."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.batch import Batch, Segment
from prfaas.engine.mixer_spec import LightningSpec
from prfaas.engine.recurrence import Part, begin, run
from prfaas.engine.sequence_kv import SequenceKv
from prfaas.engine.states import State

SPEC = LightningSpec(num_heads=1, head_dim=2, scale=1.0, slope_scale=1.0)


class TracingSum:
    """Counts and adds up rows: the state [1, 2, 2] holds the rows seen so far and their sum.

    An output row tells what it saw: [rows before it in its call, sum through it].
    """

    row_dim = 1
    out_dim = 2

    def __init__(self) -> None:
        self.scans: list[int] = []
        self.steps: list[int] = []
        self.failures_left = 0

    def scan(self, rows_TR: Tensor, state: State) -> tuple[Tensor, State]:
        self._maybe_fail()
        assert len(rows_TR) > 0
        self.scans.append(len(rows_TR))
        [memory] = state
        sums_T = memory[0, 0, 1] + rows_TR[:, 0].cumsum(0)
        places_T = torch.arange(len(rows_TR))
        after = _memory(memory[0, 0, 0] + len(rows_TR), sums_T[-1])
        return torch.stack([places_T, sums_T], dim=1), after

    def step(self, rows_SR: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        self._maybe_fail()
        self.steps.append(len(rows_SR))
        sums = [memory[0, 0, 1] + row[0] for row, (memory,) in zip(rows_SR, states, strict=True)]
        counts = [memory[0, 0, 0] + 1 for (memory,) in states]
        out = torch.stack([torch.stack([torch.tensor(-1.0), value]) for value in sums])
        return out, [_memory(count, value) for count, value in zip(counts, sums, strict=True)]

    def _maybe_fail(self) -> None:
        if self.failures_left:
            self.failures_left -= 1
            raise RuntimeError("as asked")


def _memory(count: Tensor, value: Tensor) -> State:
    memory = torch.zeros(1, 2, 2)
    memory[0, 0, 0], memory[0, 0, 1] = count, value
    return (memory,)


def new_kv() -> SequenceKv:
    return SequenceKv([SPEC], capacity_tokens=1024, block_tokens=64)


def values(start: int, stop: int) -> Tensor:
    """Rows whose sums are exact: 1, 2, ... by position."""
    return torch.arange(start + 1, stop + 1, dtype=torch.float32)[:, None]


def forward(
    core: TracingSum,
    parts: Sequence[tuple[SequenceKv, int]],
    wanted: Sequence[int] = (),
) -> list[Tensor]:
    """Run (kv, number of tokens) as one batch; return their output rows."""
    batch = Batch([Segment(kv=kv, tokens=[0] * count, num_logits=0) for kv, count in parts])
    rows = [values(kv.num_tokens, kv.num_tokens + count) for kv, count in parts]
    out_TX = torch.full((len(batch.tokens_T), 2), torch.nan)
    for kv, _ in parts:
        kv.begin_forward(wanted)
    run(core, torch.cat(rows), batch, 0, out_TX)
    for kv, count in parts:
        kv.num_tokens += count
    return [out_TX[where] for where, _ in batch.parts]


def memory(kv: SequenceKv, position: int) -> tuple[float, float]:
    """Return the rows counted and added at `position`."""
    row = kv.state_of(0).at(position)[0][0, 0]
    return float(row[0]), float(row[1])


def total(position: int) -> float:
    return position * (position + 1) / 2


def test_states_are_held_where_they_are_wanted_and_at_the_end() -> None:
    core, kv = TracingSum(), new_kv()
    forward(core, [(kv, 200)], wanted=[64, 190, 256])
    assert core.scans == [64, 126, 10]
    assert kv.state_of(0).positions == (64, 190, 200)
    forward(core, [(kv, 100)], wanted=[256])
    assert core.scans[3:] == [56, 44]
    for position in (200, 256, 300):
        assert memory(kv, position) == (position, total(position))


def test_single_tokens_are_stepped_together_and_longer_parts_are_scanned() -> None:
    core, first, second, third = TracingSum(), new_kv(), new_kv(), new_kv()
    forward(core, [(first, 66), (second, 1), (third, 5)])
    assert (core.scans, core.steps) == ([66, 5], [1])
    outs = forward(core, [(first, 1), (second, 1), (third, 2)])
    assert (core.scans, core.steps) == ([66, 5, 2], [1, 2])
    for kv, num_tokens, out in zip((first, second, third), (67, 2, 7), outs, strict=True):
        assert memory(kv, num_tokens) == (num_tokens, total(num_tokens))
        assert out[-1, 1] == total(num_tokens)


@given(cuts=st.sets(st.integers(1, 299), max_size=6))
@settings(max_examples=30)
def test_any_cuts_take_every_row_once(cuts: set[int]) -> None:
    core, kv = TracingSum(), new_kv()
    outs = []
    for stop in [*sorted(cuts), 300]:
        outs += forward(core, [(kv, stop - kv.num_tokens)], wanted=[64, 128, 256])
        assert memory(kv, stop) == (stop, total(stop))
    assert torch.equal(torch.cat(outs)[:, 1], values(0, 300)[:, 0].cumsum(0))
    assert sum(core.steps) + sum(core.scans) == 300


@pytest.mark.parametrize("num_calls_before", [0, 1, 2, 3])
def test_a_failed_forward_can_be_run_again(num_calls_before: int) -> None:
    class Failing(TracingSum):
        def _maybe_fail(self) -> None:
            if self.failures_left:
                self.failures_left -= 1
                if self.failures_left == 0:
                    raise RuntimeError("as asked")

    core = Failing()
    kvs = [new_kv() for _ in range(4)]
    forward(core, [(kv, 70) for kv in kvs])
    before = [kv.state_of(0).at(70) for kv in kvs]
    copies = [[tensor.clone() for tensor in state] for state in before]
    core.failures_left = num_calls_before + 1
    with pytest.raises(RuntimeError, match="as asked"):
        forward(core, [(kv, 30) for kv in kvs])
    for kv, state, copy in zip(kvs, before, copies, strict=True):
        assert all(map(torch.equal, kv.state_of(0).at(70), copy))
        assert kv.state_of(0).at(70) is state
    outs = forward(core, [(kv, 30) for kv in kvs])
    for out in outs:
        assert torch.equal(out[:, 1], values(0, 100)[70:, 0].cumsum(0) + total(70))


@given(
    cuts=st.sets(st.integers(1, 299), max_size=6), wanted=st.sets(st.integers(1, 320), max_size=4)
)
@settings(max_examples=30)
def test_parts_keep_states_at_wanted_positions_and_at_ends(
    cuts: set[int], wanted: set[int]
) -> None:
    kv = new_kv()
    for stop in [*sorted(cuts), 300]:
        start, neighbour = kv.num_tokens, new_kv()
        segments = [
            Segment(kv=neighbour, tokens=[0] * 2, num_logits=0),
            Segment(kv=kv, tokens=[0] * (stop - start), num_logits=0),
        ]
        for each in (kv, neighbour):
            each.begin_forward(sorted(wanted))
        _, part = begin(Batch(segments), 0)
        assert part.rows == slice(2, 2 + stop - start)
        part.hold([walked(part, row) for row in part.stops])
        inside = {at for at in wanted if start < at < stop}
        kept = start // 64 * 64
        held = set(kv.state_of(0).positions)
        assert held - {kept} == (inside | {start, stop}) - {0, kept}
        for position in (*inside, stop):
            assert memory(kv, position) == (position, total(position))
        kv.num_tokens = stop


def walked(part: Part, row: int) -> State:
    """Return what the state is before a row."""
    [state] = part.state
    count = float(state[0, 0, 0]) + row - part.rows.start
    return _memory(torch.tensor(count), torch.tensor(total(int(count))))


def test_a_piece_has_memory_of_its_own_for_every_state() -> None:
    kv = new_kv()
    kv.begin_forward([2])
    [part] = begin(Batch([Segment(kv=kv, tokens=[0] * 5, num_logits=0)]), 0)
    piece = part.piece(0)
    assert [row for row, _ in piece.ends] == [2, 5]
    assert piece.state_HKV is part.state[0]
    places = {tensor.data_ptr() for tensor in (piece.state_HKV, *(t for _, t in piece.ends))}
    assert len(places) == 3
