"""Keys against a chain written out by hand, and every input told apart."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.hashing import block_keys, root_key
from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec, WindowSpec

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
ROOT = bytes(range(32))


def layout(**changes: object) -> CacheLayout:
    values: dict[str, object] = {
        "block_tokens": 4,
        "layers": (0, 2),
        "page_bytes": 64,
        "window_tokens": 8,
        "layout_version": "1",
    } | changes
    window = WindowSpec(
        name="window",
        layers=values["layers"],  # type: ignore[arg-type]
        page_bytes=values["page_bytes"],  # type: ignore[arg-type]
        window_tokens=values["window_tokens"],  # type: ignore[arg-type]
    )
    return CacheLayout(
        block_tokens=values["block_tokens"],  # type: ignore[arg-type]
        groups=(FullSpec(name="full", layers=(1,), page_bytes=64), window),
        layout_version=values["layout_version"],  # type: ignore[arg-type]
    )


def root(**changes: object) -> bytes:
    values: dict[str, object] = {
        "model_fingerprint": "m",
        "numerics_fingerprint": "n",
        "kv_dtype": "float32",
        "layout": layout(),
        "salt": b"",
    } | changes
    return root_key(**values)  # type: ignore[arg-type]


@given(tokens=TOKENS, block_tokens=st.integers(1, 9))
def test_a_key_is_the_sha256_of_the_key_before_and_the_token_words(tokens, block_tokens):
    expected, key = [], ROOT
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        words = tokens[start : start + block_tokens]
        key = hashlib.sha256(key + struct.pack(f"<{block_tokens}I", *words)).digest()
        expected.append(key)
    assert block_keys(ROOT, tokens, block_tokens) == tuple(expected)
    assert block_keys(ROOT, tuple(tokens), block_tokens) == tuple(expected)


@given(tokens=TOKENS, cut_blocks=st.integers(0, 10))
def test_a_chain_goes_on_from_any_of_its_keys(tokens, cut_blocks):
    keys = block_keys(ROOT, tokens, 4)
    cut = min(cut_blocks, len(keys))
    start = keys[cut - 1] if cut else ROOT
    assert keys[:cut] + block_keys(start, tokens[cut * 4 :], 4) == keys


@given(tokens=st.lists(st.integers(0, 9), min_size=4, max_size=40), data=st.data())
def test_a_changed_token_changes_its_key_and_all_behind_it(tokens, data):
    keys = block_keys(ROOT, tokens, 4)
    place = data.draw(st.integers(0, len(keys) * 4 - 1))
    changed = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    changed_keys = block_keys(ROOT, changed, 4)
    assert changed_keys[: place // 4] == keys[: place // 4]
    assert not set(changed_keys[place // 4 :]) & set(keys)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_id_that_is_no_32_bit_word_is_an_error(token):
    with pytest.raises(OverflowError):
        block_keys(ROOT, [token], 1)


def test_everything_that_changes_bytes_changes_the_root():
    roots = [
        root(),
        root(model_fingerprint="m2"),
        root(numerics_fingerprint="n2"),
        root(kv_dtype="float16"),
        root(salt=b"tenant"),
        root(salt=b"tenanu"),
        root(salt=b"\0"),
        root(layout=layout(block_tokens=8)),
        root(layout=layout(layers=(2, 0))),
        root(layout=layout(page_bytes=128)),
        root(layout=layout(window_tokens=9)),
        root(layout=layout(layout_version="2")),
    ]
    assert len(set(roots)) == len(roots)
    assert root() == roots[0]
    assert {len(r) for r in roots} == {32}


@given(
    first=st.tuples(st.text(max_size=4), st.text(max_size=4), st.binary(max_size=4)),
    second=st.tuples(st.text(max_size=4), st.text(max_size=4), st.binary(max_size=4)),
)
def test_fields_that_run_together_give_other_roots(first, second):
    def of(fields: tuple[str, str, bytes]) -> bytes:
        model, numerics, salt = fields
        return root(model_fingerprint=model, numerics_fingerprint=numerics, salt=salt)

    assert (of(first) == of(second)) == (first == second)
    assert root(model_fingerprint="ab", numerics_fingerprint="c") != root(
        model_fingerprint="a", numerics_fingerprint="bc"
    )


def test_states_of_other_sizes_have_other_roots():
    """Strict mode's states carry rows besides: never a hit for the others."""

    def with_state(state_bytes: int) -> CacheLayout:
        full = FullSpec(name="full", layers=(1,), page_bytes=64)
        state = StateSpec(name="state", layers=(0,), page_bytes=64, state_bytes=state_bytes)
        return CacheLayout(block_tokens=4, groups=(full, state))

    roots = {root(layout=with_state(state_bytes)) for state_bytes in (70, 71, 128)}
    assert len(roots) == 3
