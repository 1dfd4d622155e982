"""The JSON of the KV channel, checked field by field: what is asked for, and what goes with pages.

Nothing here trusts its input: a value of another type, a number out of range or a missing field is
a ProtocolError that names the field.
"""

import base64
import binascii
import json
import math
import sys
from array import array
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from prfaas.errors import ProtocolError
from prfaas.transport.handshake import Identity, parse_identity
from prfaas.types import (
    FinishReason,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)

T = TypeVar("T")

CodecName = Literal["raw", "zstd", "auto", "fp16", "int8", "fp8", "auto-lossy"]
"""auto: each page raw or zstd, as the link and the codec make it arrive sooner; auto-lossy: or int8."""
CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)

MAX_CHOICES = 128
MAX_LIST_ITEMS = 4096
MAX_TOKEN_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """What a pd node asks of a prefill node: this prompt's KV, and its first token."""

    transfer_id: str
    """Chosen by the asker, so that it can cancel even before it hears back."""
    identity: Identity
    accept_approximate: bool
    request: Request
    have_tokens: int
    """Length of the prefix whose blocks the asker holds; a multiple of the block."""
    want_logits: bool = False
    codec: CodecName = "raw"
    """How pages may be encoded on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferAccepted:
    """The prefill node has reserved pages for all of it and queued the prompt."""

    hit_tokens: int
    """Prompt tokens that the prefill node does not need to compute."""
    capability: str
    """What the asker must show to open the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTotals:
    """What the END frame says, to be compared with what came."""

    num_pages: int
    num_page_bytes: int
    tokens_computed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """A prefill node's answer to a handshake."""

    identity: Identity
    is_ready: bool
    reason: str
    num_waiting_tokens: int
    prefill_tokens_per_s: float


def dump(value: object) -> bytes:
    """Return compact JSON; NaN and infinities are our own mistake and raise ValueError."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`, or raise ProtocolError."""
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("not valid JSON") from error
    if not isinstance(value, dict):
        raise ProtocolError("not a JSON object")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _typed(value: dict[str, Any], name: str, kind: type[T]) -> T:
    item = value.get(name)
    if kind is float and type(item) is int:
        item = float(item)
    if type(item) is not kind:
        raise ProtocolError(f"field {name} is missing or not of type {kind.__name__}")
    return item


def _number(value: dict[str, Any], name: str, low: float, high: float = math.inf) -> float:
    number = _typed(value, name, float)
    if not (low <= number <= high and math.isfinite(number)):
        raise ProtocolError(f"field {name} is {number}, allowed {low} to {high}")
    return number


def _count(value: dict[str, Any], name: str, low: int, high: int) -> int:
    number = _typed(value, name, int)
    if not low <= number <= high:
        raise ProtocolError(f"field {name} is {number}, allowed {low} to {high}")
    return number


def _items(value: dict[str, Any], name: str) -> list[Any]:
    items = _typed(value, name, list)
    if len(items) > MAX_LIST_ITEMS:
        raise ProtocolError(f"field {name} has {len(items)} items, limit {MAX_LIST_ITEMS}")
    return items


def _token_id(item: object, name: str) -> int:
    if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
        raise ProtocolError(f"field {name} has an item that is no token id")
    return item


def _binary(value: dict[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(_typed(value, name, str), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"field {name} is not base64") from error


def encode_tokens(tokens: tuple[int, ...]) -> str:
    """Return token ids as base64 of uint32 little-endian: a third of the size of JSON numbers."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


def _tokens(value: dict[str, Any], name: str) -> tuple[int, ...]:
    data = _binary(value, name)
    if not data or len(data) % 4:
        raise ProtocolError(f"field {name} has {len(data)} bytes, expected a multiple of 4")
    packed = array("I", data)
    if sys.byteorder == "big":
        packed.byteswap()
    if max(packed) > MAX_TOKEN_ID:
        raise ProtocolError(f"field {name} has an item that is no token id")
    return tuple(packed)


def encode_transfer_request(asked: TransferRequest) -> bytes:
    """Return the body of POST /kv/v1/transfers."""
    request = asked.request
    return dump(
        {
            "transfer_id": asked.transfer_id,
            "identity": asked.identity.to_json(),
            "accept_approximate": asked.accept_approximate,
            "request_id": request.request_id,
            "prompt_tokens": encode_tokens(request.prompt_tokens),
            "num_choices": request.num_choices,
            "cache_salt": base64.b64encode(request.cache_salt).decode(),
            "sampling": _encode_sampling(request.sampling),
            "have_tokens": asked.have_tokens,
            "want_logits": asked.want_logits,
            "codec": asked.codec,
        }
    )


def parse_transfer_request(data: bytes) -> TransferRequest:
    """Return the request in `data`, or raise ProtocolError naming the field at fault."""
    value = parse_object(data)
    transfer_id = _typed(value, "transfer_id", str)
    if not (len(transfer_id) == 32 and transfer_id.isalnum() and transfer_id.isascii()):
        raise ProtocolError("field transfer_id is not 32 letters and digits")
    prompt_tokens = _tokens(value, "prompt_tokens")
    return TransferRequest(
        transfer_id=transfer_id,
        identity=parse_identity(value.get("identity")),
        accept_approximate=_typed(value, "accept_approximate", bool),
        request=Request(
            request_id=_typed(value, "request_id", str)[:128],
            prompt_tokens=prompt_tokens,
            sampling=_parse_sampling(_typed(value, "sampling", dict)),
            num_choices=_count(value, "num_choices", 1, MAX_CHOICES),
            cache_salt=_binary(value, "cache_salt"),
        ),
        have_tokens=_count(value, "have_tokens", 0, len(prompt_tokens) - 1),
        want_logits=_typed(value, "want_logits", bool),
        codec=_codec(value),
    )


def _codec(value: dict[str, Any]) -> CodecName:
    asked = _typed(value, "codec", str)
    for name in CODEC_NAMES:
        if name == asked:
            return name
    raise ProtocolError(f"field codec is not one of {', '.join(CODEC_NAMES)}")


def _encode_sampling(sampling: SamplingParams) -> dict[str, object]:
    return {
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": [(token, _or_null(bias)) for token, bias in sampling.logit_bias],
        "num_logprobs": sampling.num_logprobs,
        "stop_token_ids": sampling.stop_token_ids,
    }


def _parse_sampling(value: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_tokens=_count(value, "max_tokens", 1, MAX_TOKEN_ID),
        seed=_count(value, "seed", 0, (1 << 64) - 1),
        temperature=_number(value, "temperature", 0),
        top_p=_number(value, "top_p", 0, 1),
        top_k=None if value.get("top_k") is None else _count(value, "top_k", 1, MAX_TOKEN_ID),
        min_p=_number(value, "min_p", 0, 1),
        presence_penalty=_number(value, "presence_penalty", -math.inf),
        frequency_penalty=_number(value, "frequency_penalty", -math.inf),
        repetition_penalty=_number(value, "repetition_penalty", 0),
        logit_bias=tuple(_pair(item, "logit_bias") for item in _items(value, "logit_bias")),
        num_logprobs=None
        if value.get("num_logprobs") is None
        else _count(value, "num_logprobs", 0, MAX_LIST_ITEMS),
        stop_token_ids=tuple(
            _token_id(item, "stop_token_ids") for item in _items(value, "stop_token_ids")
        ),
    )


def _pair(item: object, name: str) -> tuple[int, float]:
    """Return (token id, finite number or -inf); -inf travels as null."""
    if not isinstance(item, list) or len(item) != 2:
        raise ProtocolError(f"field {name} has an item that is no pair")
    token_id, number = item
    return _token_id(token_id, name), _log_number(number, name)


def _log_number(number: object, name: str) -> float:
    if number is None:
        return -math.inf
    if type(number) is int:
        number = float(number)
    if type(number) is not float or not math.isfinite(number):
        raise ProtocolError(f"field {name} has an item that is no number")
    return number


def _or_null(number: float) -> float | None:
    return number if math.isfinite(number) else None


def encode_first_tokens(events: list[TokenEvent]) -> bytes:
    """Return the payload of FIRST_TOKENS: the first drawn token of every choice."""
    return dump(
        {
            "tokens": [
                {
                    "choice": event.choice_index,
                    "id": event.token_id,
                    "finish_reason": event.finish_reason,
                    "logprobs": None
                    if event.logprobs is None
                    else {
                        "logprob": _or_null(event.logprobs.logprob),
                        "top": [(token, _or_null(p)) for token, p in event.logprobs.top],
                    },
                }
                for event in events
            ]
        }
    )


def parse_first_tokens(data: bytes, request: Request) -> list[TokenEvent]:
    """Return one event for each choice of `request`, in order, or raise ProtocolError."""
    items = _items(parse_object(data), "tokens")
    events = [_parse_token(item, request.request_id) for item in items]
    if [event.choice_index for event in events] != list(range(request.num_choices)):
        raise ProtocolError(f"first tokens do not cover {request.num_choices} choices in order")
    return events


def _parse_token(item: object, request_id: str) -> TokenEvent:
    if not isinstance(item, dict):
        raise ProtocolError("field tokens has an item that is no object")
    finish_reason = item.get("finish_reason")
    if finish_reason not in (None, "stop", "length"):
        raise ProtocolError("field finish_reason has an unknown value")
    return TokenEvent(
        request_id=request_id,
        choice_index=_count(item, "choice", 0, MAX_CHOICES),
        token_id=_count(item, "id", 0, MAX_TOKEN_ID),
        logprobs=_parse_logprobs(item.get("logprobs")),
        finish_reason=cast("FinishReason | None", finish_reason),
    )


def _parse_logprobs(value: object) -> TokenLogprobs | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ProtocolError("field logprobs is no object")
    return TokenLogprobs(
        logprob=_log_number(value.get("logprob"), "logprob"),
        top=tuple(_pair(item, "top") for item in _items(value, "top")),
    )


def encode_totals(totals: TransferTotals) -> bytes:
    """Return the payload of END."""
    return dump(
        {
            "num_pages": totals.num_pages,
            "num_page_bytes": totals.num_page_bytes,
            "tokens_computed": totals.tokens_computed,
        }
    )


def parse_totals(data: bytes) -> TransferTotals:
    """Return the totals in an END payload, or raise ProtocolError."""
    value = parse_object(data)
    limit = 1 << 62
    return TransferTotals(
        num_pages=_count(value, "num_pages", 0, limit),
        num_page_bytes=_count(value, "num_page_bytes", 0, limit),
        tokens_computed=_count(value, "tokens_computed", 0, limit),
    )


def encode_accepted(accepted: TransferAccepted) -> bytes:
    """Return the answer to POST /kv/v1/transfers."""
    return dump({"hit_tokens": accepted.hit_tokens, "capability": accepted.capability})


def parse_accepted(data: bytes) -> TransferAccepted:
    """Return the answer in `data`, or raise ProtocolError."""
    value = parse_object(data)
    capability = _typed(value, "capability", str)
    if not (capability.isalnum() and capability.isascii() and len(capability) <= 64):
        raise ProtocolError("field capability is not up to 64 letters and digits")
    return TransferAccepted(
        hit_tokens=_count(value, "hit_tokens", 0, MAX_TOKEN_ID), capability=capability
    )


def encode_status(status: PeerStatus) -> bytes:
    """Return the answer to POST /kv/v1/handshake."""
    return dump(
        {
            "identity": status.identity.to_json(),
            "is_ready": status.is_ready,
            "reason": status.reason,
            "num_waiting_tokens": status.num_waiting_tokens,
            "prefill_tokens_per_s": status.prefill_tokens_per_s,
        }
    )


def parse_status(data: bytes) -> PeerStatus:
    """Return the answer in `data`, or raise ProtocolError."""
    value = parse_object(data)
    return PeerStatus(
        identity=parse_identity(value.get("identity")),
        is_ready=_typed(value, "is_ready", bool),
        reason=_typed(value, "reason", str)[:512],
        num_waiting_tokens=_count(value, "num_waiting_tokens", 0, 1 << 62),
        prefill_tokens_per_s=_number(value, "prefill_tokens_per_s", 0),
    )
