"""Steps that are run from a recording have the bits of plain ones, or none is recorded."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from prfaas.engine.batch import Segment
from prfaas.engine.kv import LayerKv
from prfaas.engine.model import Model
from prfaas.engine.recording import NUM_PLAIN, Recordings
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
    num_run = len(MEMBERS) - 3 * (NUM_PLAIN + 1)
    assert (recorded.recordings.num_recorded, recorded.recordings.num_run) == (3, num_run)
    assert (plain.recordings.num_recorded, plain.recordings.num_run) == (0, 0)
