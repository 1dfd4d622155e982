"""Pages give back the working copy they were written from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.block_table import BlockTable
from prfaas.cache.spec import CacheLayout, StateSpec, replay_boundary
from prfaas.engine.model import Model, Segment
from prfaas.engine.page_loading import load_pages
from prfaas.engine.pages import (
    BlockWrite,
    Publishing,
    drop_private_pages,
    plan_snapshots,
    plan_writes,
    save_pages,
)
from prfaas.engine.sequence_kv import SequenceKv
from tests.engine.running import BLOCK, Node, block_of, prompt_of, tiny, tiny_hybrid

LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 90, 200]


@pytest.fixture(params=["gemma3", "llama"])
def model(request) -> Model:
    return tiny(request.param, "float32")


@pytest.fixture
def hybrid() -> Model:
    """Its states take three pages a layer."""
    return tiny_hybrid("bamba", mamba_d_state=64)


def new_kv(model: Model) -> SequenceKv:
    return model.new_kv(capacity_tokens=512, block_tokens=block_of(model))


def filled(model: Model, num_tokens: int) -> SequenceKv:
    kv = new_kv(model)
    model.forward([Segment(kv=kv, tokens=prompt_of(num_tokens), num_logits=0)])
    return kv


def next_logits(model: Model, kv: SequenceKv) -> bytes:
    segment = Segment(kv=kv, tokens=[9, 8, 7], num_logits=1)
    return model.forward([segment]).numpy().tobytes()


def save(kv: SequenceKv, table: BlockTable, layout: CacheLayout) -> bool:
    return save_pages(kv, table, layout)


def writes_of(
    kv: SequenceKv, table: BlockTable, layout: CacheLayout, *, end: int, prompt_tokens: int
) -> list[BlockWrite]:
    """What a forward without a sink writes that takes `kv` to `end`."""
    publishing = Publishing(prompt_tokens=prompt_tokens)
    snapshots = plan_snapshots(table, layout, publishing, start=kv.num_tokens, end=end)
    return list(plan_writes(kv, table, layout, publishing, end=end, snapshots=snapshots))


@pytest.mark.parametrize("length", LENGTHS)
def test_saved_pages_restore_the_sequence_bit_by_bit(model, hybrid, length):
    for each in (model, hybrid):
        node, kv = Node(each), filled(each, length)
        table = node.lookup(prompt_of(length))
        assert save(kv, table, node.cache.layout)
        restored = new_kv(each)
        load_pages(restored, table, node.cache.layout, stored_tokens=length, num_tokens=length)
        assert next_logits(each, restored) == next_logits(each, kv)
        table.release()
        node.assert_idle()


@pytest.mark.parametrize("length", [2, BLOCK, BLOCK + 1, 90])
def test_a_sequence_can_be_restored_one_token_short(model, length):
    node, kv = Node(model), filled(model, length)
    table = node.lookup(prompt_of(length))
    assert save(kv, table, node.cache.layout)
    restored = new_kv(model)
    load_pages(restored, table, node.cache.layout, stored_tokens=length, num_tokens=length - 1)
    kv.set_num_tokens(length - 1)
    assert next_logits(model, restored) == next_logits(model, kv)
    table.release()


def test_whole_blocks_that_are_saved_become_hits(model):
    node = Node(model)
    table = node.lookup(prompt_of(100))
    assert save(filled(model, 100), table, node.cache.layout)
    table.release()
    again = node.lookup(prompt_of(100))
    assert again.hit_tokens == 96
    again.release()


def test_a_cut_block_is_saved_for_this_table_alone(hybrid):
    """It goes once it is in a working copy."""
    node = Node(hybrid)
    table = node.lookup(prompt_of(200))
    assert save(filled(hybrid, 190), table, node.cache.layout)
    for group, spec in enumerate(node.cache.layout.groups):
        assert table.pages(group, 2) is not None
        assert not table.is_committed(group, 2)
        assert table.is_committed(group, 0) != isinstance(spec, StateSpec)
    drop_private_pages(table, node.cache.layout)
    assert [table.pages(group, 2) for group in range(len(node.cache.layout.groups))] == [None] * 2
    assert table.pages(0, 0) is not None
    table.release()
    node.assert_idle()


def test_a_pool_without_room_says_so_and_keeps_the_working_copy(model):
    layout = model.layout(BLOCK)
    node = Node(model, ram_bytes=layout.pages_per_block * layout.page_bytes)
    kv = filled(model, 100)
    table = node.lookup(prompt_of(100))
    assert not save(kv, table, layout)
    assert next_logits(model, kv) == next_logits(model, filled(model, 100))
    table.release()
    node.assert_idle()


def test_a_forward_writes_the_blocks_that_it_makes_whole(model):
    node, kv = Node(model), filled(model, 40)
    table = node.lookup(prompt_of(200))
    layout = node.cache.layout
    writes = writes_of(kv, table, layout, end=90, prompt_tokens=90)
    blocks = {write.copy.block for write in writes}
    assert blocks == {2, 3, 4}  # tokens 32..79; 40 has begun block 2
    assert all(write.is_whole for write in writes)
    assert len(writes) == 3 * len(layout.groups)
    assert not writes_of(kv, table, layout, end=47, prompt_tokens=90)
    table.release()


def test_a_published_block_is_not_written_again(model):
    node = Node(model)
    table = node.lookup(prompt_of(100))
    layout = node.cache.layout
    assert save(filled(model, 64), table, layout)
    writes = writes_of(new_kv(model), table, layout, end=80, prompt_tokens=100)
    held = {(write.copy.group, write.copy.block) for write in writes}
    assert not any(table.is_committed(*place) for place in held)
    assert {block for _, block in held} >= {4}
    table.release()


@given(length=st.integers(1, 400), cut_blocks=st.sets(st.integers(1, 6)))
def test_however_a_prompt_is_cut_its_boundary_state_is_kept_once(length, cut_blocks):
    model = tiny_hybrid("bamba", mamba_d_state=64)
    layout = model.layout(64)
    node, kv = Node(model), new_kv(model)
    table = node.lookup(prompt_of(length))
    ends = [*sorted(64 * block for block in cut_blocks if 64 * block < length), length]
    positions = []
    for end in ends:
        for write in writes_of(kv, table, layout, end=end, prompt_tokens=length):
            if isinstance(layout.groups[write.copy.group], StateSpec):
                positions.append(64 * write.copy.block + write.copy.num_tokens)
                assert write.is_whole
        kv.num_tokens = end  # as if computed
    boundary = replay_boundary(length, 64)
    assert positions == ([boundary] if boundary else [])
    table.release()
    node.cache.close()
