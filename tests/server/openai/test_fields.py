import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import BadRequest
from prfaas.server.openai.fields import SHOWN_CHARS, Fields, shown


@pytest.mark.parametrize("value", [True, "1", 1.0, [1], {}])
def test_an_integer_is_no_other_number_and_no_boolean(value):
    with pytest.raises(BadRequest, match="x: must be an integer"):
        Fields({"x": value}).integer("x", low=0, high=9)


@pytest.mark.parametrize("value", [True, "1", [1], {}])
def test_a_number_is_no_boolean_and_no_text(value):
    with pytest.raises(BadRequest, match="x: must be a number"):
        Fields({"x": value}).number("x", low=0, high=9)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_number_is_finite(value):
    with pytest.raises(BadRequest, match="x: must be finite"):
        Fields({"x": value}).number("x", low=-1e400, high=1e400)


@given(st.integers(-20, 20))
def test_bounds_are_inclusive_and_named(value):
    fields = Fields({"x": value}, "body.")
    if -3 <= value <= 7:
        assert fields.integer("x", low=-3, high=7) == value
        assert fields.number("x", low=-3, high=7) == float(value)
    else:
        with pytest.raises(BadRequest, match=f"is {value}, must be from -3 to 7") as error:
            fields.integer("x", low=-3, high=7)
        assert error.value.param == "body.x"
        with pytest.raises(BadRequest, match=f"is {value}, must be from -3 to 7"):
            fields.number("x", low=-3, high=7)


def test_null_and_absent_are_unset():
    for fields in (Fields({}), Fields({"x": None})):
        assert fields.boolean("x") is False
        assert fields.string("x", max_chars=1) is None
        assert fields.integer("x", low=0, high=1) is None
        assert fields.number("x", low=0, high=1) is None
        assert fields.items("x", max_items=1) is None
        assert fields.mapping("x") is None
        fields.refuse({"x": "no"})
        fields.refuse_unknown([])


def test_what_is_refused_says_why_and_what_is_unknown_is_named():
    with pytest.raises(BadRequest, match="x: not here"):
        Fields({"x": 0}).refuse({"x": "not here"})
    with pytest.raises(BadRequest, match="unrecognised field 'y'") as error:
        Fields({"x": 1, "y": 0}).refuse_unknown({"x"})
    assert error.value.param == "y"


@given(st.recursive(st.text() | st.integers() | st.floats(), st.lists, max_leaves=20))
def test_a_shown_value_is_short_and_printable(value):
    text = shown(value)
    assert text.isprintable()
    assert len(text) <= SHOWN_CHARS + 3


def test_megabytes_are_shown_in_no_time_and_space():
    assert len(shown("x" * 10_000_000)) <= SHOWN_CHARS + 3
    assert len(shown([["x" * 1_000_000] * 100] * 100)) <= SHOWN_CHARS + 3
    assert len(shown(10**4000)) <= SHOWN_CHARS + 3
