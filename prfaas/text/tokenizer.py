"""Text to token ids and back, over one `tokenizer.json`.

Decoding is defined on bytes: a token stands for a fixed byte string, and the text of some tokens is the
UTF-8 of their bytes joined. So text is always that of a *continuation*: the leading space of a word stays,
which a SentencePiece decoder would strip at the start of a sequence.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import tokenizers

from prfaas.errors import BadRequest, ConfigError

TokenSpelling = Literal["byte-level", "sentencepiece"]
"""How a token's name spells its bytes: in GPT-2's byte alphabet, or as text with U+2581 for a space."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of GPT-2's byte alphabet stands for.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = byte_alphabet()


class Tokenizer:
    """A model's vocabulary. Safe to use from several threads.

    Attributes:
        bos_id: the token that starts a sequence, or None.
        eos_ids: the tokens that end an answer, ascending.
        vocab_size: the largest id plus one. A model may have more logits than that.
        fingerprint: sha256 of tokenizer.json, hexadecimal.
    """

    def __init__(
        self,
        encoding: tokenizers.Tokenizer,
        *,
        spelling: TokenSpelling,
        fingerprint: str,
        bos_id: int | None,
        eos_ids: Sequence[int],
        starts_with_bos: bool,
    ) -> None:
        self._encoding = encoding
        self._spelling = spelling
        self._starts_with_bos = starts_with_bos
        self._special_ids = frozenset(
            token_id
            for token_id, token in encoding.get_added_tokens_decoder().items()
            if token.special
        )
        self._bytes_of_id: dict[int, bytes] = {}
        self.bos_id = bos_id
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.vocab_size = max(
            encoding.get_vocab_size(with_added_tokens=True),
            1 + max(encoding.get_added_tokens_decoder(), default=-1),
        )
        self.fingerprint = fingerprint

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Return the tokenizer of a checkpoint directory.

        It reads tokenizer.json and, where present, tokenizer_config.json (which tokens begin and end a
        sequence), generation_config.json and config.json (the ids that end an answer).

        Raises:
            ConfigError: a file is missing or damaged, or decodes tokens in a way not known here.
        """
        path = model_dir / "tokenizer.json"
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read the tokenizer {path}: {error}") from error
        try:
            encoding = tokenizers.Tokenizer.from_buffer(text)
        except Exception as error:
            raise ConfigError(f"{path} is not a usable tokenizer: {error}") from error
        encoding.no_padding()
        encoding.no_truncation()
        settings = read_json(model_dir / "tokenizer_config.json")
        configs = [
            read_json(model_dir / name) for name in ("generation_config.json", "config.json")
        ]
        bos_id = _special_id(encoding, settings.get("bos_token"))
        if bos_id is None:
            bos_id = next((ids[0] for ids in map(_bos_ids, configs) if ids), None)
        eos_id = _special_id(encoding, settings.get("eos_token"))
        eos_ids = [] if eos_id is None else [eos_id]
        for config in configs:
            eos_ids += _ids(config, "eos_token_id")
        return cls(
            encoding,
            spelling=_spelling(encoding, path),
            fingerprint=hashlib.sha256(text).hexdigest(),
            bos_id=bos_id,
            eos_ids=eos_ids,
            starts_with_bos=_starts_with_bos(encoding, bos_id, settings.get("add_bos_token")),
        )

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """Return the ids of `text`. A special token spelled in the text is that token.

        With `add_bos`, the sequence starts with `bos_id` if this checkpoint's sequences do and the text
        does not spell it already. An end-of-sequence token is never added: a prompt is to be continued.

        Raises:
            BadRequest: the text holds half of a surrogate pair, which no tokenizer can read.
        """
        try:
            # `encode` holds the GIL: 2 MB of text stop every other thread for seconds.
            (encoded,) = self._encoding.encode_batch_fast([text], add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise BadRequest("the text holds an unpaired surrogate") from error
        ids = encoded.ids
        if (
            add_bos
            and self._starts_with_bos
            and self.bos_id is not None
            and ids[:1] != [self.bos_id]
        ):
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` as a continuation, special tokens left out.

        Bytes that are not UTF-8 become U+FFFD, one for each maximal part of a character.
        """
        return b"".join(map(self.text_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, a special one's being its name.

        An id without a token (models pad their vocabulary) stands for nothing.
        """
        known = self._bytes_of_id.get(token_id)
        if known is None:
            known = self._bytes_of_id[token_id] = self._spell(token_id)
        return known

    def text_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to an answer's text: `token_bytes`, or nothing if it is special."""
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a mark, such as the end of a turn, and no text."""
        return token_id in self._special_ids

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this name, or None."""
        return self._encoding.token_to_id(token)

    def _spell(self, token_id: int) -> bytes:
        token = self._encoding.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._spelling == "byte-level":
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token, spelled as it is
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(match[1]) if match else token.replace(_SPACE_MARK, " ").encode()


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in a file, or an empty one if there is no such file.

    Raises:
        ConfigError: the file is no JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def token_name(setting: object) -> str | None:
    """Return the token that a field of tokenizer_config.json names: a string, or an object around one."""
    if isinstance(setting, Mapping):
        setting = setting.get("content")
    return setting if isinstance(setting, str) else None


def _special_id(encoding: tokenizers.Tokenizer, setting: object) -> int | None:
    name = token_name(setting)
    return None if name is None else encoding.token_to_id(name)


def _ids(config: Mapping[str, object], key: str) -> list[int]:
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _bos_ids(config: Mapping[str, object]) -> list[int]:
    return _ids(config, "bos_token_id")


def _starts_with_bos(encoding: tokenizers.Tokenizer, bos_id: int | None, setting: object) -> bool:
    """Whether sequences start with BOS: as tokenizer_config.json says, else as the post-processor does."""
    if isinstance(setting, bool):
        return setting
    return bos_id is not None and encoding.encode("a", add_special_tokens=True).ids[:1] == [bos_id]


def _spelling(encoding: tokenizers.Tokenizer, path: Path) -> TokenSpelling:
    if encoding.decoder is None:
        raise ConfigError(f"{path} has no decoder")
    decoder = json.loads(encoding.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    types = {step["type"] for step in steps}
    if "ByteLevel" in types:
        return "byte-level"
    is_marked = "Metaspace" in types or any(
        step["type"] == "Replace"
        and step["content"] == " "
        and step["pattern"] == {"String": _SPACE_MARK}
        for step in steps
    )
    if is_marked and types <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return "sentencepiece"
    raise ConfigError(
        f"{path} decodes with {sorted(types)}; known are ByteLevel and the SentencePiece steps"
    )
