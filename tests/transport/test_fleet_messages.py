"""A scheduler's question and a node's lines round-trip; anything else is a ProtocolError."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import BadRequest, EngineError, Overloaded, ProtocolError, TransferError
from prfaas.transport.fleet_messages import (
    Alive,
    Ended,
    GenerateRequest,
    Logits,
    Refused,
    StopChoice,
    Story,
    encode_generate_request,
    encode_line,
    encode_stop_choice,
    parse_generate_request,
    parse_line,
    parse_stop_choice,
    refused,
)
from prfaas.types import RequestRecord, TokenEvent, TokenLogprobs
from tests.transport.samples import ASKED, IDENTITY

REQUEST = replace(ASKED.request, num_choices=2, arrival_s=0.0)
RECORD = RequestRecord(
    request_id=REQUEST.request_id,
    prompt_tokens=len(REQUEST.prompt_tokens),
    route="remote",
    reason="long",
    tokens_reused=1,
    tokens_local=2,
    tokens_remote=3,
    bytes_received=1 << 40,
    exact=False,
    peer="10.0.0.1:8100",
    predicted_ttft_s=0.25,
    ttft_s=0.5,
)
GENERATE = GenerateRequest(
    identity=IDENTITY,
    request=REQUEST,
    drawn_tokens=((5, 6), ()),
    ended_choices=(1,),
    prefill_at="10.0.0.1:8100",
    reason="long",
    predicted_ttft_s=0.25,
    prefix_from="10.0.0.2:8000",
    prefix_tokens=1,
    return_logits=True,
)

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple)
nodes = st.none() | st.text("abc.:[]019", min_size=1, max_size=20)
seconds = st.none() | st.floats(0, 1e9)
asked = st.builds(
    GenerateRequest,
    identity=st.just(IDENTITY),
    request=st.just(REQUEST),
    drawn_tokens=st.just(()) | st.tuples(tokens, tokens),
    ended_choices=st.sets(st.integers(0, 1)).map(lambda choices: tuple(sorted(choices))),
    prefill_at=nodes,
    reason=st.text("abc _", max_size=20),
    predicted_ttft_s=seconds,
    prefix_from=nodes,
    prefix_tokens=st.integers(0, len(REQUEST.prompt_tokens)),
    return_logits=st.booleans(),
)


@given(asked=asked)
def test_a_question_round_trips(asked):
    assert parse_generate_request(encode_generate_request(asked)) == asked


@pytest.mark.parametrize(
    "line",
    [
        Story(record=RECORD),
        TokenEvent(request_id=REQUEST.request_id, choice_index=1, token_id=9),
        TokenEvent(
            request_id=REQUEST.request_id,
            choice_index=0,
            token_id=2**31 - 1,
            logprobs=TokenLogprobs(logprob=-0.1, top=((1, -0.1), (2, -math.inf))),
            finish_reason="stop",
        ),
        Logits(b"\x00\x00\x80\x7f" * 3),
        Alive(),
        Refused(kind="bad_request", message="too long", code="context_length_exceeded"),
        Refused(kind="overloaded", message="full", retry_after_s=2.5),
        Refused(kind="engine_error", message="the request was aborted"),
        Ended(record=RECORD, outcome="transfer_failed", hit_tokens=1),
        Ended(record=replace(RECORD, peer=None, ttft_s=None), outcome=None),
    ],
    ids=lambda line: type(line).__name__,
)
def test_a_line_round_trips(line):
    data = encode_line(line)
    assert b"\n" not in data
    assert parse_line(data, REQUEST) == line


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("too long", code="context_length_exceeded"),
        Overloaded("full", retry_after_s=3.0),
        EngineError("crashed"),
    ],
)
def test_an_error_arrives_as_what_it_was(error):
    told = parse_line(encode_line(refused(error)), REQUEST)
    assert isinstance(told, Refused)
    heard = told.as_error()
    assert (type(heard), str(heard)) == (type(error), str(error))
    assert getattr(heard, "retry_after_s", None) == getattr(error, "retry_after_s", None)
    assert getattr(heard, "code", None) == getattr(error, "code", None)


def test_a_failed_transfer_is_the_nodes_own_failure():
    assert refused(TransferError("link")).kind == "engine_error"


def _changed(data: bytes, *path: str, to: Any) -> bytes:
    value = json.loads(data)
    inner = value
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = to
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("field", "to"),
    [
        ("identity", None), ("prompt_tokens", ""), ("prompt_tokens", "AAA="), ("drawn_tokens", ["AAAAAA=="]),
        ("drawn_tokens", ["AAAAAA=="] * 3), ("drawn_tokens", ["A" * 4000 + "=="] * 2), ("drawn_tokens", [5, 6]),
        ("drawn_tokens", None), ("ended_choices", [2]), ("ended_choices", [True]), ("ended_choices", [-1]),
        ("prefill_at", ""), ("prefill_at", "x" * 257), ("prefill_at", "a\nb"), ("prefill_at", 5),
        ("reason", None), ("predicted_ttft_s", -1), ("predicted_ttft_s", "1"), ("prefix_from", [1]),
        ("prefix_tokens", -1), ("prefix_tokens", 10**6), ("return_logits", 1), ("num_choices", 0),
    ],
)  # fmt: skip
def test_a_damaged_question_is_refused(field, to):
    with pytest.raises(ProtocolError):
        parse_generate_request(_changed(encode_generate_request(GENERATE), field, to=to))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b'{"token":5}', b'{"alive":true,"token":{}}', b'{"unknown":{}}', b'{"story":[]}',
        b'{"logits":"?"}', b'{"error":{"kind":"other","message":"","retry_after_s":1}}',
        b'{"token":{"choice":2,"id":1,"finish_reason":null,"logprobs":null}}',
        b'{"token":{"choice":0,"id":-1,"finish_reason":null,"logprobs":null}}',
    ],
)  # fmt: skip
def test_a_damaged_line_is_refused(data):
    with pytest.raises(ProtocolError):
        parse_line(data, REQUEST)


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("end", "record", "route"), "elsewhere"), (("end", "record", "tokens_local"), -1),
        (("end", "record", "exact"), 1), (("end", "record", "peer"), ""), (("end", "record", "ttft_s"), -1),
        (("end", "outcome"), 5), (("end", "hit_tokens"), -1), (("end", "record"), None), (("end",), []),
    ],
)  # fmt: skip
def test_a_damaged_end_is_refused(path, to):
    data = encode_line(Ended(record=RECORD, outcome="completed", hit_tokens=1))
    with pytest.raises(ProtocolError):
        parse_line(_changed(data, *path, to=to), REQUEST)


def test_what_a_node_says_of_itself_is_shown_on_one_line():
    data = encode_line(Refused(kind="engine_error", message="a\nb" + "x" * 5000))
    told = parse_line(data, REQUEST)
    assert isinstance(told, Refused)
    assert "\n" not in told.message
    assert len(told.message) <= 512


def test_a_stopped_choice_round_trips():
    stop = StopChoice(request_id="r", choice_index=3)
    assert parse_stop_choice(encode_stop_choice(stop)) == stop
    with pytest.raises(ProtocolError):
        parse_stop_choice(b'{"request_id":"r","choice":-1}')
