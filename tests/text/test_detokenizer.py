from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.text.detokenizer import Detokenizer
from prfaas.text.gguf_vocab import read_vocabulary
from prfaas.text.tokenizer import Tokenizer
from tests.text.vocabularies import (
    CORPUS,
    byte_level_metadata,
    byte_level_tokenizer,
    sentencepiece_metadata,
    sentencepiece_model,
)


@pytest.fixture(scope="module")
def sentencepiece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model = sentencepiece_model(has_space_prefix=True)
    metadata = sentencepiece_metadata(model, has_space_prefix=True)
    return write(metadata, tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    metadata = byte_level_metadata(byte_level_tokenizer("gpt-2"), "gpt-2")
    return write(metadata, tmp_path_factory.mktemp("byte-level"))


def write(metadata: dict[str, object], directory: Path) -> Tokenizer:
    read_vocabulary(metadata).tokenizer.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


class Bytes:
    """A vocabulary whose token i is the byte i."""

    def text_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def pieces(vocabulary: Bytes | Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(vocabulary)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@given(st.binary(max_size=40))
def test_pieces_joined_are_the_whole_decode_of_any_bytes(data: bytes) -> None:
    assert "".join(pieces(Bytes(), data)) == data.decode("utf-8", errors="replace")


@given(st.text(max_size=30))
def test_whole_characters_come_out_as_they_went_in(text: str) -> None:
    assert "".join(pieces(Bytes(), text.encode())) == text


@given(st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable()), st.data())
def test_a_cut_inside_a_character_gives_one_replacement_at_the_end(
    text: str, data: st.DataObject
) -> None:
    encoded = text.encode()
    end = data.draw(st.integers(0, len(encoded)))
    joined = "".join(pieces(Bytes(), encoded[:end]))
    assert joined.removesuffix("\ufffd") == encoded[:end].decode("utf-8", errors="ignore")


@given(st.binary(max_size=20))
def test_a_bad_byte_does_not_hold_up_what_follows(data: bytes) -> None:
    detokenizer = Detokenizer(Bytes())
    for byte in data:
        detokenizer.push(byte)
    assert detokenizer.push(ord("a")).endswith("a")
    assert detokenizer.finish() == ""


def test_a_character_in_byte_tokens_comes_out_whole_with_its_last_byte() -> None:
    assert pieces(Bytes(), "é😀".encode()) == ["", "é", "", "", "", "😀", ""]


@pytest.mark.parametrize("kind", ["sentencepiece_tokenizer", "byte_tokenizer"])
@pytest.mark.parametrize("text", CORPUS)
def test_an_answer_comes_back_from_its_tokens(
    kind: str, text: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = [i for i in tokenizer.encode(text, add_bos=False) if not tokenizer.is_special(i)]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.data())
def test_random_tokens_of_a_real_vocabulary_join_to_their_decode(
    sentencepiece_tokenizer: Tokenizer, byte_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    tokenizer = data.draw(st.sampled_from([sentencepiece_tokenizer, byte_tokenizer]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_word_that_continues_the_prompt_keeps_its_space(
    sentencepiece_tokenizer: Tokenizer,
) -> None:
    prompt = sentencepiece_tokenizer.encode("The quick brown", add_bos=False)
    whole = sentencepiece_tokenizer.encode("The quick brown fox", add_bos=False)
    assert whole[: len(prompt)] == prompt
    assert "".join(pieces(sentencepiece_tokenizer, whole[len(prompt) :])) == " fox"
