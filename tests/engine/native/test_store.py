"""Rows of a batch, put where their sequences keep them, as single writes would."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.batch import Batch, KeptRows
from prfaas.engine.kv import AttentionSpec, LayerKv, buffer_shapes
from prfaas.engine.mixer_spec import GqaSpec, MlaSpec
from prfaas.engine.native.store import SERIAL_VALUES
from prfaas.engine.segment import Segment
from prfaas.engine.sequence_kv import SequenceKv

CAPACITY_TOKENS = 700
GQA = GqaSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    value_head_dim=7,
    scale=1.0,
    rope=None,
    window_tokens=20,
)
MLA = MlaSpec(num_heads=4, latent_dim=6, rope_dim=4, nope_dim=4, value_dim=3, scale=1.0, rope=None)


def new_kv(spec: AttentionSpec) -> SequenceKv:
    return SequenceKv((spec,), capacity_tokens=CAPACITY_TOKENS, block_tokens=16)


def strided_rows(spec: AttentionSpec, num_tokens: int) -> list[torch.Tensor]:
    """Return rows as a mixer has them: columns of wider ones."""
    sizes = [num_heads * width for num_heads, width in buffer_shapes(spec)]
    wide = torch.randn(num_tokens, 3 + sum(sizes))
    columns = torch.split(wide[:, 3:], sizes, dim=1)
    return [
        part.view(num_tokens, *shape)
        for part, shape in zip(columns, buffer_shapes(spec), strict=True)
    ]


def held(layer: LayerKv, num_tokens: int) -> list[torch.Tensor]:
    first = max(layer.base_tokens, num_tokens - layer.spec.kept_tokens(num_tokens))
    tokens = slice(first - layer.base_tokens, num_tokens - layer.base_tokens)
    return [buffer[:, tokens].clone() for buffer in layer.buffers]


@pytest.mark.parametrize("spec", [GQA, MLA])
@given(data=st.data(), seed=st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_a_batch_writes_what_single_writes_do(
    spec: AttentionSpec, data: st.DataObject, seed: int
) -> None:
    torch.manual_seed(seed)
    counts = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    together, apart = ([new_kv(spec) for _ in counts] for _ in range(2))
    for _ in range(3):
        rows = strided_rows(spec, sum(counts))
        segments = [
            Segment(kv=kv, tokens=[0] * count, num_logits=0)
            for kv, count in zip(together, counts, strict=True)
        ]
        Batch(segments).write_kv(0, KeptRows(*rows))
        cuts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        for (start, stop), kv, other in zip(pairwise(cuts), together, apart, strict=True):
            other.kv_of(0).write(other.num_tokens, *(part[start:stop] for part in rows))
            for each in (kv, other):
                each.num_tokens += stop - start
            expected = held(other.kv_of(0), kv.num_tokens)
            for found, wanted in zip(held(kv.kv_of(0), kv.num_tokens), expected, strict=True):
                assert torch.equal(found, wanted)
        counts = data.draw(st.lists(st.integers(1, 20), min_size=len(counts), max_size=len(counts)))


def test_threads_share_a_long_prompt_without_a_gap() -> None:
    num_tokens = CAPACITY_TOKENS - 3
    wide = GqaSpec(
        num_heads=8, num_kv_heads=8, head_dim=16, scale=1.0, rope=None, window_tokens=None
    )
    assert num_tokens * wide.num_kv_heads * wide.head_dim * 2 > SERIAL_VALUES
    kv, rows = new_kv(wide), strided_rows(wide, num_tokens)
    Batch([Segment(kv=kv, tokens=[0] * num_tokens, num_logits=0)]).write_kv(0, KeptRows(*rows))
    for buffer_HCK, part_THK in zip(kv.kv_of(0).buffers, rows, strict=True):
        assert torch.equal(buffer_HCK[:, :num_tokens].transpose(0, 1), part_THK)
