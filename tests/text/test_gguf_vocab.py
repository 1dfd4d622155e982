import random

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tokenizers import Tokenizer, normalizers

from prfaas.engine.gguf_header import read_header
from prfaas.errors import ConfigError
from prfaas.models.directory import models_dir
from prfaas.text.gguf_vocab import read_vocabulary
from tests.text.vocabularies import (
    CORPUS,
    byte_level_metadata,
    byte_level_tokenizer,
    pre_tokenizer,
    sentencepiece_metadata,
    sentencepiece_model,
)

PRES = ("gpt-2", "smollm", "llama-bpe", "qwen2")
CONTROLS = ("<unk>", "<s>", "</s>")
"""SentencePiece never finds these in text; a chat's text must be able to spell them."""

snippets = st.lists(
    st.one_of(st.sampled_from(CORPUS).map(lambda line: line[:12]), st.text(max_size=6)), max_size=5
).map("".join)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def metadata_of(pre: str) -> dict[str, object]:
    return byte_level_metadata(byte_level_tokenizer(pre), pre)


@pytest.mark.parametrize("has_space_prefix", [True, False])
def test_sentencepiece_ids_are_those_of_sentencepiece(has_space_prefix: bool) -> None:
    model = sentencepiece_model(has_space_prefix=has_space_prefix)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    metadata = sentencepiece_metadata(model, has_space_prefix=has_space_prefix)
    ours = read_vocabulary(metadata).tokenizer

    @given(snippets)
    def check(text: str) -> None:
        # At the start, a prefix before a user-defined piece is a case of its own.
        text = "x" + text
        if not any(control in text for control in CONTROLS):
            assert encode(ours, text) == oracle.encode(text)

    check()


@pytest.mark.parametrize("pre", PRES)
def test_byte_level_ids_are_those_of_the_tokenizer_the_file_was_made_from(pre: str) -> None:
    original = byte_level_tokenizer(pre)
    ours = read_vocabulary(byte_level_metadata(original, pre)).tokenizer
    if pre == "qwen2":
        original = Tokenizer.from_str(original.to_str())
        original.normalizer = normalizers.NFC()

    @given(snippets)
    def check(text: str) -> None:
        assert encode(ours, text) == encode(original, text)

    check()
    for text in CORPUS:
        assert encode(ours, text) == encode(original, text)


def test_no_name_of_a_pre_tokenizer_means_gpt2() -> None:
    metadata = metadata_of("gpt-2")
    del metadata["tokenizer.ggml.pre"]
    assert encode(read_vocabulary(metadata).tokenizer, "a 12") == encode(
        byte_level_tokenizer("gpt-2"), "a 12"
    )


def test_smollm_cuts_every_digit_off() -> None:
    ours = read_vocabulary(metadata_of("smollm")).tokenizer
    assert ours.encode("a\n 7").tokens == ["a", "ĊĠ", "7"]
    assert ours.encode("2026").tokens == ["2", "0", "2", "6"]


@pytest.mark.parametrize("pre", ["chatglm-bpe", "", 7, None])
def test_an_unknown_pre_tokenizer_is_refused_by_name(pre: object) -> None:
    with pytest.raises(ConfigError, match="smollm") as caught:
        read_vocabulary(metadata_of("gpt-2") | {"tokenizer.ggml.pre": pre})
    assert repr(pre) in str(caught.value)


@pytest.mark.parametrize("kind", ["bert", "rwkv", "t5", None])
def test_an_unknown_kind_of_tokenizer_is_refused_by_name(kind: object) -> None:
    with pytest.raises(ConfigError, match=repr(kind)):
        read_vocabulary(metadata_of("gpt-2") | {"tokenizer.ggml.model": kind})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.tokens", None),
        ("tokenizer.ggml.tokens", []),
        ("tokenizer.ggml.tokens", [1, 2]),
        ("tokenizer.ggml.token_type", [1]),
        ("tokenizer.ggml.merges", ["a b c"]),
        ("tokenizer.ggml.merges", ["not there"]),
        ("tokenizer.ggml.bos_token_id", 10**6),
        ("tokenizer.ggml.eos_token_id", "2"),
        ("tokenizer.ggml.add_bos_token", 1),
    ],
)
def test_a_wrong_field_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        read_vocabulary(metadata_of("gpt-2") | {key: value})


def test_a_sentencepiece_vocabulary_without_scores_is_refused() -> None:
    model = sentencepiece_model(has_space_prefix=True)
    metadata = sentencepiece_metadata(model, has_space_prefix=True)
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ConfigError, match="scores"):
        read_vocabulary(metadata)


def test_a_sentencepiece_vocabulary_that_removes_spaces_is_refused() -> None:
    model = sentencepiece_model(has_space_prefix=True)
    metadata = sentencepiece_metadata(model, has_space_prefix=True)
    with pytest.raises(ConfigError, match="extra spaces"):
        read_vocabulary(metadata | {"tokenizer.ggml.remove_extra_whitespaces": True})


def test_byte_tokens_are_never_found_by_their_names() -> None:
    model = sentencepiece_model(has_space_prefix=False)
    ours = read_vocabulary(sentencepiece_metadata(model, has_space_prefix=False)).tokenizer
    assert ours.token_to_id("<0x41>") not in encode(ours, "<0x41>")


def test_sequences_start_with_bos_where_the_file_says_so() -> None:
    metadata = metadata_of("gpt-2")
    assert read_vocabulary(metadata).tokenizer.encode("a").ids[0] != 1
    vocabulary = read_vocabulary(metadata | {"tokenizer.ggml.add_bos_token": True})
    assert vocabulary.tokenizer.encode("a").ids[0] == 1
    assert vocabulary.tokenizer_config["add_bos_token"] is True
    assert vocabulary.tokenizer_config["bos_token"] == "<|im_start|>"


def test_answers_end_at_listed_tokens_and_at_controls_named_as_ends() -> None:
    vocabulary = read_vocabulary(metadata_of("gpt-2") | {"tokenizer.ggml.eot_token_id": 5})
    assert vocabulary.generation_config == {"eos_token_id": [0, 2, 5]}


def test_a_template_in_the_file_is_kept() -> None:
    metadata = metadata_of("gpt-2")
    assert read_vocabulary(metadata).chat_template is None
    assert (
        read_vocabulary(metadata | {"tokenizer.chat_template": "{{ 1 }}"}).chat_template
        == "{{ 1 }}"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_real_byte_level_vocabulary_gives_the_ids_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    path = models_dir() / "smollm2-135m-instruct" / "source.gguf"
    if not path.exists():
        pytest.skip("`prfaas model fetch smollm2-135m-instruct` brings the file this needs")
    oracle = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = oracle.backend_tokenizer
    # transformers drops the cut at digits when it reads a GGUF file (it makes three tokens of
    # "\n 2", not two); the checkpoint's own tokenizer.json has it, and llama.cpp does it.
    backend.pre_tokenizer = pre_tokenizer("smollm")
    ours = read_vocabulary(read_header(path).metadata).tokenizer
    for text in [*CORPUS, *random_texts(2000)]:
        assert encode(ours, text) == encode(backend, text), repr(text)
        assert ours.encode(text).ids == backend.encode(text).ids


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    texts = []
    for _ in range(count):
        parts = rng.choices(CORPUS, k=rng.randint(1, 4))
        cuts = [sorted(rng.choices(range(len(part) + 1), k=2)) for part in parts]
        texts.append("".join(part[a:b] for part, (a, b) in zip(parts, cuts, strict=True)))
    return texts


@pytest.mark.slow
def test_gemma_ids_are_those_of_sentencepiece_but_for_over_31_spaces() -> None:
    """SentencePiece takes whole runs of up to 31 spaces greedily; the published tokenizer.json merges them.

    The two agree up to 31 spaces, which is the longest token; past it we follow the published one.
    """
    path = models_dir() / "gemma-3-270m" / "source.gguf"
    if not path.exists():
        pytest.skip("`prfaas model fetch gemma-3-270m` brings the file this needs")
    metadata = read_header(path).metadata
    ours = read_vocabulary(metadata).tokenizer
    oracle = sentencepiece.SentencePieceProcessor(model_proto=gemma_model(metadata))
    for text in [*CORPUS, *random_texts(2000)]:
        if " " * 32 not in text and "<" not in text:
            assert encode(ours, text) == oracle.encode(text), repr(text)
    assert encode(ours, " " * 33) != oracle.encode(" " * 33)


def gemma_model(metadata: dict[str, object]) -> bytes:
    """The SentencePiece model that the GGUF metadata was written from."""
    proto = ModelProto()
    fields = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    for token, score, kind in zip(*fields, strict=True):
        piece = token.replace(" ", "\u2581") if kind == 4 else token
        proto.pieces.add(piece=piece, score=score, type=2 if token == "<unk>" else kind)
    proto.trainer_spec.model_type = 2
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.vocab_size = len(proto.pieces)
    proto.trainer_spec.pad_id, proto.trainer_spec.eos_id = 0, 1
    proto.trainer_spec.bos_id, proto.trainer_spec.unk_id = 2, 3
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    model: bytes = proto.SerializeToString()
    return model
