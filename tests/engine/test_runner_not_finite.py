"""A token that the model cannot compute fails the requests that have it, and no others."""

import math

import pytest

from tests.engine.running import BLOCK, Node, prompt_of, tiny

BAD_TOKEN = 7


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_shared(value: float) -> None:
    model = tiny("llama", "float32")
    prompt = tuple(token for token in prompt_of(300) if token != BAD_TOKEN)
    shared, rest = prompt[: 2 * BLOCK + 1], prompt[2 * BLOCK + 1 : 3 * BLOCK]
    expected = Node(model).answer((*shared, *rest)).tokens()
    weight_VD = model.embed_tokens.weight
    before_D = weight_VD[BAD_TOKEN].clone()
    weight_VD[BAD_TOKEN] = value
    try:
        node = Node(model)
        bad = node.answer((*shared, BAD_TOKEN, *rest))
        assert bad.error is not None
        assert "not finite" in bad.error
        good = node.answer((*shared, *rest))
    finally:
        weight_VD[BAD_TOKEN] = before_D
    assert good.error is None
    assert good.tokens() == expected
