"""A request and its tokens as fields of JSON: what every message that carries them has in common."""

import base64
import math
from typing import Any, cast

from prfaas.errors import ProtocolError
from prfaas.transport.fields import (
    MAX_LIST_ITEMS,
    MAX_TOKEN_ID,
    binary_of,
    count_of,
    encode_tokens,
    items_of,
    log_number_of,
    number_of,
    or_null,
    pair_of,
    token_id_of,
    tokens_of,
    typed,
)
from prfaas.types import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs

MAX_CHOICES = 128
MAX_REQUEST_ID_CHARS = 128


def request_fields(request: Request) -> dict[str, object]:
    """Return the fields that `parse_request` reads; when the request arrived stays here."""
    return {
        "request_id": request.request_id,
        "prompt_tokens": encode_tokens(request.prompt_tokens),
        "num_choices": request.num_choices,
        "cache_salt": base64.b64encode(request.cache_salt).decode(),
        "sampling": _encode_sampling(request.sampling),
    }


def parse_request(value: dict[str, Any]) -> Request:
    """Return the request in a message's fields, or raise ProtocolError naming the field at fault."""
    return Request(
        request_id=typed(value, "request_id", str)[:MAX_REQUEST_ID_CHARS],
        prompt_tokens=tokens_of(value, "prompt_tokens"),
        sampling=_parse_sampling(typed(value, "sampling", dict)),
        num_choices=count_of(value, "num_choices", 1, MAX_CHOICES),
        cache_salt=binary_of(value, "cache_salt"),
    )


def token_fields(event: TokenEvent) -> dict[str, object]:
    """Return the fields that `parse_token` reads."""
    logprobs = event.logprobs
    return {
        "choice": event.choice_index,
        "id": event.token_id,
        "finish_reason": event.finish_reason,
        "logprobs": None
        if logprobs is None
        else {
            "logprob": or_null(logprobs.logprob),
            "top": [(token, or_null(p)) for token, p in logprobs.top],
        },
    }


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
        "logit_bias": [(token, or_null(bias)) for token, bias in sampling.logit_bias],
        "num_logprobs": sampling.num_logprobs,
        "stop_token_ids": sampling.stop_token_ids,
    }


def _parse_sampling(value: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_tokens=count_of(value, "max_tokens", 1, MAX_TOKEN_ID),
        seed=count_of(value, "seed", 0, (1 << 64) - 1),
        temperature=number_of(value, "temperature", 0),
        top_p=number_of(value, "top_p", 0, 1),
        top_k=None if value.get("top_k") is None else count_of(value, "top_k", 1, MAX_TOKEN_ID),
        min_p=number_of(value, "min_p", 0, 1),
        presence_penalty=number_of(value, "presence_penalty", -math.inf),
        frequency_penalty=number_of(value, "frequency_penalty", -math.inf),
        repetition_penalty=number_of(value, "repetition_penalty", 0),
        logit_bias=tuple(pair_of(item, "logit_bias") for item in items_of(value, "logit_bias")),
        num_logprobs=None
        if value.get("num_logprobs") is None
        else count_of(value, "num_logprobs", 0, MAX_LIST_ITEMS),
        stop_token_ids=tuple(
            token_id_of(item, "stop_token_ids") for item in items_of(value, "stop_token_ids")
        ),
    )


def parse_token(item: object, request_id: str) -> TokenEvent:
    """Return the drawn token in an item of a list, or raise ProtocolError."""
    if not isinstance(item, dict):
        raise ProtocolError("field tokens has an item that is no object")
    finish_reason = item.get("finish_reason")
    if finish_reason not in (None, "stop", "length"):
        raise ProtocolError("field finish_reason has an unknown value")
    return TokenEvent(
        request_id=request_id,
        choice_index=count_of(item, "choice", 0, MAX_CHOICES),
        token_id=count_of(item, "id", 0, MAX_TOKEN_ID),
        logprobs=_parse_logprobs(item.get("logprobs")),
        finish_reason=cast("FinishReason | None", finish_reason),
    )


def _parse_logprobs(value: object) -> TokenLogprobs | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ProtocolError("field logprobs is no object")
    return TokenLogprobs(
        logprob=log_number_of(value.get("logprob"), "logprob"),
        top=tuple(pair_of(item, "top") for item in items_of(value, "top")),
    )
