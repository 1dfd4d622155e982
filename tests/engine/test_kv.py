"""Working copies of KV: what goes out comes back, and windows keep what is still seen."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cache.spec import needed_blocks
from prfaas.engine.config import model_from_hf
from prfaas.engine.kv import Array, AttentionSpec, LayerKv
from prfaas.engine.kv_groups import kv_groups
from prfaas.engine.mixer_spec import GqaSpec, MlaSpec
from prfaas.engine.native.attention_unit import KEY_BLOCK
from prfaas.engine.rope_spec import RopeSpec
from prfaas.engine.sequence_kv import SequenceKv, capacity_bytes
from tests.tiny_models import tiny_config

BLOCK_TOKENS = 16
HEADS, HEAD_DIM = 2, 8


def spec(window_tokens: int | None) -> GqaSpec:
    return GqaSpec(
        num_heads=4,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        scale=1.0,
        rope=RopeSpec(theta=1e4),
        window_tokens=window_tokens,
    )


FULL, WINDOW = 0, 1
LAYERS = (spec(None), spec(20))


def new_kv(capacity_tokens: int = 6000) -> SequenceKv:
    return SequenceKv(LAYERS, capacity_tokens=capacity_tokens, block_tokens=BLOCK_TOKENS)


def values(start: int, stop: int) -> Array:
    """K or V that says its own position, head and dimension."""
    position = np.arange(start, stop, dtype=np.float32)[:, None, None] * 1000
    return position + np.arange(HEADS * HEAD_DIM, dtype=np.float32).reshape(HEADS, HEAD_DIM)


def attention_layers(kv: SequenceKv) -> list[LayerKv]:
    return [kv.kv_of(layer) for layer in range(len(kv.layers))]


def put(layer: LayerKv, start: int, *rows: Array) -> None:
    layer.write(start, *map(torch.from_numpy, rows))


def write(kv: SequenceKv, stop: int) -> None:
    for layer in attention_layers(kv):
        put(layer, kv.num_tokens, values(kv.num_tokens, stop), -values(kv.num_tokens, stop))
    kv.num_tokens = stop


def filled(*stops: int) -> SequenceKv:
    kv = new_kv()
    for stop in stops:
        write(kv, stop)
    return kv


def export(kv: SequenceKv, layer: int, block: int, num_tokens: int) -> bytes:
    out = bytearray(num_tokens * LAYERS[layer].values_per_token * 4)
    kv.export_block(layer, block, num_tokens, memoryview(out))
    return bytes(out)


def expected_page(block: int, num_tokens: int) -> bytes:
    k = values(block * BLOCK_TOKENS, block * BLOCK_TOKENS + num_tokens).swapaxes(0, 1)
    return np.stack([k, -k]).tobytes()


def needed(layer: int, num_tokens: int) -> list[tuple[int, int]]:
    """(block, tokens in it) that the cache asks for at `num_tokens`."""
    config = model_from_hf(tiny_config("gemma3") | {"sliding_window": LAYERS[WINDOW].window_tokens})
    group = kv_groups(config.layers, BLOCK_TOKENS).groups[layer]
    return [
        (block, min(BLOCK_TOKENS, num_tokens - block * BLOCK_TOKENS))
        for block in needed_blocks(group, num_tokens, BLOCK_TOKENS)
    ]


stops_strategy = st.lists(st.integers(1, 5000), min_size=1, max_size=8, unique=True).map(sorted)


@given(stops=stops_strategy)
@settings(max_examples=60, deadline=None)
def test_every_block_the_cache_needs_can_be_exported(stops: list[int]) -> None:
    kv = filled(*stops)
    for layer in (FULL, WINDOW):
        for block, num_tokens in needed(layer, stops[-1]):
            assert export(kv, layer, block, num_tokens) == expected_page(block, num_tokens)


@given(stops=stops_strategy)
@settings(max_examples=60, deadline=None)
def test_a_block_can_be_exported_as_soon_as_it_is_written(stops: list[int]) -> None:
    kv = new_kv()
    for start, stop in pairwise([0, *stops]):
        write(kv, stop)
        for block in range(start // BLOCK_TOKENS, stop // BLOCK_TOKENS):
            assert export(kv, WINDOW, block, BLOCK_TOKENS) == expected_page(block, BLOCK_TOKENS)


@given(stops=stops_strategy, more=st.integers(1, 300), data=st.data())
@settings(max_examples=60, deadline=None)
def test_import_undoes_export_in_any_order(
    stops: list[int], more: int, data: st.DataObject
) -> None:
    num_tokens = stops[-1]
    source, target = filled(*stops), new_kv()
    for layer in (FULL, WINDOW):
        for block, count in data.draw(st.permutations(needed(layer, num_tokens))):
            page = export(source, layer, block, count)
            target.import_block(layer, block, count, memoryview(page))
    target.set_num_tokens(num_tokens)
    for layer in (FULL, WINDOW):
        for block, count in needed(layer, num_tokens):
            assert export(target, layer, block, count) == expected_page(block, count)
    write(target, num_tokens + more)
    for layer in (FULL, WINDOW):
        for block, count in needed(layer, num_tokens + more):
            assert export(target, layer, block, count) == expected_page(block, count)


@given(stops=stops_strategy)
@settings(max_examples=60, deadline=None)
def test_no_visible_value_is_uninitialised(stops: list[int]) -> None:
    kv = new_kv(stops[-1])
    for layer in attention_layers(kv):
        for buffer in layer.buffers:
            buffer.fill_(float("nan"))
    for stop in stops:
        write(kv, stop)
    for layer in attention_layers(kv):
        block_end = -(-kv.num_tokens // KEY_BLOCK) * KEY_BLOCK - layer.base_tokens
        assert layer.base_tokens % KEY_BLOCK == 0
        assert all(buffer[:, :block_end].isfinite().all() for buffer in layer.buffers)


def test_no_visible_value_is_uninitialised_after_an_import() -> None:
    source, target = filled(1000), new_kv()
    for buffer in target.kv_of(WINDOW).buffers:
        buffer.fill_(float("nan"))
    for block, count in needed(WINDOW, 1000):
        page = export(source, WINDOW, block, count)
        target.import_block(WINDOW, block, count, memoryview(page))
    layer = target.kv_of(WINDOW)
    for buffer in layer.buffers:
        assert buffer[:, : 1024 - layer.base_tokens].isfinite().all()


def test_window_layers_stay_small() -> None:
    kv = filled(*range(100, 5001, 100))
    assert kv.kv_of(WINDOW).capacity_tokens < 1500
    assert kv.kv_of(FULL).capacity_tokens >= 5000
    assert kv.nbytes == capacity_bytes(LAYERS, 6000)


def test_a_fork_goes_its_own_way() -> None:
    kv = filled(40)
    other = kv.fork()
    write(other, 60)
    assert kv.num_tokens == 40
    for layer in attention_layers(kv):
        put(layer, 40, values(0, 1), values(0, 1))
    for layer_index in (FULL, WINDOW):
        assert export(other, layer_index, 2, BLOCK_TOKENS) == expected_page(2, BLOCK_TOKENS)
        assert export(other, layer_index, 1, BLOCK_TOKENS) == expected_page(1, BLOCK_TOKENS)


def test_room_that_is_reserved_later_changes_nothing() -> None:
    kv, roomy = new_kv(capacity_tokens=64), filled(60, 900)
    write(kv, 60)
    with pytest.raises(ValueError, match="in a sequence of 128"):
        put(kv.kv_of(FULL), 60, values(60, 900), values(60, 900))
    kv.reserve(1000)
    kv.reserve(10)
    assert kv.capacity_tokens == 1000
    assert kv.nbytes == capacity_bytes(LAYERS, 1000)
    write(kv, 900)
    for layer, block in ((FULL, 0), (FULL, 55), (WINDOW, 55)):
        assert export(kv, layer, block, BLOCK_TOKENS) == export(roomy, layer, block, BLOCK_TOKENS)


def test_a_sequence_can_go_back() -> None:
    kv = filled(50)
    kv.set_num_tokens(33)
    with pytest.raises(ValueError, match=r"tokens 48\.\.50"):
        export(kv, FULL, 3, 2)
    write(kv, 50)
    assert export(kv, FULL, 2, BLOCK_TOKENS) == expected_page(2, BLOCK_TOKENS)


def test_what_is_not_there_is_an_error() -> None:
    kv = filled(300, 3000)
    with pytest.raises(ValueError, match=r"tokens 0\.\.16"):
        export(kv, WINDOW, 0, BLOCK_TOKENS)
    page = memoryview(expected_page(0, BLOCK_TOKENS))
    with pytest.raises(ValueError, match="before the first kept"):
        kv.import_block(WINDOW, 0, BLOCK_TOKENS, page)
    with pytest.raises(ValueError, match="going on at 4000"):
        kv.set_num_tokens(4000)
    with pytest.raises(ValueError, match="going on at 50"):
        kv.set_num_tokens(50)
    with pytest.raises(ValueError, match="a page of 3 bytes"):
        kv.export_block(FULL, 0, 1, memoryview(bytearray(3)))
    with pytest.raises(ValueError, match="in a sequence of"):
        write(kv, 7000)


MIMO = GqaSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    value_head_dim=4,
    scale=1.0,
    rope=None,
    window_tokens=20,
)
LATENT = MlaSpec(
    num_heads=4, latent_dim=6, rope_dim=2, nope_dim=4, value_dim=3, scale=1.0, rope=None
)


def random_rows(spec: AttentionSpec, num_tokens: int) -> list[Array]:
    generator = np.random.default_rng(0)
    shapes = [(1, 8)] if isinstance(spec, MlaSpec) else [(2, 6), (2, 4)]
    return [
        generator.random((num_tokens, heads, width), dtype=np.float32) for heads, width in shapes
    ]


@given(cuts=st.sets(st.integers(1, 399), max_size=5), data=st.data())
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("spec", [MIMO, LATENT])
def test_pages_of_any_widths_hold_keys_then_values(
    spec: AttentionSpec, cuts: set[int], data: st.DataObject
) -> None:
    num_tokens, rows = 400, random_rows(spec, 400)
    source, target = (LayerKv(spec, num_tokens, BLOCK_TOKENS) for _ in range(2))
    for start, stop in pairwise([0, *sorted(cuts), num_tokens]):
        put(source, start, *(part[start:stop] for part in rows))
    first = (num_tokens - spec.kept_tokens(num_tokens)) // BLOCK_TOKENS
    blocks = range(first, num_tokens // BLOCK_TOKENS)
    for block in data.draw(st.permutations(list(blocks))):
        start, stop = block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS
        page = bytearray(BLOCK_TOKENS * spec.values_per_token * 4)
        source.write_to(start, BLOCK_TOKENS, memoryview(page))
        assert page == b"".join(part[start:stop].swapaxes(0, 1).tobytes() for part in rows)
        target.read_from(start, BLOCK_TOKENS, memoryview(page))
    target.truncate(num_tokens)
    seen = slice(first * BLOCK_TOKENS, num_tokens)
    for layer in (source, target, target.fork()):
        held = slice(seen.start - layer.base_tokens, seen.stop - layer.base_tokens)
        keys, values = layer.span.keys[:, held], layer.span.values[:, held]
        assert np.array_equal(keys.numpy(), rows[0][seen].swapaxes(0, 1))
        expected = rows[-1][seen, :, : values.shape[-1]]
        assert np.array_equal(values.numpy(), expected.swapaxes(0, 1))
        assert layer.span.first_key == layer.base_tokens


@given(num_blocks=st.integers(1, 30), data=st.data())
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("spec", [MIMO, LATENT, LAYERS[FULL]])
def test_gathered_pages_give_what_they_give_one_by_one(
    spec: AttentionSpec, num_blocks: int, data: st.DataObject
) -> None:
    """Wherever they lie, in pages that are longer than theirs."""
    size, page_size = BLOCK_TOKENS * spec.values_per_token, 2000
    numbers = data.draw(st.permutations(range(num_blocks + 3)))[:num_blocks]
    pages = np.random.default_rng(1).random((num_blocks + 3, page_size), dtype=np.float32)
    num_tokens = num_blocks * BLOCK_TOKENS
    first = (num_tokens - spec.kept_tokens(num_tokens)) // BLOCK_TOKENS
    gathered, read = (LayerKv(spec, num_tokens + 9, BLOCK_TOKENS) for _ in range(2))
    for layer in (gathered, read):
        for buffer in layer.buffers:
            buffer.fill_(float("nan"))
    gathered.gather(
        first * BLOCK_TOKENS, BLOCK_TOKENS, torch.from_numpy(pages), torch.tensor(numbers[first:])
    )
    for block, number in enumerate(numbers[first:], first):
        read.read_from(block * BLOCK_TOKENS, BLOCK_TOKENS, pages[number, :size].data)
    assert gathered.base_tokens == read.base_tokens
    for layer in (gathered, read):
        layer.truncate(num_tokens)
    seen = -(-num_tokens // KEY_BLOCK) * KEY_BLOCK - gathered.base_tokens
    for left, right in zip(gathered.buffers, read.buffers, strict=True):
        assert left[:, :seen].isfinite().all()
        assert torch.equal(left[:, :seen], right[:, :seen])


def test_what_cannot_be_gathered_is_an_error() -> None:
    pages_PN, numbers_B = torch.zeros(4, 512), torch.arange(4)
    with pytest.raises(ValueError, match="before the first kept"):
        filled(300, 3000).kv_of(WINDOW).gather(0, BLOCK_TOKENS, pages_PN, numbers_B)
    with pytest.raises(ValueError, match="in a sequence of 128"):
        new_kv(60).kv_of(FULL).gather(96, BLOCK_TOKENS, pages_PN, numbers_B)


def test_a_latent_is_held_once() -> None:
    layer = LayerKv(LATENT, 1000, BLOCK_TOKENS)
    assert layer.nbytes == layer.capacity_tokens * LATENT.values_per_token * 4
    assert layer.span.keys.shape == (1, layer.capacity_tokens, 8)
    assert layer.span.values.shape == (1, layer.capacity_tokens, 6)
    assert layer.span.values.data_ptr() == layer.span.keys.data_ptr()
