"""The real Gemma 3 270M: logits and greedy text that transformers gave on the same weights."""

import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tokenizers import Tokenizer

from prfaas.engine.loader import load_model
from prfaas.engine.model import Model, Segment
from prfaas.errors import ConfigError

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is Paris. The capital of Germany is"
PROMPT_IDS = [2, 818, 5279, 529, 7001, 563, 9079, 236761, 669, 5279, 529, 9405, 563]
TOP_5 = {
    " Berlin": 22.9064,
    " Frankfurt": 19.9589,
    " Bonn": 19.1348,
    " Munich": 18.9075,
    " Stuttgart": 18.7352,
}
GREEDY_24 = (
    " Berlin. The capital of the United States is Washington, D.C.\n\n"
    "The capital of the United Kingdom is London"
)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    from prfaas.models.store import resolve

    try:
        return resolve("gemma-3-270m")
    except ConfigError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has no default model: {error}")
        pytest.skip(f"no default model here: {error}")


@pytest.fixture(scope="module", params=["float32", "float16"])
def loaded(request: pytest.FixtureRequest, model_dir: Path) -> tuple[Model, float]:
    """The model in one dtype, and how far its logits may be from float32's."""
    dtype: Literal["float32", "float16"] = request.param
    return load_model(model_dir, dtype=dtype), {"float32": 1e-3, "float16": 0.05}[dtype]


def test_logits_and_greedy_text_are_the_golden_ones(
    loaded: tuple[Model, float], model_dir: Path
) -> None:
    model, tolerance = loaded
    tokenizer: Any = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert tokenizer.encode(PROMPT).ids[-len(PROMPT_IDS) + 1 :] == PROMPT_IDS[1:]
    kv = model.new_kv(capacity_tokens=64)
    logits = model.forward([Segment(kv=kv, tokens=PROMPT_IDS, num_logits=1)])
    top = logits[0].topk(5)
    assert [tokenizer.decode([i]) for i in top.indices.tolist()] == list(TOP_5)
    torch.testing.assert_close(
        top.values, torch.tensor(list(TOP_5.values())), rtol=0, atol=tolerance
    )
    drawn: list[int] = []
    while len(drawn) < 24:
        drawn.append(int(logits[0].argmax()))
        logits = model.forward([Segment(kv=kv, tokens=drawn[-1:], num_logits=1)])
    assert tokenizer.decode(drawn) == GREEDY_24


@pytest.mark.parametrize("loaded", ["float16"], indirect=True)
def test_a_prompt_longer_than_the_window_has_the_same_bits_in_chunks(
    loaded: tuple[Model, float],
) -> None:
    model, _ = loaded
    tokens = torch.randint(
        3, model.config.vocab_size, (700,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    whole, chunked = (model.new_kv(capacity_tokens=800) for _ in range(2))
    expected = model.forward([Segment(kv=whole, tokens=tokens, num_logits=1)])
    for start, stop in ((0, 320), (320, 640), (640, 699)):
        model.forward([Segment(kv=chunked, tokens=tokens[start:stop], num_logits=0)])
    last = model.forward([Segment(kv=chunked, tokens=tokens[-1:], num_logits=1)])
    assert torch.equal(last, expected)
