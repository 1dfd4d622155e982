"""Steps that are run from a recording have the bits of plain ones, or none is recorded."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from prfaas.engine.batch import Batch, OnWritten, Rows, Segment
from prfaas.engine.kv import LayerKv
from prfaas.engine.model import Model
from prfaas.engine.native.activations import activated
from prfaas.engine.recorder import by_value
from prfaas.engine.recording import MAX_ROWS, NUM_PLAIN, Recordings
from prfaas.engine.sequence_kv import SequenceKv
from tests.engine.golden import BLOCK_TOKENS, load, tokens_of
from tests.tiny_configs import FAMILIES, Family

PROMPT_TOKENS = (1, 60, 13, 7)
"""Of the sequences: they pass a block's end, and the ends of windows, while they are decoded."""
MEMBERS = [(0,), (2,), (1,), (1,), (0, 1), (2, 1), (1, 2), (2, 0), (3,), (2,)] * 2
MEMBERS += [(0, 1, 2), (3, 2, 1), (2, 0, 3), (1, 2, 0), (1,)]
"""Of each step's batch, in this order."""


@cache
def tiny(family: Family) -> Model:
    return load(family)


class Decoding:
    """Sequences of a model that are decoded in changing company; each step's layers are written down."""

    def __init__(self, model: Model, *, is_plain: bool = False) -> None:
        self.model = model
        self.recordings = Recordings(model.layers, max_bytes=0 if is_plain else 64 << 20)
        self.kvs = [
            model.new_kv(capacity_tokens=300, block_tokens=BLOCK_TOKENS) for _ in PROMPT_TOKENS
        ]
        self.tokens = [tokens_of(seed, 300) for seed in range(len(PROMPT_TOKENS))]
        self.layers: list[int] = []
        self._forward(list(enumerate(PROMPT_TOKENS)))

    def step(self, members: Sequence[int]) -> Tensor:
        return self._forward([(number, 1) for number in members])

    def _forward(self, parts: Sequence[tuple[int, int]]) -> Tensor:
        segments = [self._segment(number, length) for number, length in parts]
        self.model.recordings = self.recordings
        return self.model.forward(segments, on_layer=self.layers.append)

    def _segment(self, number: int, length: int) -> Segment:
        kv = self.kvs[number]
        tokens = self.tokens[number][kv.num_tokens : kv.num_tokens + length]
        return Segment(kv=kv, tokens=tokens, num_logits=1)


def assert_same_bits(left: Decoding, right: Decoding) -> None:
    """All that the sequences hold is the same."""
    for kv, other in zip(left.kvs, right.kvs, strict=True):
        assert kv.num_tokens == other.num_tokens
        for layer, same in zip(kv.layers, other.layers, strict=True):
            if layer is not None and same is not None:
                for held, also in zip(
                    *(kept(x, kv.num_tokens) for x in (layer, same)), strict=True
                ):
                    assert torch.equal(held, also)
        for state, twin in zip(kv.states, other.states, strict=True):
            if state is not None and twin is not None:
                pairs = zip(state.at(kv.num_tokens), twin.at(kv.num_tokens), strict=True)
                assert all(torch.equal(*pair) for pair in pairs)


def kept(layer: LayerKv, num_tokens: int) -> list[Tensor]:
    """Return a layer's keys and values."""
    return [buffer_HCK[:, : num_tokens - layer.base_tokens] for buffer_HCK in layer.buffers]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_step_has_the_bits_of_a_plain_one(family: Family) -> None:
    check_steps(family)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_a_recorded_step_is_shared_among_threads(family: Family) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        check_steps(family)
    finally:
        torch.set_num_threads(before)


def check_steps(family: Family) -> None:
    recorded, plain = Decoding(tiny(family)), Decoding(tiny(family), is_plain=True)
    for members in MEMBERS:
        assert torch.equal(recorded.step(members), plain.step(members))
    assert recorded.layers == plain.layers
    assert_same_bits(recorded, plain)
    num_run = len(MEMBERS) - 3 * NUM_PLAIN
    assert (recorded.recordings.num_recorded, recorded.recordings.num_run) == (3, num_run)
    assert (plain.recordings.num_recorded, plain.recordings.num_run) == (0, 0)


Layers = Callable[[Tensor, Rows], object]
WIDTH = 16


def batch_at(position: int) -> Batch:
    """Return two rows, at a position and at 10."""
    segments = []
    for number in (position, 10):
        kv = SequenceKv([], capacity_tokens=1000, block_tokens=64)
        kv.num_tokens = number
        segments.append(Segment(kv=kv, tokens=[0], num_logits=1))
    return Batch(segments)


def ran(recordings: Recordings, layers: Layers, position: int) -> Tensor:
    x_TD = torch.full((2, WIDTH), 0.5 + position)
    return recordings.run(x_TD, batch_at(position), layers).clone()


def assert_always_as_plain(recordings: Recordings, layers: Layers) -> None:
    for position in range(1, NUM_PLAIN + 6):
        expected = torch.full((2, WIDTH), 0.5 + position)
        layers(expected, Rows(batch_at(position)))
        assert torch.equal(ran(recordings, layers, position), expected)


def add_by_kernel(x_TD: Tensor, y_TD: Tensor) -> None:
    """Add the kernel's silu of `y_TD`."""
    x_TD.add_(activated("silu", y_TD))


WEIGHT = torch.linspace(-1.0, 1.0, WIDTH)
HELD = [WEIGHT]


def allowed(x_TD: Tensor, rows: Rows) -> None:
    """What a layer may do."""
    y_TD = activated("gelu_tanh", x_TD * WEIGHT)
    seen_TD = torch.zeros_like(x_TD)

    def step(batch: Batch) -> None:
        seen_TD.copy_(batch.positions_T.float()[:, None] * y_TD)

    rows.each_time(step)
    for _ in range(3):  # in memory that is used again
        z_TD = activated("sigmoid", seen_TD) + 1.0
        seen_TD += torch.cat([z_TD[:, 1:], z_TD[:, :1]], dim=1).contiguous()
        seen_TD[:, ::2] *= 0.5

    def turn_the_largest() -> None:
        seen_TD[:, int(seen_TD.argmax()) % WIDTH].neg_()

    by_value(turn_the_largest)
    x_TD.copy_(torch.sort(seen_TD, dim=1).values).mul_(3.0)


def test_torch_and_kernels_and_what_depends_on_a_batch_are_run_in_their_order() -> None:
    recordings = Recordings(HELD)
    assert_always_as_plain(recordings, allowed)
    assert (recordings.num_recorded, recordings.num_run) == (1, 5)


def leaked_tensor(x_TD: Tensor, rows: Rows) -> None:
    found: list[Tensor] = []
    rows.each_time(lambda batch: found.append(batch.positions_T.float()))
    x_TD.mul_(found[0][:, None])


def leaked_number(x_TD: Tensor, rows: Rows) -> None:
    found: list[int] = []
    rows.each_time(lambda batch: found.append(int(batch.positions_T[0])))
    x_TD.mul_(found[0])


class Remembering:
    """Keeps what it made of another forward."""

    def __init__(self) -> None:
        self.seen_TD = torch.zeros(2, WIDTH)

    def __call__(self, x_TD: Tensor, rows: Rows) -> None:
        def step(batch: Batch) -> None:
            self.seen_TD = batch.positions_T.float()[:, None].repeat(1, WIDTH)

        rows.each_time(step)
        add_by_kernel(x_TD, self.seen_TD)


def renamed(x_TD: Tensor, rows: Rows) -> None:
    y_TD = x_TD * WEIGHT
    rows.each_time(lambda _: x_TD.add_(y_TD))
    y_TD = y_TD + 1.0


def renamed_inside(x_TD: Tensor, rows: Rows) -> None:
    y_TD = x_TD * WEIGHT

    def added() -> Tensor:
        return y_TD + 1.0

    rows.each_time(lambda _: x_TD.add_(added()))
    y_TD = y_TD + 1.0


UNSAFE: dict[str, Layers] = {
    "a tensor that is made each time": leaked_tensor,
    "a number that is made each time": leaked_number,
    "a tensor that another forward made": Remembering(),
    "a value": lambda x_TD, _: x_TD.mul_(float(x_TD[0, 0])),
    "a choice by a value": lambda x_TD, _: x_TD.neg_() if x_TD[0, 0] > 3 else None,
    "values in numpy": lambda x_TD, _: x_TD.mul_(torch.from_numpy(x_TD.numpy().copy())),
    "values in a list": lambda x_TD, _: x_TD.mul_(x_TD.tolist()[0][0]),
    "a shape that depends on values": lambda x_TD, _: x_TD.add_((x_TD > 3).nonzero().numel()),
    "memory of nobody": lambda x_TD, _: add_by_kernel(x_TD, torch.tensor([[1.0] * WIDTH] * 2)),
    "a constant of nobody": lambda x_TD, _: x_TD.add_(torch.tensor([2.0])),
    "a shape that each run would turn": lambda x_TD, _: x_TD.add_((x_TD * 2.0).t_().t_()),
    "a layer's own tensor, changed": lambda x_TD, _: x_TD.add_(WEIGHT.mul_(1.0)),
    "a name that means another tensor later": renamed,
    "a name in a name that means another tensor later": renamed_inside,
}


@pytest.mark.parametrize("layers", UNSAFE.values(), ids=UNSAFE)
def test_what_could_be_another_value_next_time_is_not_recorded(layers: Layers) -> None:
    recordings = Recordings(HELD)
    assert_always_as_plain(recordings, layers)
    assert (recordings.num_recorded, recordings.num_run) == (0, 0)


def test_chance_is_not_recorded() -> None:
    recordings = Recordings(HELD)

    def layers(x_TD: Tensor, _: Rows) -> None:
        x_TD.add_(torch.rand(WIDTH))

    results = [ran(recordings, layers, 1) for _ in range(NUM_PLAIN + 3)]
    assert recordings.num_recorded == 0
    assert not torch.equal(results[-1], results[-2])


@pytest.mark.parametrize("name", ["positions_T", "tokens_T", "parts", "logit_rows"])
def test_a_layer_cannot_see_whose_rows_they_are(name: str) -> None:
    assert not hasattr(Rows(batch_at(3)), name)


def test_an_error_leaves_a_recording_that_can_be_run_again() -> None:
    recordings, failing = Recordings(HELD), [False]

    def layers(x_TD: Tensor, rows: Rows) -> None:
        def step(_: Batch) -> None:
            if failing[0]:
                raise OSError("a disk is full")

        x_TD.mul_(WEIGHT)
        rows.each_time(step)
        x_TD.add_(1.0)

    expected = [ran(recordings, layers, 3) for _ in range(NUM_PLAIN + 2)]
    failing[0] = True
    with pytest.raises(OSError, match="full"):
        ran(recordings, layers, 3)
    failing[0] = False
    assert torch.equal(ran(recordings, layers, 3), expected[0])
    assert recordings.num_recorded == 1


def test_an_error_of_the_first_recorded_step_is_the_forwards() -> None:
    recordings, num_calls = Recordings(HELD), [0]

    def layers(x_TD: Tensor, rows: Rows) -> None:
        def step(_: Batch) -> None:
            num_calls[0] += 1
            if num_calls[0] == NUM_PLAIN + 1:
                raise OSError("a disk is full")

        x_TD.mul_(WEIGHT)
        rows.each_time(step)

    expected = [ran(recordings, layers, 3) for _ in range(NUM_PLAIN)]
    with pytest.raises(OSError, match="full"):
        ran(recordings, layers, 3)
    assert torch.equal(ran(recordings, layers, 3), expected[0])
    assert num_calls == [NUM_PLAIN + 2]
    assert recordings.num_run == 2


def test_recordings_used_longest_ago_go_first() -> None:
    def layers(x_TD: Tensor, rows: Rows) -> None:
        x_TD.mul_(activated("silu", x_TD))

    def run(num_rows: int) -> None:
        kv = SequenceKv([], capacity_tokens=100, block_tokens=64)
        batch = Batch([Segment(kv=kv, tokens=[0] * num_rows, num_logits=1)])
        recordings.run(torch.ones(num_rows, 4096), batch, layers)

    recordings = Recordings([], max_bytes=180_000)
    for num_rows in (1, 2, 3):  # 16 KiB for each row, twice
        for _ in range(NUM_PLAIN + 1):
            run(num_rows)
        assert 0 < recordings.nbytes <= 180_000
    assert recordings.num_recorded == 3
    run(3)
    num_run = recordings.num_run
    run(1)  # gone
    assert recordings.num_run == num_run
    run(MAX_ROWS + 1)
    assert recordings.num_run == num_run


def test_what_has_no_room_is_not_recorded() -> None:
    recordings = Recordings(HELD, max_bytes=1000)
    assert_always_as_plain(recordings, allowed)
    assert (recordings.num_recorded, recordings.nbytes) == (0, 0)


def test_another_number_of_threads_has_recordings_of_its_own() -> None:
    recordings, before = Recordings(HELD), torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            assert_always_as_plain(recordings, allowed)
    finally:
        torch.set_num_threads(before)
    assert recordings.num_recorded == 2


def test_models_that_alternate_do_not_disturb_each_other() -> None:
    families: list[Family] = ["gemma3", "qwen3"]
    pairs = [(Decoding(tiny(f)), Decoding(tiny(f), is_plain=True)) for f in families]
    for members in MEMBERS[:12]:
        for recorded, plain in pairs:
            assert torch.equal(recorded.step(members), plain.step(members))
    assert all(recorded.recordings.num_run > 0 for recorded, _ in pairs)


def test_a_model_may_be_run_while_another_is() -> None:
    outer, inner = Recordings(HELD), Recordings(HELD)

    def layers(x_TD: Tensor, rows: Rows) -> None:
        y_TD = x_TD * WEIGHT
        rows.each_time(lambda _: y_TD.add_(ran(inner, allowed, 7)))
        x_TD.add_(y_TD)

    assert_always_as_plain(outer, layers)
    assert outer.num_run == 5
    assert inner.num_run > 5


class PositionKept:
    """A mixer that adds each row's position, as its sequence's first step after a change finds it."""

    def __init__(self) -> None:
        self.added = 0.0

    def __call__(self, x_TD: Tensor, rows: Rows, layer: int, on_written: OnWritten) -> Tensor:
        def step(batch: Batch) -> None:
            self.added = float(batch.positions_T.sum())
            on_written(batch)

        rows.each_time(step)
        return x_TD + self.added


def test_a_model_whose_recorded_steps_differ_makes_no_recordings() -> None:
    model = load("qwen3")
    model.choose_recordings()
    faithful = model.recordings
    first, *others = model.layers
    model.layers = (replace(first, mixer=PositionKept()), *others)
    model.choose_recordings()
    assert model.recordings is not faithful
    kv = model.new_kv(capacity_tokens=100)
    for _ in range(NUM_PLAIN + 4):
        model.forward([Segment(kv=kv, tokens=[1], num_logits=1)])
    assert (model.recordings.num_recorded, model.recordings.num_run) == (0, 0)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "kimi_linear", "gpt_oss"])
def test_a_model_whose_recorded_steps_are_right_makes_recordings(family: Family) -> None:
    model = load(family)
    before = model.recordings
    model.choose_recordings()
    assert model.recordings is before


@pytest.mark.parametrize("is_first", [True, False])
def test_a_recording_outlives_the_mode_that_it_was_made_in(is_first: bool) -> None:
    recordings = Recordings(HELD)
    for number in range(NUM_PLAIN + 4):
        with torch.inference_mode((number <= NUM_PLAIN) == is_first):
            expected = torch.full((2, WIDTH), 0.5 + number)
            allowed(expected, Rows(batch_at(number)))
            assert torch.equal(ran(recordings, allowed, number), expected)
    assert (recordings.num_recorded, recordings.num_run) == (1, 4)
