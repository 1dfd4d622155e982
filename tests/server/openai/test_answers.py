import json

import pytest

from prfaas.server.openai.answers import (
    Piece,
    error_body,
    finite_logprob,
    to_json,
    token_text,
    usage_body,
)
from prfaas.types import RequestRecord
from tests.server.openai_schema import check


@pytest.mark.parametrize(
    ("logprob", "shown"),
    [(-1.5, -1.5), (float("-inf"), -9999), (float("nan"), -9999), (-1e9, -9999), (0.0, 0.0)],
)
def test_logprobs_are_numbers_that_json_has(logprob, shown):
    assert finite_logprob(logprob) == shown


def test_bytes_that_are_no_text_are_shown_as_openai_does():
    assert token_text("é".encode()) == "é"
    assert token_text("é".encode()[:1]) == "bytes:\\xc3"


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 415, 500, 503])
def test_every_error_has_all_four_keys(status):
    body = error_body("m\ud800", status=status)
    check("ErrorResponse", body)
    error = body["error"]
    assert isinstance(error, dict)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == "m?"


def test_a_client_that_is_given_a_number_that_json_lacks_sees_null(our_json_is_checked):
    our_json_is_checked.undo()
    assert to_json({"x": float("nan"), "y": [float("-inf")]}) == b'{"x":null,"y":[null]}'


def test_usage_adds_up_over_prompts_and_survives_odd_times():
    records = [
        RequestRecord(request_id="a", prompt_tokens=3, tokens_reused=1, ttft_s=float("inf")),
        RequestRecord(request_id="b", prompt_tokens=4, tokens_reused=2),
    ]
    usage = usage_body(records, 5)
    check("CompletionUsage", usage)
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (7, 12)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert json.loads(to_json(usage))["prfaas"]["requests"][0]["ttft_s"] is None


def test_a_piece_without_anything_is_nothing():
    assert not Piece(text="")
    assert Piece(text="a")
    assert Piece(text="", finish_reason="stop")
    assert Piece.joined([]) == Piece(text="")
    joined = Piece.joined([Piece(text="a"), Piece(text="b", finish_reason="length")])
    assert joined == Piece(text="ab", finish_reason="length")
