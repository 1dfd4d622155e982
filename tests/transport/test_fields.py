"""What a peer says in JSON is text that can be passed on."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.transport.fields import MAX_SHOWN_CHARS, dump, encodable, number_of, parse_object, shown

few = st.text(max_size=4)
plain = st.none() | st.integers() | few
nested = st.lists(plain, max_size=3) | st.dictionaries(few, plain, max_size=3)


@given(st.dictionaries(few, plain | nested, max_size=3))
def test_what_was_dumped_is_parsed(value):
    assert parse_object(dump(value)) == value


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": "\\ud800"}',
        b'{"a": [{"\\udfff": 1}]}',
        b'{"a": "\xed\xa0\x80"}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": NaN}',
        b'"a"',
        b"[" * 100_000,
    ],
)
def test_what_cannot_be_passed_on_is_refused(data):
    with pytest.raises(ProtocolError):
        parse_object(data)


@given(st.text(st.characters(), max_size=600))
def test_what_is_shown_is_one_short_line_of_its_own_characters(text):
    line = shown(text)
    assert len(line) == min(len(text), MAX_SHOWN_CHARS)
    assert line.isprintable()
    json.dumps(line, ensure_ascii=False).encode()
    assert all(ours in (theirs, "?") for ours, theirs in zip(line, text, strict=False))


def test_an_emoji_in_a_message_stays():
    assert shown("no 😀\r\nX-Evil: 1\ud800") == "no 😀??X-Evil: 1?"


def test_what_is_made_encodable_keeps_all_but_lone_surrogates():
    assert encodable("no 😀\r\nX: 1\ud800") == "no 😀\r\nX: 1?"
    assert parse_object(dump({"message": encodable("\udfff")})) == {"message": "?"}


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_lacks_is_none_to_who_reads_it(number, our_json_is_checked):
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump({"number": number})  # in tests
    our_json_is_checked.undo()
    with pytest.raises(ProtocolError, match="number is missing"):
        number_of(parse_object(dump({"number": number})), "number", 0)


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object()])
def test_what_json_has_no_kind_for_is_noticed_in_tests(value):
    with pytest.raises(TypeError):
        dump({"value": value})
