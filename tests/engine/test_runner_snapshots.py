"""Windows and states kept along a prompt: later prompts and peers go on from them, with equal bits."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prfaas.cache.spec import (
    FullSpec,
    StateSpec,
    WindowSpec,
    bytes_of_page,
    needed_blocks,
    snapshot_blocks,
)
from prfaas.engine.model import Model, Segment
from prfaas.errors import BadRequest, ConfigError
from prfaas.types import SamplingParams
from tests.engine.running import (
    Node,
    Recorder,
    block_of,
    plain_answer,
    prompt_of,
    tiny,
    tiny_hybrid,
)

GREEDY = SamplingParams(max_tokens=4, seed=0, temperature=0.0)
Place = tuple[int, int, int]
"""(group, index, block)."""


@pytest.fixture(params=["gemma3", "bamba", "falcon_h1"])
def model(request) -> Model:
    """One of windows, one of states, and one whose layers have both attention and a state."""
    return some_model(request.param)


def some_model(family: str) -> Model:
    if family == "gemma3":
        return tiny("gemma3", "float32")
    return tiny_hybrid(family, mamba_d_state=64) if family == "bamba" else tiny_hybrid(family)


def cold_pages(model: Model, tokens: tuple[int, ...]) -> dict[Place, bytes]:
    """What windows and states are after `tokens`, from one forward over them alone."""
    block_tokens = block_of(model)
    layout = model.layout(block_tokens)
    kv = model.new_kv(capacity_tokens=len(tokens), block_tokens=block_tokens)
    model.forward([Segment(kv=kv, tokens=tokens, num_logits=0)])
    pages = {}
    for group, spec in enumerate(layout.groups):
        for block in snapshot_blocks(spec, len(tokens), block_tokens):
            for index in range(spec.pages_per_block):
                out = bytearray(bytes_of_page(spec, index, block_tokens, block_tokens))
                if isinstance(spec, StateSpec):
                    layer, part = divmod(index, spec.slices_per_layer)
                    state = kv.state_of(spec.layers[layer])
                    state.write_to(len(tokens), memoryview(out), part * spec.page_bytes)
                else:
                    kv.export_block(spec.layers[index], block, block_tokens, memoryview(out))
                pages[group, index, block] = bytes(out)
    return pages


def evict_passed(node: Node, num_tokens: int, every_tokens: int) -> None:
    """Take as many pages as are free or hold windows that a sequence passed by on its way."""
    layout = node.cache.layout
    num_cold = 0
    for spec in layout.groups:
        if isinstance(spec, WindowSpec):
            kept = set(needed_blocks(spec, num_tokens, layout.block_tokens))
            for at in range(every_tokens, num_tokens + 1, every_tokens) if every_tokens else ():
                kept |= set(snapshot_blocks(spec, at, layout.block_tokens))
            num_cold += len(set(range(num_tokens // layout.block_tokens)) - kept)
    num_evictions = node.cache.counts().num_evictions
    window_pages = [s.pages_per_block for s in layout.groups if isinstance(s, WindowSpec)]
    with node.cache.pool.lock:
        num_pages = node.cache.pool.num_free + num_cold * sum(window_pages)
        entries = node.cache.pool.try_take([1] * num_pages, is_transfer=False)
        assert entries is not None
        for entry in entries:
            node.cache.pool.let_go(entry)
    assert node.cache.counts().num_evictions == num_evictions + num_cold


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [64, 576])
def test_a_prompt_that_parts_anywhere_goes_on_from_the_snapshot_before(model, chunk_tokens):
    """Even after everything that was only passed by has been evicted."""
    prompt = prompt_of(450)
    for shared_tokens in (127, 128, 129, 300, 449):
        node = Node(model, snapshot_tokens=128, chunk_tokens=chunk_tokens)
        node.answer(prompt, GREEDY)
        evict_passed(node, len(prompt) + GREEDY.max_tokens - 1, 128)
        other = (*prompt[:shared_tokens], *(t ^ 1 for t in prompt[shared_tokens:449]))
        result = node.answer(other, GREEDY)
        least = shared_tokens // 128 * 128
        assert result.num_computed <= len(other) - least
        assert result.tokens() == plain_answer(model, other, GREEDY)


def test_without_snapshots_a_prompt_that_parts_finds_nothing(model):
    node, prompt = Node(model), prompt_of(450)
    node.answer(prompt, GREEDY)
    evict_passed(node, len(prompt) + GREEDY.max_tokens - 1, 0)
    result = node.answer((*prompt[:300], *prompt_of(100, seed=1)), GREEDY)
    assert result.num_computed == 400


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    family=st.sampled_from(["gemma3", "bamba"]),
    num_tokens=st.integers(65, 400),
    num_blocks=st.integers(1, 5),
    chunk_tokens=st.sampled_from([64, 128, 576]),
    hit_tokens=st.integers(0, 300),
)
@example("gemma3", 65, 1, 64, 64)
@example("bamba", 300, 1, 64, 300)
def test_a_sink_hears_of_every_snapshot_with_the_bytes_of_a_cold_prefill(
    family, num_tokens, num_blocks, chunk_tokens, hit_tokens
):
    model = some_model(family)
    every = num_blocks * 64
    prompt = prompt_of(num_tokens, seed=num_tokens)
    node = Node(model, chunk_tokens=chunk_tokens)
    if hit_tokens:
        node.answer(prompt[:hit_tokens], GREEDY)
    table = node.lookup(prompt)
    hit = table.hit_tokens
    assert table.try_reserve(num_tokens)
    sink = Recorder(node.cache, table)
    node.answer(prompt, GREEDY, table=table, sink=sink, prefill_only=True, snapshot_tokens=every)
    layout, block_tokens = node.cache.layout, node.cache.layout.block_tokens
    expected: set[Place] = set()
    for at in range(max(every, -(-hit // every) * every), num_tokens + 1, every):
        cold = cold_pages(model, prompt[:at])
        for group, index, block in tuple(cold):
            needed = needed_blocks(layout.groups[group], num_tokens, block_tokens)
            if block < hit // block_tokens and block in needed:
                del cold[
                    group, index, block
                ]  # of the hit the sink knows what the prompt's end needs
        assert {place: sink.pages[place][1] for place in cold} == cold
        expected |= cold.keys()
    for group, spec in enumerate(layout.groups):
        for block in needed_blocks(spec, num_tokens, block_tokens):
            if block >= hit // block_tokens:
                expected |= {(group, index, block) for index in range(spec.pages_per_block)}
    assert sink.pages.keys() == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "bamba", "falcon_h1"])
def test_what_a_broken_transfer_brought_up_to_a_snapshot_is_a_hit(family):
    model = some_model(family)
    prompt = prompt_of(400)
    sender = Node(model)
    table = sender.lookup(prompt)
    assert table.try_reserve(len(prompt))
    sink = Recorder(sender.cache, table)
    sender.answer(prompt, GREEDY, table=table, sink=sink, prefill_only=True, snapshot_tokens=128)
    for at in (128, 256, 384):
        receiver = Node(model)
        landed = receiver.lookup(prompt)
        layout = receiver.cache.layout
        for group, spec in enumerate(layout.groups):
            whole = range(at // layout.block_tokens)
            is_full = isinstance(spec, FullSpec)
            for block in whole if is_full else snapshot_blocks(spec, at, layout.block_tokens):
                pages = landed.try_allocate(group, block)
                assert pages is not None
                for index, page in enumerate(pages):
                    data = sink.pages[group, index, block][1]
                    landed.view(page)[: len(data)] = data
                landed.commit(group, block)
        landed.release()
        result = receiver.answer(prompt, GREEDY)
        assert result.num_computed == len(prompt) - at
        assert result.tokens() == plain_answer(model, prompt, GREEDY)


def test_a_senders_snapshots_stay_until_they_are_dropped_or_the_table_is_released(model):
    prompt = prompt_of(400)
    node = Node(model)
    table = node.lookup(prompt)
    assert table.try_reserve(len(prompt))
    table.retain()
    sink = Recorder(node.cache, table)
    node.submit("r", prompt, GREEDY, table=table, sink=sink, prefill_only=True, snapshot_tokens=64)
    while node.runner.has_work:
        node.step()
    layout = node.cache.layout

    def held(at: int) -> set[bool]:
        return {
            table.pages(group, block) is not None
            for group, spec in enumerate(layout.groups)
            for block in snapshot_blocks(spec, at, layout.block_tokens)
        }

    assert [held(at) for at in range(64, 321, 64)] == [{True}] * 5
    table.drop_snapshots(200)
    table.slide(400)
    assert [held(at) for at in range(64, 321, 64)] == [{False}] * 3 + [{True}] * 2
    node.cache.check()
    table.release()
    node.assert_idle()


def test_a_window_block_of_two_snapshots_stays_for_the_later_one():
    """A window of 16 and blocks of 16: one block each; so snapshots of every block share none, but
    with blocks of 8 the later snapshot needs the block before its own."""
    node = Node(tiny("gemma3", "float32"), block_tokens=8, chunk_tokens=64)
    prompt = prompt_of(60)
    table = node.lookup(prompt)
    assert table.try_reserve(len(prompt))
    table.retain()
    sink = Recorder(node.cache, table)
    node.submit("r", prompt, GREEDY, table=table, sink=sink, prefill_only=True, snapshot_tokens=8)
    while node.runner.has_work:
        node.step()
    table.drop_snapshots(16)
    table.slide(60)
    window = 1
    assert [table.pages(window, block) is not None for block in range(3)] == [False, True, True]
    table.release()
    node.assert_idle()


def test_a_pool_without_room_leaves_snapshots_out_and_sends_the_rest(model):
    prompt = prompt_of(400)
    layout = model.layout(block_of(model))
    num_pages = layout.pages_needed(len(prompt))
    node = Node(model, ram_bytes=num_pages * layout.page_bytes)
    table = node.lookup(prompt)
    assert table.try_reserve(len(prompt))
    sink = Recorder(node.cache, table)
    node.answer(prompt, GREEDY, table=table, sink=sink, prefill_only=True, snapshot_tokens=64)
    needed = {
        (group, index, block)
        for group, spec in enumerate(layout.groups)
        for block, index in itertools.product(
            needed_blocks(spec, len(prompt), layout.block_tokens), range(spec.pages_per_block)
        )
    }
    assert sink.pages.keys() == needed


def test_snapshots_off_the_block_grid_are_refused(model):
    block_tokens = block_of(model)
    with pytest.raises(ConfigError, match=rf"snapshot_tokens = 100 .*: {block_tokens} tokens"):
        Node(model, snapshot_tokens=100)
    with pytest.raises(BadRequest, match="snapshot_tokens = 100"):
        Node(model).submit("r", prompt_of(10), GREEDY, snapshot_tokens=100)
