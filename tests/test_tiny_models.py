"""The tiny models that other tests build on."""

from pathlib import Path

import pytest

from tests.tiny_models import (
    BOS_ID,
    FAMILIES,
    VOCAB_SIZE,
    Family,
    write_tiny_model,
)
from tests.tiny_tokenizer import tiny_tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_writes_the_same_bytes(tmp_path: Path, family: Family) -> None:
    first = write_tiny_model(tmp_path / "a", family, seed=3)
    second = write_tiny_model(tmp_path / "b", family, seed=3)
    other = write_tiny_model(tmp_path / "c", family, seed=4)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_the_tokenizer_covers_every_byte_and_starts_with_bos() -> None:
    tokenizer = tiny_tokenizer()
    text = "Grüße, 世界! 🚀\n\tend"
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == BOS_ID
    assert max(encoded.ids) < VOCAB_SIZE
    assert tokenizer.decode(encoded.ids) == text
