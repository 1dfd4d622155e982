"""Small trained tokenizers, as GGUF metadata and as their makers' own objects."""

import io
import json
from functools import cache
from pathlib import Path

import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS: list[str] = json.loads((Path(__file__).parent / "corpus.json").read_text("utf-8"))

GGUF_TYPE_OF_PIECE = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6}
"""SentencePiece's NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE have the same numbers in GGUF."""

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def sentencepiece_model(*, has_space_prefix: bool) -> bytes:
    """A SentencePiece BPE model with byte fallback and whole tokens for runs of newlines."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in CORPUS if line.strip() and "\0" not in line),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=has_space_prefix,
        user_defined_symbols=["\n", "\n\n", "<table>"],
        hard_vocab_limit=False,
        minloglevel=3,
    )
    return model.getvalue()


def sentencepiece_metadata(model: bytes, *, has_space_prefix: bool) -> dict[str, object]:
    """What a GGUF file of a model with this vocabulary says of it."""
    proto = ModelProto.FromString(model)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in proto.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in proto.pieces],
        "tokenizer.ggml.token_type": [GGUF_TYPE_OF_PIECE[piece.type] for piece in proto.pieces],
        "tokenizer.ggml.bos_token_id": proto.trainer_spec.bos_id,
        "tokenizer.ggml.eos_token_id": proto.trainer_spec.eos_id,
        "tokenizer.ggml.unknown_token_id": proto.trainer_spec.unk_id,
        "tokenizer.ggml.add_space_prefix": has_space_prefix,
    }


def pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """How published checkpoints of each kind cut text."""
    match pre:
        case "gpt-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "smollm":
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        case _:
            pattern = {"llama-bpe": LLAMA3_PATTERN, "qwen2": QWEN2_PATTERN}[pre]
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )


@cache
def byte_level_tokenizer(pre: str) -> Tokenizer:
    """A byte-level BPE tokenizer trained on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, object]:
    """What a GGUF file of a model with this vocabulary says of it."""
    size = tokenizer.get_vocab_size()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokenizer.id_to_token(index) for index in range(size)],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (size - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
