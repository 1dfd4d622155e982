"""The JSON of the KV channel, checked field by field: what is asked for, and what goes with pages.

Nothing here trusts its input: a value of another type, a number out of range or a missing field is
a ProtocolError that names the field.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from prfaas.errors import ProtocolError
from prfaas.transport.fields import (
    MAX_TOKEN_ID,
    count_of,
    dump,
    items_of,
    name_of,
    number_of,
    optional_number_of,
    parse_object,
    shown,
    typed,
)
from prfaas.transport.handshake import Identity, parse_identity
from prfaas.transport.request_json import (
    parse_request,
    parse_token,
    request_fields,
    token_fields,
)
from prfaas.types import Request, TokenEvent

CodecName = Literal["raw", "zstd", "auto", "fp16", "int8", "fp8", "auto-lossy"]
"""auto: each page raw or zstd, as the link and the codec make it arrive sooner; auto-lossy: or int8."""
CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)

CAPABILITY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """What a pd node asks of another node: this prompt's KV, and its first token."""

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
    capability: str
    """Drawn by the asker; whoever attaches a stream must show it."""
    credit_bytes: int
    """Page bytes, as they are decoded, that the asker has reserved room for; no more may be sent."""
    snapshot_tokens: int = 0
    """Windows and states are wanted at its multiples, too, so that a broken transfer leaves a prefix."""
    deadline_s: float | None = None
    """From now on, after which the asker would rather have computed it itself; None is no haste."""
    cached_only: bool = False
    """Only what the sender has cached of the prompt beyond `have_tokens` is wanted: no first token, nothing that
    must be computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferAccepted:
    """The sender has reserved pages for all of it and queued the prompt."""

    hit_tokens: int
    """Prompt tokens that the sender does not need to compute; all that it sends if nothing else is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimes:
    """When the sender's engine worked on a prompt, in seconds since it took the transfer."""

    begun_s: float
    computed_s: float
    """Pages that come later have waited for the link alone."""
    num_tokens: int
    """That it computed of the prompt."""
    num_engine_tokens: int
    """That it computed meanwhile of all prompts from its peers, these included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """What the sender drew behind the prompt, one token for each choice in order."""

    events: tuple[TokenEvent, ...]
    times: PrefillTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTotals:
    """What the END frame says, to be compared with what came."""

    num_pages: int
    num_answers: int = 0
    """First tokens and logits."""
    num_page_bytes: int
    """As they crossed the link."""
    tokens_computed: int
    digest: int = 0
    """The sum, modulo 2**64, of the pages' tags: in any order, over any streams, the same."""
    epoch: int = 0
    """How many lost streams the asker had told of: pages that it lost with them count as never sent."""
    num_words: int = 1
    """ATTACH frames that had come over this stream: nothing follows unless another comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """A prefill node's answer to a handshake."""

    identity: Identity
    is_ready: bool
    reason: str
    num_waiting_tokens: int
    prefill_tokens_per_s: float
    egress_limit_bytes_per_s: float | None = None
    """What it sends at most, to all together; None is no limit."""


def encode_transfer_request(asked: TransferRequest) -> bytes:
    """Return the body of POST /kv/v1/transfers."""
    return dump(
        {
            "transfer_id": asked.transfer_id,
            "identity": asked.identity.to_json(),
            "accept_approximate": asked.accept_approximate,
            **request_fields(asked.request),
            "have_tokens": asked.have_tokens,
            "want_logits": asked.want_logits,
            "codec": asked.codec,
            "capability": asked.capability,
            "credit_bytes": asked.credit_bytes,
            "snapshot_tokens": asked.snapshot_tokens,
            "deadline_s": asked.deadline_s,
            "cached_only": asked.cached_only,
        }
    )


def parse_transfer_request(data: bytes) -> TransferRequest:
    """Return the request in `data`, or raise ProtocolError naming the field at fault."""
    value = parse_object(data)
    transfer_id = name_of(value, "transfer_id", 32)
    request = parse_request(value)
    return TransferRequest(
        transfer_id=transfer_id,
        identity=parse_identity(value.get("identity")),
        accept_approximate=typed(value, "accept_approximate", bool),
        request=request,
        have_tokens=count_of(value, "have_tokens", 0, len(request.prompt_tokens) - 1),
        want_logits=typed(value, "want_logits", bool),
        codec=codec_of(value),
        capability=capability_of(value),
        credit_bytes=count_of(value, "credit_bytes", 0, 1 << 62),
        snapshot_tokens=count_of(value, "snapshot_tokens", 0, MAX_TOKEN_ID),
        deadline_s=optional_number_of(value, "deadline_s"),
        cached_only=typed(value, "cached_only", bool),
    )


def capability_of(value: dict[str, Any]) -> str:
    """Return the field capability: as long as `draw_capability` makes it, so that it is not guessed."""
    return name_of(value, "capability", 2 * CAPABILITY_BYTES)


def codec_of(value: dict[str, Any]) -> CodecName:
    """Return the field codec."""
    asked = typed(value, "codec", str)
    for name in CODEC_NAMES:
        if name == asked:
            return name
    raise ProtocolError(f"field codec is not one of {', '.join(CODEC_NAMES)}")


def encode_first_tokens(first: FirstTokens) -> bytes:
    """Return the payload of FIRST_TOKENS."""
    return dump(
        {
            "tokens": [token_fields(event) for event in first.events],
            "begun_s": first.times.begun_s,
            "computed_s": first.times.computed_s,
            "num_tokens": first.times.num_tokens,
            "num_engine_tokens": first.times.num_engine_tokens,
        }
    )


def parse_first_tokens(data: bytes, request: Request) -> FirstTokens:
    """Return one event for each choice of `request`, in order, and the times, or raise ProtocolError."""
    value = parse_object(data)
    events = tuple(parse_token(item, request.request_id) for item in items_of(value, "tokens"))
    if [event.choice_index for event in events] != list(range(request.num_choices)):
        raise ProtocolError(f"first tokens do not cover {request.num_choices} choices in order")
    begun_s = number_of(value, "begun_s", 0)
    num_tokens = count_of(value, "num_tokens", 0, len(request.prompt_tokens))
    return FirstTokens(
        events=events,
        times=PrefillTimes(
            begun_s=begun_s,
            computed_s=number_of(value, "computed_s", begun_s),
            num_tokens=num_tokens,
            num_engine_tokens=count_of(value, "num_engine_tokens", num_tokens, 1 << 62),
        ),
    )


def encode_totals(totals: TransferTotals) -> bytes:
    """Return the payload of END."""
    return dump(
        {
            "num_pages": totals.num_pages,
            "num_answers": totals.num_answers,
            "num_page_bytes": totals.num_page_bytes,
            "tokens_computed": totals.tokens_computed,
            "digest": totals.digest,
            "epoch": totals.epoch,
            "num_words": totals.num_words,
        }
    )


def parse_totals(data: bytes) -> TransferTotals:
    """Return the totals in an END payload, or raise ProtocolError."""
    value = parse_object(data)
    limit = 1 << 62
    return TransferTotals(
        num_pages=count_of(value, "num_pages", 0, limit),
        num_answers=count_of(value, "num_answers", 0, limit),
        num_page_bytes=count_of(value, "num_page_bytes", 0, limit),
        tokens_computed=count_of(value, "tokens_computed", 0, limit),
        digest=count_of(value, "digest", 0, (1 << 64) - 1),
        epoch=count_of(value, "epoch", 0, MAX_TOKEN_ID),
        num_words=count_of(value, "num_words", 1, MAX_TOKEN_ID),
    )


def encode_accepted(accepted: TransferAccepted) -> bytes:
    """Return the answer to POST /kv/v1/transfers."""
    return dump({"hit_tokens": accepted.hit_tokens})


def parse_accepted(data: bytes) -> TransferAccepted:
    """Return the answer in `data`, or raise ProtocolError."""
    return TransferAccepted(hit_tokens=count_of(parse_object(data), "hit_tokens", 0, MAX_TOKEN_ID))


def encode_status(status: PeerStatus) -> bytes:
    """Return the answer to POST /kv/v1/handshake."""
    return dump(
        {
            "identity": status.identity.to_json(),
            "is_ready": status.is_ready,
            "reason": status.reason,
            "num_waiting_tokens": status.num_waiting_tokens,
            "prefill_tokens_per_s": status.prefill_tokens_per_s,
            "egress_limit_bytes_per_s": status.egress_limit_bytes_per_s,
        }
    )


def parse_status(data: bytes) -> PeerStatus:
    """Return the answer in `data`, or raise ProtocolError."""
    value = parse_object(data)
    return PeerStatus(
        identity=parse_identity(value.get("identity")),
        is_ready=typed(value, "is_ready", bool),
        reason=shown(typed(value, "reason", str)),
        num_waiting_tokens=count_of(value, "num_waiting_tokens", 0, 1 << 62),
        prefill_tokens_per_s=number_of(value, "prefill_tokens_per_s", 0),
        egress_limit_bytes_per_s=optional_number_of(value, "egress_limit_bytes_per_s"),
    )
