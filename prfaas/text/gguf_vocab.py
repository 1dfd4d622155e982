"""A `tokenizer.json` from the vocabulary that a GGUF file carries in its metadata.

Two kinds are known. "llama" is SentencePiece BPE: tokens with scores and no merges; a merge is any pair
of tokens that joins to a token, the best score first. "gpt2" is byte-level BPE with its merges listed
and the way text is cut before them named by `tokenizer.ggml.pre`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from prfaas.errors import ConfigError

TYPE_NORMAL, TYPE_CONTROL, TYPE_USER_DEFINED, TYPE_UNUSED, TYPE_BYTE = 1, 3, 4, 5, 6
"""Values of tokenizer.ggml.token_type."""

_SPACE_MARK = "\u2581"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
"""The expressions of the checkpoints' own tokenizer.json; Qwen's cuts every digit off."""

_END_OF_TURN = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end an answer by their name, where the metadata does not list them."""

_END_KEYS = ("eos", "eot", "eom")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """What a checkpoint directory needs of a GGUF file's vocabulary.

    `tokenizer_config` and `generation_config` are the contents of the files of these names.
    """

    tokenizer: Tokenizer
    tokenizer_config: dict[str, object]
    generation_config: dict[str, object]
    chat_template: str | None


def read_vocabulary(metadata: Mapping[str, object]) -> GgufVocabulary:
    """Return the tokenizer that a GGUF file's metadata describes.

    Raises:
        ConfigError: a field is missing or wrong, or names a kind of tokenizer that is not known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = _types(metadata, len(tokens))
    match kind:
        case "llama":
            tokenizer = _sentencepiece(metadata, tokens, types)
            adds_bos = _flag(metadata, "add_bos_token", default=True)
        case "gpt2":
            tokenizer = _byte_level(metadata, tokens)
            adds_bos = _flag(metadata, "add_bos_token", default=False)
        case _:
            raise ConfigError(
                f"the GGUF file has a tokenizer of kind {kind!r}; known are 'llama' and 'gpt2'"
            )
    _add_marked_tokens(tokenizer, tokens, types)
    names = {
        f"{name}_token": tokens[token_id]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token_id := _token_id(metadata, key, len(tokens))) is not None
    }
    if adds_bos and "bos_token" in names:
        _start_with(tokenizer, names["bos_token"])
    template = metadata.get("tokenizer.chat_template")
    return GgufVocabulary(
        tokenizer=tokenizer,
        tokenizer_config={**names, "add_bos_token": adds_bos and "bos_token" in names},
        generation_config={"eos_token_id": _end_ids(metadata, tokens, types)},
        chat_template=template if isinstance(template, str) else None,
    )


def _sentencepiece(
    metadata: Mapping[str, object], tokens: list[str], types: Sequence[int]
) -> Tokenizer:
    """Return SentencePiece's BPE with byte fallback, spaces written as U+2581."""
    if _flag(metadata, "remove_extra_whitespaces", default=False):
        raise ConfigError("a SentencePiece vocabulary that removes extra spaces is not supported")
    # A token of spaces is stored as spaces, but is found where the text has marks by then.
    spelled = [
        _SPACE_MARK * len(token) if token and not token.strip(" ") else token for token in tokens
    ]
    unknown_id = _token_id(metadata, "unknown", len(tokens))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_ids_of(spelled),
            merges=_merges(spelled, _scores(metadata, len(tokens)), types),
            unk_token=None if unknown_id is None else tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=TYPE_BYTE in types,
        )
    )
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(metadata, "add_space_prefix", default=True):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE_MARK, prepend_scheme="first", split=False
        )
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE_MARK)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins to a token, best score first, longest left part first.

    SentencePiece always joins the neighbours whose joined piece scores best; only normal and user-defined
    pieces take part. User-defined ones carry a score without meaning and come whole before all
    others: they go first, by id.
    """
    mergeable = {
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TYPE_NORMAL, TYPE_USER_DEFINED)
    }

    def rank(index: int) -> tuple[bool, float]:
        is_normal = types[index] != TYPE_USER_DEFINED
        return is_normal, -scores[index] if is_normal else index

    joined = [index for index, token in enumerate(tokens) if len(token) > 1 and token in mergeable]
    joined.sort(key=rank)
    return [
        (left, right)
        for token in (tokens[index] for index in joined)
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in mergeable and (right := token[cut:]) in mergeable
    ]


def _byte_level(metadata: Mapping[str, object], tokens: list[str]) -> Tokenizer:
    """Return byte-level BPE that cuts text as the vocabulary's merges were learned."""
    pairs = [tuple(merge.split(" ")) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise ConfigError(f"tokenizer.ggml.merges holds {' '.join(wrong)!r}, which is no pair")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    vocabulary = _ids_of(tokens)
    try:
        model = models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for left, right in pairs],
            ignore_merges=pre == "llama-bpe",  # a word that is a token is that token
        )
    except Exception as error:
        raise ConfigError(f"tokenizer.ggml.merges does not fit its tokens: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    match pre:
        case "default" | "gpt-2":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "smollm":
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        case "llama-bpe":
            tokenizer.pre_tokenizer = _split(_LLAMA3_SPLIT)
        case "qwen2":
            tokenizer.normalizer = normalizers.NFC()
            tokenizer.pre_tokenizer = _split(_QWEN2_SPLIT)
        case _:
            raise ConfigError(
                f"the GGUF file cuts text by the rules {pre!r} (tokenizer.ggml.pre); known are "
                "'default', 'gpt-2', 'llama-bpe', 'qwen2' and 'smollm'"
            )
    return tokenizer


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_marked_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Make control tokens special and user-defined ones whole; both are found in text before BPE.

    A token of spaces is left to the merges: the text has U+2581 in their place.
    """
    known = tokenizer.get_vocab(with_added_tokens=False)
    marked = [
        (token, kind)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TYPE_CONTROL, TYPE_USER_DEFINED) and token in known
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in marked if kind == TYPE_CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in marked if kind != TYPE_CONTROL]
    )


def _start_with(tokenizer: Tokenizer, bos_token: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos_token, "$A"],
        pair=[bos_token, "$A", f"{bos_token}:1", "$B:1"],
        special_tokens=[(bos_token, tokenizer.token_to_id(bos_token))],
    )


def _end_ids(
    metadata: Mapping[str, object], tokens: Sequence[str], types: Sequence[int]
) -> list[int]:
    """Return the ids that end an answer: those listed, and control tokens with the name of an end."""
    ids = {_token_id(metadata, key, len(tokens)) for key in _END_KEYS} - {None}
    ids |= {
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == TYPE_CONTROL and token in _END_OF_TURN
    }
    return sorted(token_id for token_id in ids if token_id is not None)


def _ids_of(tokens: Sequence[str]) -> dict[str, int]:
    """Return token -> id; of tokens spelled alike the first keeps its name."""
    return {token: len(tokens) - 1 - index for index, token in enumerate(reversed(tokens))}


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ConfigError(f"the GGUF file has no list of strings {key}")
    return value


def _types(metadata: Mapping[str, object], num_tokens: int) -> list[int]:
    value = metadata.get("tokenizer.ggml.token_type", [TYPE_NORMAL] * num_tokens)
    if not isinstance(value, list) or len(value) != num_tokens:
        raise ConfigError(f"tokenizer.ggml.token_type is not a list of {num_tokens} types")
    return value


def _scores(metadata: Mapping[str, object], num_tokens: int) -> list[float]:
    value = metadata.get("tokenizer.ggml.scores")
    if not isinstance(value, list) or len(value) != num_tokens:
        raise ConfigError(f"tokenizer.ggml.scores is not a list of {num_tokens} scores")
    return value


def _flag(metadata: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ConfigError(f"tokenizer.ggml.{name} is {value!r}, not a truth value")
    return value


def _token_id(metadata: Mapping[str, object], name: str, num_tokens: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < num_tokens:
        raise ConfigError(f"tokenizer.ggml.{name}_token_id is {value!r} of {num_tokens} tokens")
    return value
