"""Streaming detokenisation that never cuts a character."""

import codecs
from typing import Protocol


class Vocabulary(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def text_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to an answer's text."""


class Detokenizer:
    """Turns one choice's tokens into text as they come.

    The pieces joined, with that of `finish`, are the text of all tokens decoded at once. At most three bytes
    wait for the rest of their character; a byte that can belong to none becomes U+FFFD at once and
    holds nothing up. Constant work for a token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        return self._decoder.decode(self._vocabulary.text_bytes(token_id))

    def finish(self) -> str:
        """Return one U+FFFD if the tokens end inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
