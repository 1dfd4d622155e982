"""What is encoded is what is parsed; anything else is a ProtocolError that names the field."""

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.transport.fields import parse_object
from prfaas.transport.messages import (
    FirstTokens,
    PeerStatus,
    PrefillTimes,
    TransferAccepted,
    TransferRequest,
    TransferTotals,
    encode_accepted,
    encode_first_tokens,
    encode_status,
    encode_totals,
    encode_transfer_request,
    parse_accepted,
    parse_first_tokens,
    parse_status,
    parse_totals,
    parse_transfer_request,
)
from prfaas.types import Request, SamplingParams, TokenEvent, TokenLogprobs
from tests.transport.samples import ASKED, IDENTITY

token_ids = st.integers(0, 2**31 - 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
fractions = st.floats(0, 1)
sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10**6),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0, 10),
    top_p=fractions,
    top_k=st.none() | st.integers(1, 10**5),
    min_p=fractions,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    repetition_penalty=st.floats(0, 10),
    logit_bias=st.lists(st.tuples(token_ids, numbers | st.just(-math.inf)), max_size=4).map(tuple),
    num_logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=st.lists(token_ids, max_size=4).map(tuple),
)
requests = st.builds(
    Request,
    request_id=st.text(max_size=40),
    prompt_tokens=st.lists(token_ids, min_size=1, max_size=40).map(tuple),
    sampling=sampling_params,
    num_choices=st.integers(1, 128),
    cache_salt=st.binary(max_size=40),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    request=requests,
    want_logits=st.booleans(),
    accept=st.booleans(),
    deadline_s=st.none() | st.floats(0, 1e9),
)
def test_a_transfer_request_round_trips(request, want_logits, accept, deadline_s):
    asked = TransferRequest(
        transfer_id=ASKED.transfer_id,
        identity=IDENTITY,
        accept_approximate=accept,
        request=request,
        have_tokens=len(request.prompt_tokens) - 1,
        want_logits=want_logits,
        capability=ASKED.capability,
        credit_bytes=ASKED.credit_bytes,
        deadline_s=deadline_s,
        cached_only=want_logits,
    )
    assert parse_transfer_request(encode_transfer_request(asked)) == asked


def _paths(value: dict[str, Any]) -> list[tuple[str, ...]]:
    paths = [(key,) for key in value if key != "sampling"]
    return paths + [("sampling", key) for key in value["sampling"]]


PATHS = _paths(json.loads(encode_transfer_request(ASKED)))


@given(path=st.sampled_from(PATHS), item=json_values)
def test_a_changed_field_is_accepted_as_such_or_refused(path, item):
    value = json.loads(encode_transfer_request(ASKED))
    target = value if len(path) == 1 else value["sampling"]
    target[path[-1]] = item
    try:
        parsed = parse_transfer_request(json.dumps(value).encode())
    except ProtocolError:
        return
    assert parse_transfer_request(encode_transfer_request(parsed)) == parsed


@pytest.mark.parametrize("path", PATHS)
def test_a_missing_field_is_refused_by_name_unless_absent_means_none(path):
    value = json.loads(encode_transfer_request(ASKED))
    del (value if len(path) == 1 else value["sampling"])[path[-1]]
    data = json.dumps(value).encode()
    if path[-1] in ("top_k", "num_logprobs", "deadline_s"):
        assert parse_transfer_request(data) == ASKED
        return
    with pytest.raises(ProtocolError, match=path[-1]):
        parse_transfer_request(data)


@given(data=st.binary(max_size=200) | json_values.map(lambda v: json.dumps(v).encode()))
def test_any_body_is_refused_or_an_object(data):
    with contextlib.suppress(ProtocolError):
        assert isinstance(parse_object(data), dict)
    for parse in (parse_transfer_request, parse_totals, parse_accepted, parse_status):
        with pytest.raises(ProtocolError):
            parse(data)


@pytest.mark.parametrize(
    "data",
    [b"[" * 200_000, b"9" * 5000, b'{"a":NaN}', b'{"a":Infinity}', b"\xff\xfe{"],
)
def test_json_that_breaks_parsers_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        parse_object(data)


def _events(logprobs: TokenLogprobs | None) -> list[TokenEvent]:
    return [
        TokenEvent(
            request_id="request",
            choice_index=index,
            token_id=5 + index,
            logprobs=logprobs,
            finish_reason="length" if index else None,
        )
        for index in range(2)
    ]


CHOICES = Request(
    request_id="request",
    prompt_tokens=(1, 2, 3),
    sampling=SamplingParams(max_tokens=1, seed=0),
    num_choices=2,
)


@given(
    logprobs=st.none()
    | st.builds(
        TokenLogprobs,
        logprob=st.floats(max_value=0, allow_nan=False),
        top=st.lists(st.tuples(token_ids, st.floats(max_value=0, allow_nan=False)), max_size=3).map(
            tuple
        ),
    )
)
def test_first_tokens_round_trip_to_the_bit(logprobs):
    first = _first(_events(logprobs))
    assert parse_first_tokens(encode_first_tokens(first), CHOICES) == first


def test_first_tokens_must_cover_every_choice_once_in_order():
    first, second = _events(None)
    for wrong in ([first], [second, first], [first, first], [first, second, second], []):
        with pytest.raises(ProtocolError, match="2 choices"):
            parse_first_tokens(encode_first_tokens(_first(wrong)), CHOICES)


def _first(events: list[TokenEvent], **times: Any) -> FirstTokens:
    known = {"begun_s": 0.25, "computed_s": 1.5, "num_tokens": 2, "num_engine_tokens": 7}
    return FirstTokens(events=tuple(events), times=PrefillTimes(**(known | times)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("begun_s", -0.1),
        ("begun_s", None),
        ("computed_s", 0.2),
        ("computed_s", "1"),
        ("computed_s", 10**400),
        ("num_tokens", 4),
        ("num_tokens", -1),
        ("num_tokens", 1.0),
        ("num_engine_tokens", 1),
    ],
)
def test_times_of_a_prefill_that_cannot_be_are_refused(field, value):
    said = json.loads(encode_first_tokens(_first(_events(None))))
    with pytest.raises(ProtocolError, match=field):
        parse_first_tokens(json.dumps(said | {field: value}).encode(), CHOICES)


def test_a_prompt_that_needed_no_computing_took_no_time():
    none = {"begun_s": 0, "computed_s": 0, "num_tokens": 0, "num_engine_tokens": 0}
    said = json.loads(encode_first_tokens(_first(_events(None)))) | none
    times = parse_first_tokens(json.dumps(said).encode(), CHOICES).times
    assert times == PrefillTimes(**none)


@pytest.mark.parametrize(
    "token",
    [
        5,
        {"choice": 0, "id": -1, "finish_reason": None, "logprobs": None},
        {"choice": 0, "id": 1.5, "finish_reason": None, "logprobs": None},
        {"choice": 0, "id": 1, "finish_reason": "bored", "logprobs": None},
        {"choice": 0, "id": 1, "finish_reason": None, "logprobs": 5},
        {"choice": 0, "id": 1, "finish_reason": None, "logprobs": {"logprob": "x", "top": []}},
        {"choice": 0, "id": 1, "finish_reason": None, "logprobs": {"logprob": -1, "top": [[1]]}},
        {"choice": 0, "id": 1, "finish_reason": None, "logprobs": {"logprob": -1, "top": [5]}},
    ],
)
def test_a_damaged_first_token_is_refused(token):
    with pytest.raises(ProtocolError):
        parse_first_tokens(json.dumps({"tokens": [token]}).encode(), CHOICES)


@pytest.mark.parametrize("limit", [None, 750_000.0])
def test_small_messages_round_trip(limit):
    totals = TransferTotals(num_pages=3, num_page_bytes=99, tokens_computed=7)
    assert parse_totals(encode_totals(totals)) == totals
    accepted = TransferAccepted(hit_tokens=64)
    assert parse_accepted(encode_accepted(accepted)) == accepted
    status = PeerStatus(
        identity=IDENTITY,
        is_ready=False,
        reason="draining",
        num_waiting_tokens=12,
        prefill_tokens_per_s=345.5,
        egress_limit_bytes_per_s=limit,
    )
    assert parse_status(encode_status(status)) == status
