"""Bodies of answers: whole ones, stream chunks, usage, models and errors. Strict JSON only."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from typing import Literal

import msgspec

from prfaas.transport.fields import encodable
from prfaas.types import FinishReason, RequestRecord, TokenLogprobs

Json = dict[str, object]
Endpoint = Literal["chat", "completions"]

_ENCODER = msgspec.json.Encoder()

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntry:
    """One token of an answer, with what is known of its probability."""

    name: bytes
    """What the token is called: of an ordinary one, its text."""
    text_bytes: bytes
    """What it adds to the answer; joined over all tokens, the answer."""
    logprobs: TokenLogprobs
    top_names: tuple[bytes, ...]
    """The names of `logprobs.top`'s tokens."""
    text_offset: int
    """Where the token's text begins in the choice's text, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one step adds to a choice's answer."""

    text: str
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: FinishReason | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.text or self.entries or self.finish_reason)

    def after(self, text: str) -> "Piece":
        """Return the piece with `text` put before it."""
        return self if not text else replace(self, text=text + self.text)

    @classmethod
    def joined(cls, pieces: "Sequence[Piece]") -> "Piece":
        """Return the pieces of one choice as one."""
        return cls(
            text="".join(piece.text for piece in pieces),
            entries=tuple(entry for piece in pieces for entry in piece.entries),
            finish_reason=pieces[-1].finish_reason if pieces else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The fields that all bodies of one answer share."""

    endpoint: Endpoint
    answer_id: str
    created_s: int
    model: str
    system_fingerprint: str

    def chunk(self, choices: Sequence[Json], **rest: object) -> Json:
        """Return a stream event's body."""
        kind = "chat.completion.chunk" if self.endpoint == "chat" else "text_completion"
        return self._body(kind, choices, rest)

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        """Return a whole answer's body."""
        kind = "chat.completion" if self.endpoint == "chat" else "text_completion"
        return self._body(kind, choices, {"usage": usage})

    def _body(self, kind: str, choices: Sequence[Json], rest: Mapping[str, object]) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": list(choices),
            **rest,
        }

    def choice(self, index: int, piece: Piece, *, has_logprobs: bool) -> Json:
        """Return a choice of a whole answer."""
        if self.endpoint == "chat":
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            return self._choice(index, {"message": message}, piece, has_logprobs)
        return self._choice(index, {"text": piece.text}, piece, has_logprobs)

    def delta(self, index: int, piece: Piece, *, is_first: bool, has_logprobs: bool) -> Json:
        """Return a choice of a stream event; the first of a chat's choice names the role."""
        if self.endpoint == "completions":
            return self._choice(index, {"text": piece.text}, piece, has_logprobs)
        delta: Json = {"role": "assistant"} if is_first else {}
        if is_first or piece.text or piece.entries:
            delta["content"] = piece.text
        return self._choice(index, {"delta": delta}, piece, has_logprobs)

    def _choice(self, index: int, content: Json, piece: Piece, has_logprobs: bool) -> Json:
        logprobs: Json | None = None
        if has_logprobs:
            make = _chat_logprobs if self.endpoint == "chat" else _completion_logprobs
            logprobs = make(piece.entries)
        return {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }


def token_text(name: bytes) -> str:
    """Return the token's text; bytes that are no text by themselves as OpenAI shows them."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)


def finite_logprob(logprob: float) -> float:
    """Return a number that JSON has: minus infinity and worse become -9999."""
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB


def _chat_logprobs(entries: Sequence[TokenEntry]) -> Json:
    return {
        "content": [
            {
                **_token(entry.name, entry.logprobs.logprob),
                "bytes": list(entry.text_bytes),
                "top_logprobs": [
                    _token(name, logprob)
                    for name, (_, logprob) in zip(entry.top_names, entry.logprobs.top, strict=True)
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _token(name: bytes, logprob: float) -> Json:
    return {
        "token": token_text(name),
        "logprob": finite_logprob(logprob),
        "bytes": list(name),
    }


def _completion_logprobs(entries: Sequence[TokenEntry]) -> Json:
    return {
        "tokens": [token_text(entry.name) for entry in entries],
        "token_logprobs": [finite_logprob(entry.logprobs.logprob) for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries],
        "text_offset": [entry.text_offset for entry in entries],
    }


def _top(entry: TokenEntry) -> Json:
    top: Json = {}
    for name, (_, logprob) in zip(entry.top_names, entry.logprobs.top, strict=True):
        # two ids may share a text; the first is the likelier
        top.setdefault(token_text(name), finite_logprob(logprob))
    top.setdefault(token_text(entry.name), finite_logprob(entry.logprobs.logprob))
    return top


def usage_body(records: Sequence[RequestRecord], completion_tokens: int) -> Json:
    """Return `usage`: the tokens, and under `prfaas` how the prompt came to its KVCache.

    An answer to several prompts sums their tokens and has one entry in `prfaas.requests` for each.
    """
    prompt_tokens = sum(record.prompt_tokens for record in records)
    stories = [story_body(record) for record in records]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(record.tokens_reused for record in records),
        },
        "prfaas": stories[0] if len(stories) == 1 else {"requests": stories},
    }


def story_body(record: RequestRecord) -> Json:
    """Return what an answer says of its own way."""
    return {
        "route": record.route,
        "reason": record.reason,
        "peer": record.peer,
        "node": record.node,
        "node_reason": record.node_reason,
        "retries": record.retries,
        "tokens_reused": record.tokens_reused,
        "tokens_local": record.tokens_local,
        "tokens_remote": record.tokens_remote,
        "bytes_received": record.bytes_received,
        "predicted_ttft_s": _finite(record.predicted_ttft_s),
        "ttft_s": _finite(record.ttft_s),
        "exact": record.exact,
    }


def record_body(record: RequestRecord) -> Json:
    """Return what `/debug/requests/{id}` says of one request."""
    return {
        "request_id": record.request_id,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "finish_reasons": {str(index): why for index, why in record.finish_reasons.items()},
        **story_body(record),
        "tries": [asdict(each) for each in record.tries],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def model_body(name: str, created_s: int) -> Json:
    """Return one model of `/v1/models`."""
    return {"id": name, "object": "model", "created": created_s, "owned_by": "prfaas"}


def error_body(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> Json:
    """Return an error in OpenAI's shape: all four keys, text without lone surrogates."""
    kind = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}.get(
        status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR
        else "server_error"
    )  # fmt: skip
    return {
        "error": {
            "message": encodable(message),
            "type": kind,
            "param": None if param is None else encodable(param),
            "code": code,
        }
    }


def to_json(body: Json) -> bytes:
    """Return `body` as strict JSON in UTF-8.

    Of numbers, text, lists and objects only, and of numbers that are finite: of a mistake of ours in
    that a client would see null, never a wrong number.
    """
    return _ENCODER.encode(body)
