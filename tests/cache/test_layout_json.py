"""A layout's way through JSON: the same layout comes out, and nothing else comes in."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.hashing import root_key
from prfaas.cache.layout_json import MAX_GROUPS, MAX_LAYERS, encode_layout, parse_layout
from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec, WindowSpec
from tests.cache.tiered import LAYOUT


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    block_tokens = draw(st.integers(1, 512))
    bytes_of_kv = st.integers(1, 4096).map(lambda per_token: per_token * block_tokens)
    row_items = st.none() | st.integers(1, 1 << 16)
    layers = iter(draw(st.permutations(range(12))))

    def group(kind: str, number: int) -> FullSpec | WindowSpec | StateSpec:
        some: dict[str, Any] = {
            "name": f"{kind} {number}",
            "layers": tuple(next(layers) for _ in range(draw(st.integers(1, 3)))),
        }
        if kind == "state":
            page_bytes = draw(st.integers(1, 1 << 20))
            state_bytes = draw(st.integers(1, 64)) * page_bytes - draw(
                st.integers(0, page_bytes - 1)
            )
            return StateSpec(**some, page_bytes=page_bytes, state_bytes=state_bytes)
        sizes: dict[str, Any] = {"page_bytes": draw(bytes_of_kv), "row_items": draw(row_items)}
        if kind == "full":
            return FullSpec(**some, **sizes)
        return WindowSpec(**some, **sizes, window_tokens=draw(st.integers(1, 1 << 20)))

    kinds = draw(st.lists(st.sampled_from(["full", "window", "state"]), min_size=1, max_size=4))
    return CacheLayout(
        block_tokens=block_tokens,
        groups=tuple(group(kind, number) for number, kind in enumerate(kinds)),
        layout_version=draw(st.sampled_from(["1", "2", "experimental"])),
    )


@given(layouts(), st.integers(0, 3000), st.integers(0, 3000))
def test_what_is_parsed_is_the_layout_and_names_and_counts_the_same(layout, num_tokens, have):
    parsed = parse_layout(json.loads(json.dumps(encode_layout(layout))))
    assert parsed == layout
    assert parsed.bytes_needed(num_tokens, have) == layout.bytes_needed(num_tokens, have)
    roots = {
        root_key(
            model_fingerprint="m",
            numerics_fingerprint="n",
            kv_dtype="float32",
            layout=each,
            salt=b"",
        )
        for each in (parsed, layout)
    }
    assert len(roots) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(st.data())
def test_any_other_value_is_refused_or_is_a_layout(data):
    value = encode_layout(LAYOUT)
    place: Any = value
    while True:
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    with suppress(ValueError):
        assert encode_layout(parse_layout(value)) == value


@pytest.mark.parametrize(
    ("path", "wrong", "named"),
    [
        ((), None, "layout is no object"),
        ((), {"version": "2"}, "layout.block_tokens is missing"),
        (("extra",), 1, "layout has fields besides"),
        (("version",), "", "layout.version"),
        (("version",), "9" * 257, "layout.version"),
        (("block_tokens",), 0, "layout.block_tokens"),
        (("block_tokens",), True, "layout.block_tokens"),
        (("block_tokens",), 1 << 40, "layout.block_tokens"),
        (("groups",), [], "0 groups"),
        (("groups",), [{}] * (MAX_GROUPS + 1), "layout.groups"),
        (("groups", 0), "full", "layout.groups[0].kind"),
        (("groups", 0, "kind"), ["full"], "layout.groups[0].kind"),
        (("groups", 0, "kind"), "window", "layout.groups[0].window_tokens is missing"),
        (("groups", 0, "layers"), [MAX_LAYERS], "layout.groups[0].layers[0]"),
        (("groups", 0, "layers"), [0] * (MAX_LAYERS + 1), "layout.groups[0].layers"),
        (("groups", 0, "page_bytes"), -1, "layout.groups[0].page_bytes"),
        (("groups", 0, "page_bytes"), 1.0, "layout.groups[0].page_bytes"),
        (("groups", 0, "page_bytes"), 1 << 50, "layout.groups[0].page_bytes"),
        (("groups", 0, "row_items"), 0, "layout.groups[0].row_items"),
        (("groups", 1, "window_tokens"), "4", "layout.groups[1].window_tokens"),
        (("groups", 1, "layers"), [0, 0], "layer 0 is twice"),
        (("groups", 2, "state_bytes"), 1 << 60, "layout.groups[2].state_bytes"),
        (("groups", 2, "name"), 7, "layout.groups[2].name"),
    ],
)
def test_a_refusal_names_the_field(path, wrong, named):
    value: Any = encode_layout(LAYOUT)
    if path:
        place = value
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = wrong
    else:
        value = wrong
    with pytest.raises(ValueError, match=r".") as caught:
        parse_layout(value)
    assert named in str(caught.value)


def test_a_state_of_too_many_slices_is_refused():
    value: Any = encode_layout(LAYOUT)
    value["groups"][2] |= {"page_bytes": 1, "state_bytes": 1 << 40}
    with pytest.raises(ValueError, match="pages a block"):
        parse_layout(value)
