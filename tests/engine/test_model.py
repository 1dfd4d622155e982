"""The model: logits equal to transformers', and bits that no cut, neighbour or import changes."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.cache.spec import bytes_of_page, needed_blocks
from prfaas.engine.loader import load_model
from prfaas.engine.model import Model, Segment
from prfaas.engine.sequence_kv import SequenceKv
from tests.tiny_models import VOCAB_SIZE, Family, write_tiny_model

FAMILIES: tuple[Family, ...] = ("gemma3", "llama", "qwen3")
DTYPES: tuple[Literal["float16", "float32"], ...] = ("float16", "float32")
NUM_TOKENS = 300
BLOCK_TOKENS = 16
TOKENS: list[int] = torch.randint(
    4, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(7)
).tolist()


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(root / family, family) for family in FAMILIES}


class Exact:
    """A model, and the bits of a prefill in single tokens that every other way must give."""

    def __init__(self, directory: Path, dtype: Literal["float16", "float32"]) -> None:
        self.model = load_model(directory, dtype=dtype)
        self.kv = self.new_kv()
        self.logits_TV = torch.cat([forward(self.model, self.kv, [token]) for token in TOKENS])

    def new_kv(self) -> SequenceKv:
        return self.model.new_kv(capacity_tokens=NUM_TOKENS, block_tokens=BLOCK_TOKENS)

    def pages(self, kv: SequenceKv) -> Iterator[tuple[int, int, int, bytes]]:
        """(layer, block, tokens in it, bytes) of all that is needed to go on."""
        for group in self.model.layout(BLOCK_TOKENS).groups:
            for block in needed_blocks(group, kv.num_tokens, BLOCK_TOKENS):
                count = min(BLOCK_TOKENS, kv.num_tokens - block * BLOCK_TOKENS)
                for layer in group.layers:
                    out = bytearray(bytes_of_page(group, 0, count, BLOCK_TOKENS))
                    kv.export_block(layer, block, count, memoryview(out))
                    yield layer, block, count, bytes(out)


def forward(model: Model, kv: SequenceKv, tokens: list[int]) -> Tensor:
    return model.forward([Segment(kv=kv, tokens=tokens, num_logits=1)])


@pytest.fixture(
    scope="module", params=[(family, dtype) for family in FAMILIES for dtype in DTYPES], ids=str
)
def exact(request: pytest.FixtureRequest, directories: dict[Family, Path]) -> Exact:
    family, dtype = request.param
    return Exact(directories[family], dtype)


cuts_strategy = st.sets(st.integers(1, NUM_TOKENS - 1), max_size=6).map(
    lambda cuts: [0, *sorted(cuts), NUM_TOKENS]
)


@given(cuts=cuts_strategy)
@settings(max_examples=15, deadline=None)
def test_no_cut_changes_a_bit(exact: Exact, cuts: list[int]) -> None:
    kv = exact.new_kv()
    for start, stop in pairwise(cuts):
        logits = forward(exact.model, kv, TOKENS[start:stop])
        assert torch.equal(logits[0], exact.logits_TV[stop - 1])
    assert list(exact.pages(kv)) == list(exact.pages(exact.kv))


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_neighbours_in_a_batch_do_not_change_a_bit(exact: Exact, data: st.DataObject) -> None:
    waiting = [data.draw(cuts_strategy) for _ in range(data.draw(st.integers(2, 4)))]
    kvs = [exact.new_kv() for _ in waiting]
    while any(len(cuts) > 1 for cuts in waiting):
        going = [i for i, cuts in enumerate(waiting) if len(cuts) > 1]
        chosen = data.draw(st.permutations(going))[: data.draw(st.integers(1, len(going)))]
        segments, expected = [], []
        for i in chosen:
            start, stop = waiting[i][:2]
            num_logits = data.draw(st.integers(0, 1))
            segments.append(Segment(kv=kvs[i], tokens=TOKENS[start:stop], num_logits=num_logits))
            expected += [exact.logits_TV[stop - 1]] * num_logits
            del waiting[i][0]
        logits = exact.model.forward(segments)
        assert len(logits) == len(expected)
        assert all(torch.equal(ours, one) for ours, one in zip(logits, expected, strict=True))


@given(length=st.integers(1, NUM_TOKENS - 1), step=st.integers(1, NUM_TOKENS))
@settings(max_examples=15, deadline=None)
def test_an_imported_sequence_goes_on_with_the_same_bits(
    exact: Exact, length: int, step: int
) -> None:
    source, target = exact.new_kv(), exact.new_kv()
    forward(exact.model, source, TOKENS[:length])
    for layer, block, count, page in exact.pages(source):
        target.import_block(layer, block, count, memoryview(page))
    target.set_num_tokens(length)
    stop = min(length + step, NUM_TOKENS)
    assert torch.equal(
        forward(exact.model, target, TOKENS[length:stop])[0], exact.logits_TV[stop - 1]
    )


def test_a_fork_goes_on_with_the_same_bits(exact: Exact) -> None:
    kv = exact.new_kv()
    forward(exact.model, kv, TOKENS[:100])
    other = kv.fork()
    forward(exact.model, kv, TOKENS[200:260])
    assert torch.equal(forward(exact.model, other, TOKENS[100:200])[0], exact.logits_TV[199])


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_do_not_change_a_bit(exact: Exact, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    try:
        kv = exact.new_kv()
        logits = torch.cat(
            [forward(exact.model, kv, TOKENS[:260]), forward(exact.model, kv, TOKENS[260:])]
        )
    finally:
        torch.set_num_threads(1)
    assert torch.equal(logits, exact.logits_TV[[259, NUM_TOKENS - 1]])


def test_each_layer_can_be_exported_when_it_is_announced(exact: Exact) -> None:
    kv = exact.new_kv()
    announced: list[int] = []

    def on_layer(layer: int) -> None:
        announced.append(layer)
        layout = exact.model.layout(BLOCK_TOKENS)
        ((group, _),) = layout.groups_of_layer(layer)
        size = layout.groups[group].page_bytes
        out = bytearray(size)
        kv.export_block(layer, 5, BLOCK_TOKENS, memoryview(out))
        assert kv.num_tokens == 80

    forward(exact.model, kv, TOKENS[:80])
    exact.model.forward([Segment(kv=kv, tokens=TOKENS[80:96], num_logits=0)], on_layer=on_layer)
    assert announced == list(range(len(exact.model.config.layers)))
    assert kv.num_tokens == 96


def test_a_forward_that_failed_can_be_run_again(exact: Exact) -> None:
    kv = exact.new_kv()
    forward(exact.model, kv, TOKENS[:100])

    def fail(layer: int) -> None:
        if layer == 2:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        exact.model.forward([Segment(kv=kv, tokens=TOKENS[100:150], num_logits=1)], on_layer=fail)
    assert kv.num_tokens == 100
    assert torch.equal(forward(exact.model, kv, TOKENS[100:150])[0], exact.logits_TV[149])


def test_a_working_copy_takes_the_bytes_that_were_announced(exact: Exact) -> None:
    assert exact.new_kv().nbytes == exact.model.kv_capacity_bytes(NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path: Path, family: Family) -> None:
    transformers: Any = pytest.importorskip("transformers")
    directory = write_tiny_model(tmp_path, family, seed=1)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    ours = Exact(directory, "float32").logits_TV
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-5)
    halves = Exact(directory, "float16").logits_TV
    torch.testing.assert_close(halves, expected, rtol=0, atol=0.05)
