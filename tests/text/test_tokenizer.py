import hashlib
import json
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Encoding

from prfaas.errors import BadRequest, ConfigError
from prfaas.text.gguf_vocab import read_vocabulary
from prfaas.text.tokenizer import Tokenizer
from tests.text.vocabularies import (
    CORPUS,
    byte_level_metadata,
    byte_level_tokenizer,
    sentencepiece_metadata,
    sentencepiece_model,
)


def write(
    directory: Path, metadata: dict[str, object], **files: dict[str, object]
) -> tuple[Tokenizer, Encoding]:
    vocabulary = read_vocabulary(metadata)
    vocabulary.tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.load(directory), vocabulary.tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Encoding]:
    metadata = byte_level_metadata(byte_level_tokenizer("gpt-2"), "gpt-2")
    return write(tmp_path_factory.mktemp("byte-level"), metadata)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Encoding]:
    model = sentencepiece_model(has_space_prefix=False)
    metadata = sentencepiece_metadata(model, has_space_prefix=False)
    return write(tmp_path_factory.mktemp("sentencepiece"), metadata)


@given(st.lists(st.integers(0, 899), max_size=20))
def test_byte_level_text_is_that_of_the_tokenizers_library(
    byte_level: tuple[Tokenizer, Encoding], ids: list[int]
) -> None:
    tokenizer, encoding = byte_level
    assert tokenizer.decode(ids) == encoding.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=30))
def test_sentencepiece_text_comes_back(
    sentencepiece: tuple[Tokenizer, Encoding], text: str
) -> None:
    tokenizer, encoding = sentencepiece
    ids = encoding.encode(text, add_special_tokens=False).ids
    if not any(map(tokenizer.is_special, ids)):
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.parametrize("text", CORPUS)
def test_sentencepiece_text_is_that_of_the_tokenizers_library(
    sentencepiece: tuple[Tokenizer, Encoding], text: str
) -> None:
    tokenizer, encoding = sentencepiece
    ids = encoding.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == encoding.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_found_in_text_and_left_out_of_answers(
    byte_level: tuple[Tokenizer, Encoding],
) -> None:
    tokenizer, _ = byte_level
    ids = tokenizer.encode("<|im_start|>user", add_bos=False)
    assert ids[0] == tokenizer.token_id("<|im_start|>") == 1
    assert tokenizer.decode(ids) == "user"
    assert tokenizer.token_bytes(1) == b"<|im_start|>"
    assert tokenizer.text_bytes(1) == b""


def test_an_id_past_the_vocabulary_is_no_text(byte_level: tuple[Tokenizer, Encoding]) -> None:
    tokenizer, _ = byte_level
    assert tokenizer.decode([tokenizer.vocab_size, 10**6]) == ""


def test_bos_is_added_once_and_only_where_asked(tmp_path: Path) -> None:
    metadata = byte_level_metadata(byte_level_tokenizer("gpt-2"), "gpt-2")
    config: dict[str, object] = {
        "bos_token": {"content": "<|im_start|>", "lstrip": False},
        "eos_token": "<|im_end|>",
        "add_bos_token": True,
    }
    tokenizer, _ = write(tmp_path, metadata, tokenizer_config=config)
    assert tokenizer.bos_id == 1
    assert tokenizer.encode("a", add_bos=True) == [1, *tokenizer.encode("a", add_bos=False)]
    spelled = tokenizer.encode("<|im_start|>a", add_bos=False)
    assert tokenizer.encode("<|im_start|>a", add_bos=True) == spelled
    assert tokenizer.encode("", add_bos=True) == [1]


def test_bos_follows_the_post_processor_where_no_setting_says(tmp_path: Path) -> None:
    metadata = byte_level_metadata(byte_level_tokenizer("gpt-2"), "gpt-2")
    metadata["tokenizer.ggml.add_bos_token"] = True
    named, _ = write(tmp_path, metadata, tokenizer_config={"bos_token": "<|im_start|>"})
    assert named.encode("a", add_bos=True)[0] == 1
    off, _ = write(
        tmp_path,
        metadata,
        tokenizer_config={"bos_token": "<|im_start|>", "add_bos_token": False},
    )
    assert off.encode("a", add_bos=True) == off.encode("a", add_bos=False)


def test_all_configs_together_name_the_ends(tmp_path: Path) -> None:
    metadata = byte_level_metadata(byte_level_tokenizer("gpt-2"), "gpt-2")
    tokenizer, _ = write(
        tmp_path,
        metadata,
        tokenizer_config={"eos_token": "<|im_end|>"},
        generation_config={"eos_token_id": [7, 2], "bos_token_id": 5},
        config={"eos_token_id": 0, "bos_token_id": True},
    )
    assert tokenizer.eos_ids == (0, 2, 7)
    assert tokenizer.bos_id == 5


@pytest.mark.slow
def test_other_threads_run_while_a_long_text_is_encoded(
    byte_level: tuple[Tokenizer, Encoding],
) -> None:
    turns, seen = 0, -1

    def encode() -> None:
        nonlocal seen
        byte_level[0].encode("word " * 200_000, add_bos=False)
        seen = turns

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # a thread runs on until it lets go of the GIL itself
    try:
        thread = threading.Thread(target=encode)
        thread.start()
        while thread.is_alive():
            turns += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval_s)
    thread.join()
    assert seen > 0


def test_half_a_surrogate_pair_is_the_clients_fault(
    byte_level: tuple[Tokenizer, Encoding],
) -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        byte_level[0].encode("a\ud83d", add_bos=False)


def test_the_fingerprint_is_that_of_the_file(tmp_path: Path) -> None:
    metadata = byte_level_metadata(byte_level_tokenizer("gpt-2"), "gpt-2")
    tokenizer, _ = write(tmp_path, metadata)
    data = (tmp_path / "tokenizer.json").read_bytes()
    assert tokenizer.fingerprint == hashlib.sha256(data).hexdigest()


def test_vocab_size_covers_added_tokens(tmp_path: Path) -> None:
    encoding = Encoding(models.BPE({"a": 0, "b": 1}, []))
    encoding.decoder = decoders.ByteLevel()
    encoding.add_special_tokens([AddedToken("<end>")])
    encoding.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 3
    assert tokenizer.encode("ab<end>", add_bos=True) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "cannot read the tokenizer"),
        ("tokenizer.json", b"{}", "not a usable tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "not a usable tokenizer"),
        ("config.json", b"[]", "a JSON list, not an object"),
        ("config.json", b"{", "cannot read"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    write(tmp_path, byte_level_metadata(byte_level_tokenizer("gpt-2"), "gpt-2"))
    path = tmp_path / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder()])
def test_an_unknown_way_of_decoding_is_refused(
    tmp_path: Path, decoder: decoders.Decoder | None
) -> None:
    encoding = Encoding(models.BPE({"a": 0}, []))
    if decoder is not None:
        encoding.decoder = decoder
    encoding.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="decode"):
        Tokenizer.load(tmp_path)
