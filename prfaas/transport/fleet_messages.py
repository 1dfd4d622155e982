"""What a scheduler asks of a node, and the lines that the node answers with while it works.

    scheduler -> node   POST /fleet/v1/generate   a GenerateRequest
    node -> scheduler   200, one JSON object a line: Story once, then tokens and logits as they are drawn,
                        Alive whenever nothing was said for a while, and last Ended or Refused

A line that does not come means that the node does not work; an answer without its last line was cut
short. What was refused before the first line has an HTTP status instead. Every field is checked: a value
of another type, a number out of range or a missing field is a ProtocolError that names it.
"""

import base64
import math
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from prfaas.errors import BadRequest, EngineError, Overloaded, PrfaasError, ProtocolError
from prfaas.transport.fields import (
    MAX_TOKEN_ID,
    binary_of,
    count_of,
    dump,
    encodable,
    encode_tokens,
    items_of,
    number_of,
    parse_object,
    shown,
    tokens_of,
    typed,
)
from prfaas.transport.handshake import Identity, parse_identity
from prfaas.transport.request_json import (
    MAX_REQUEST_ID_CHARS,
    parse_request,
    parse_token,
    request_fields,
    token_fields,
)
from prfaas.types import Request, RequestRecord, RouteName, TokenEvent

HEARTBEAT_PATH = "/fleet/v1/heartbeat"
LEAVE_PATH = "/fleet/v1/leave"
GENERATE_PATH = "/fleet/v1/generate"
STOP_PATH = "/fleet/v1/stop"
FLEET_PREFIX = "/fleet/v1/"

ALIVE_S = 0.5
"""A node that has nothing to say while it works says so this often."""
MAX_LINE_BYTES = 8 << 20
"""Logits of a vocabulary of a million tokens, in base64."""
MAX_NODE_CHARS = 256
MAX_COUNT = 1 << 62

RefusalKind = Literal["bad_request", "overloaded", "engine_error"]
REFUSAL_KINDS = frozenset(get_args(RefusalKind))
ROUTE_NAMES = frozenset(get_args(RouteName))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request for one node, with what was drawn of its answer and how to come to its KV."""

    identity: Identity
    """Whom the scheduler takes the node for; another one refuses."""
    request: Request
    drawn_tokens: tuple[tuple[int, ...], ...] = ()
    """Per choice, what other nodes drew: continued, never drawn again and never sent again. Empty: nothing."""
    ended_choices: tuple[int, ...] = ()
    """Choices that have all they need; nothing more is drawn for them."""
    prefill_at: str | None = None
    """The node that prefills; None is this one."""
    reason: str
    """Why there."""
    predicted_ttft_s: float | None = None
    prefix_from: str | None = None
    """The node to fetch a cached prefix from first."""
    prefix_tokens: int = 0
    return_logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StopChoice:
    """One choice of a running request has all it needs; the others go on."""

    request_id: str
    choice_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The record as it stands before the first token."""

    record: RequestRecord


@dataclass(frozen=True, slots=True)
class Logits:
    """float32 little-endian logits of the first drawn token."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Alive:
    """The node works, and has nothing new to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The node ends the request without an answer."""

    kind: RefusalKind
    message: str
    retry_after_s: float = 1.0
    """Of overloaded."""
    code: str | None = None
    """Of bad_request: OpenAI's."""

    def as_error(self) -> PrfaasError:
        """Return what it stands for."""
        match self.kind:
            case "bad_request":
                return BadRequest(self.message, code=self.code)
            case "overloaded":
                return Overloaded(self.message, retry_after_s=self.retry_after_s)
            case "engine_error":
                return EngineError(self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Every choice has its last token, or was stopped."""

    record: RequestRecord
    """As it is in the end."""
    outcome: str | None = None
    """How the remote prefill ended; None if there was none."""
    hit_tokens: int = 0
    """Leading tokens that the node had before anything was fetched."""


GenerateLine = Story | TokenEvent | Logits | Alive | Refused | Ended


def refused(error: PrfaasError) -> Refused:
    """Return the line that `error` ends an answer with."""
    match error:
        case BadRequest(code=code):
            return Refused(kind="bad_request", message=str(error), code=code)
        case Overloaded(retry_after_s=retry_after_s):
            return Refused(kind="overloaded", message=str(error), retry_after_s=retry_after_s)
        case _:
            return Refused(kind="engine_error", message=str(error))


# ------------------------------------------------------------------ what is asked


def encode_generate_request(asked: GenerateRequest) -> bytes:
    """Return the body of POST /fleet/v1/generate."""
    return dump(
        {
            "identity": asked.identity.to_json(),
            **request_fields(asked.request),
            "drawn_tokens": [encode_tokens(tokens) for tokens in asked.drawn_tokens],
            "ended_choices": asked.ended_choices,
            "prefill_at": asked.prefill_at,
            "reason": asked.reason,
            "predicted_ttft_s": _finite(asked.predicted_ttft_s),
            "prefix_from": asked.prefix_from,
            "prefix_tokens": asked.prefix_tokens,
            "return_logits": asked.return_logits,
        }
    )


def parse_generate_request(data: bytes) -> GenerateRequest:
    """Return the request in `data`, or raise ProtocolError naming the field at fault."""
    value = parse_object(data)
    request = parse_request(value)
    return GenerateRequest(
        identity=parse_identity(value.get("identity")),
        request=request,
        drawn_tokens=_drawn_tokens(value, request),
        ended_choices=tuple(
            _choice_of(item, request.num_choices) for item in items_of(value, "ended_choices")
        ),
        prefill_at=node_or_none(value, "prefill_at"),
        reason=shown(typed(value, "reason", str)),
        predicted_ttft_s=seconds_or_none(value, "predicted_ttft_s"),
        prefix_from=node_or_none(value, "prefix_from"),
        prefix_tokens=count_of(value, "prefix_tokens", 0, len(request.prompt_tokens)),
        return_logits=typed(value, "return_logits", bool),
    )


def encode_stop_choice(stop: StopChoice) -> bytes:
    """Return the body of POST /fleet/v1/stop."""
    return dump({"request_id": stop.request_id, "choice": stop.choice_index})


def parse_stop_choice(data: bytes) -> StopChoice:
    """Return what is in `data`, or raise ProtocolError."""
    value = parse_object(data)
    return StopChoice(
        request_id=typed(value, "request_id", str)[:MAX_REQUEST_ID_CHARS],
        choice_index=count_of(value, "choice", 0, MAX_TOKEN_ID),
    )


# ------------------------------------------------------------------ what is answered


def encode_line(line: GenerateLine) -> bytes:
    """Return the JSON of one line, without its end."""
    match line:
        case TokenEvent():
            return dump({"token": token_fields(line)})
        case Story(record=record):
            return dump({"story": _record_fields(record)})
        case Logits(data=data):
            return dump({"logits": base64.b64encode(data).decode()})
        case Alive():
            return b'{"alive":true}'
        case Refused():
            return dump(
                {
                    "error": {
                        "kind": line.kind,
                        "message": encodable(line.message),
                        "retry_after_s": line.retry_after_s,
                        "code": line.code,
                    }
                }
            )
        case Ended():
            return dump(
                {
                    "end": {
                        "record": _record_fields(line.record),
                        "outcome": line.outcome,
                        "hit_tokens": line.hit_tokens,
                    }
                }
            )


def parse_line(data: bytes, request: Request) -> GenerateLine:
    """Return what one line of the answer to `request` says, or raise ProtocolError."""
    value = parse_object(data)
    match list(value):
        case ["token"]:
            event = parse_token(value["token"], request.request_id)
            if event.choice_index >= request.num_choices:
                raise ProtocolError(f"a token of choice {event.choice_index}, which was not wanted")
            return event
        case ["story"]:
            return Story(record=_parse_record(typed(value, "story", dict), request))
        case ["logits"]:
            return Logits(binary_of(value, "logits"))
        case ["alive"]:
            return Alive()
        case ["error"]:
            return _parse_refused(typed(value, "error", dict))
        case ["end"]:
            end = typed(value, "end", dict)
            outcome = end.get("outcome")
            return Ended(
                record=_parse_record(typed(end, "record", dict), request),
                outcome=None if outcome is None else shown(typed(end, "outcome", str)),
                hit_tokens=count_of(end, "hit_tokens", 0, len(request.prompt_tokens)),
            )
        case _:
            raise ProtocolError("a line of an unknown kind")


def _parse_refused(value: dict[str, Any]) -> Refused:
    kind = typed(value, "kind", str)
    if kind not in REFUSAL_KINDS:
        raise ProtocolError("field kind has an unknown value")
    code = value.get("code")
    return Refused(
        kind=cast("RefusalKind", kind),
        message=shown(typed(value, "message", str)),
        retry_after_s=number_of(value, "retry_after_s", 0),
        code=None if code is None else shown(typed(value, "code", str)),
    )


def _record_fields(record: RequestRecord) -> dict[str, object]:
    """Return what the node alone knows of a request."""
    return {
        "route": record.route,
        "reason": record.reason,
        "tokens_reused": record.tokens_reused,
        "tokens_local": record.tokens_local,
        "tokens_remote": record.tokens_remote,
        "bytes_received": record.bytes_received,
        "exact": record.exact,
        "peer": record.peer,
        "predicted_ttft_s": _finite(record.predicted_ttft_s),
        "ttft_s": _finite(record.ttft_s),
    }


def _parse_record(value: dict[str, Any], request: Request) -> RequestRecord:
    route = typed(value, "route", str)
    if route not in ROUTE_NAMES:
        raise ProtocolError("field route has an unknown value")
    return RequestRecord(
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_tokens),
        route=cast("RouteName", route),
        reason=shown(typed(value, "reason", str)),
        tokens_reused=count_of(value, "tokens_reused", 0, MAX_TOKEN_ID),
        tokens_local=count_of(value, "tokens_local", 0, MAX_TOKEN_ID),
        tokens_remote=count_of(value, "tokens_remote", 0, MAX_TOKEN_ID),
        bytes_received=count_of(value, "bytes_received", 0, MAX_COUNT),
        exact=typed(value, "exact", bool),
        peer=node_or_none(value, "peer"),
        predicted_ttft_s=seconds_or_none(value, "predicted_ttft_s"),
        ttft_s=seconds_or_none(value, "ttft_s"),
    )


# ------------------------------------------------------------------ fields


def node_of(value: dict[str, Any], name: str) -> str:
    """Return the field that names a node: printable, not empty, and short."""
    text = typed(value, name, str)
    if not (0 < len(text) <= MAX_NODE_CHARS and text.isprintable()):
        raise ProtocolError(f"field {name} names no node")
    return text


def node_or_none(value: dict[str, Any], name: str) -> str | None:
    """Return the field that names a node, None for null or where it is missing."""
    return None if value.get(name) is None else node_of(value, name)


def seconds_or_none(value: dict[str, Any], name: str) -> float | None:
    """Return a time that is not negative, None for null or where it is missing."""
    return None if value.get(name) is None else number_of(value, name, 0)


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _choice_of(item: object, num_choices: int) -> int:
    if type(item) is not int or not 0 <= item < num_choices:
        raise ProtocolError("field ended_choices has an item that is no choice")
    return item


def _drawn_tokens(value: dict[str, Any], request: Request) -> tuple[tuple[int, ...], ...]:
    """Return one tuple of tokens for each choice, or an empty one if nothing was drawn."""
    items = items_of(value, "drawn_tokens")
    if not items:
        return ()
    if len(items) != request.num_choices:
        raise ProtocolError(f"field drawn_tokens has {len(items)} items, not one for each choice")
    drawn = tuple(
        () if item == "" else tokens_of({"drawn_tokens": item}, "drawn_tokens") for item in items
    )
    if max(map(len, drawn)) > request.sampling.max_tokens:
        raise ProtocolError("field drawn_tokens has more tokens than were asked for")
    return drawn
