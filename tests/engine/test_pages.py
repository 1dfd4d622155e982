"""Pages give back the working copy they were written from."""

import pytest

from prfaas.engine.model import Model, Segment
from prfaas.engine.pages import load_pages, plan_writes, save_pages
from prfaas.engine.sequence_kv import SequenceKv
from tests.engine.running import BLOCK, Node, prompt_of, tiny

LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 90, 200]


@pytest.fixture(params=["gemma3", "llama"])
def model(request) -> Model:
    return tiny(request.param, "float32")


def filled(model: Model, num_tokens: int) -> SequenceKv:
    kv = model.new_kv(capacity_tokens=512, block_tokens=BLOCK)
    model.forward([Segment(kv=kv, tokens=prompt_of(num_tokens), num_logits=0)])
    return kv


def next_logits(model: Model, kv: SequenceKv) -> bytes:
    logits_1V = model.forward([Segment(kv=kv, tokens=[9, 8, 7], num_logits=1)])
    return logits_1V.numpy().tobytes()


@pytest.mark.parametrize("length", LENGTHS)
def test_saved_pages_restore_the_sequence_bit_by_bit(model, length):
    node, kv = Node(model), filled(model, length)
    table = node.lookup(prompt_of(length))
    assert save_pages(kv, table, node.cache.layout)
    restored = model.new_kv(capacity_tokens=512, block_tokens=BLOCK)
    load_pages(restored, table, node.cache.layout, stored_tokens=length, num_tokens=length)
    assert next_logits(model, restored) == next_logits(model, kv)
    table.release()
    node.assert_idle()


@pytest.mark.parametrize("length", [2, BLOCK, BLOCK + 1, 90])
def test_a_sequence_can_be_restored_one_token_short(model, length):
    node, kv = Node(model), filled(model, length)
    table = node.lookup(prompt_of(length))
    assert save_pages(kv, table, node.cache.layout)
    restored = model.new_kv(capacity_tokens=512, block_tokens=BLOCK)
    load_pages(restored, table, node.cache.layout, stored_tokens=length, num_tokens=length - 1)
    kv.set_num_tokens(length - 1)
    assert next_logits(model, restored) == next_logits(model, kv)
    table.release()


def test_whole_blocks_that_are_saved_become_hits(model):
    node = Node(model)
    table = node.lookup(prompt_of(100))
    assert save_pages(filled(model, 100), table, node.cache.layout)
    table.release()
    again = node.lookup(prompt_of(100))
    assert again.hit_tokens == 96
    again.release()


def test_a_pool_without_room_says_so_and_keeps_the_working_copy(model):
    layout = model.layout(BLOCK)
    node = Node(model, ram_bytes=layout.pages_per_block * layout.page_bytes)
    kv = filled(model, 100)
    table = node.lookup(prompt_of(100))
    assert not save_pages(kv, table, layout)
    assert next_logits(model, kv) == next_logits(model, filled(model, 100))
    table.release()
    node.assert_idle()


def test_a_forward_writes_the_blocks_that_it_makes_whole(model):
    node, kv = Node(model), filled(model, 40)
    table = node.lookup(prompt_of(200))
    layout = node.cache.layout
    writes = list(plan_writes(kv, table, layout, end=90, prompt_tokens=90, sink=None))
    assert {write.block for write in writes} == {2, 3, 4}  # tokens 32..79; 40 has begun block 2
    assert all(write.is_whole for write in writes)
    assert len(writes) == 3 * len(layout.groups)
    assert not list(plan_writes(kv, table, layout, end=47, prompt_tokens=90, sink=None))
    table.release()


def test_a_published_block_is_not_written_again(model):
    node = Node(model)
    table = node.lookup(prompt_of(100))
    layout = node.cache.layout
    assert save_pages(filled(model, 64), table, layout)
    start = model.new_kv(capacity_tokens=512, block_tokens=BLOCK)
    writes = list(plan_writes(start, table, layout, end=80, prompt_tokens=100, sink=None))
    held = {(write.group, write.block) for write in writes}
    assert not any(table.is_committed(*place) for place in held)
    assert {block for _, block in held} >= {4}
    table.release()
