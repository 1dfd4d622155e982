import pytest

from prfaas.text.messages import calls_text, prepare_messages, tool_calls


def test_messages_are_copied_not_changed() -> None:
    message = {"role": "developer", "content": None, "name": "x"}
    assert prepare_messages([message], "") == [{"role": "system", "content": "", "name": "x"}]
    assert message == {"role": "developer", "content": None, "name": "x"}


@pytest.mark.parametrize("arguments", ["not json", "[1]", "3", "[" * 100_000, {"a": 1}, None])
def test_arguments_that_are_no_json_object_stay_as_they_are(arguments: object) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    assert tool_calls({"tool_calls": [call]}) == [call]


@pytest.mark.parametrize("calls", [None, [], "text", 3, ["text"]])
def test_what_is_no_list_of_calls_is_none(calls: object) -> None:
    assert tool_calls({"tool_calls": calls}) == []
    prepared = prepare_messages([{"role": "assistant", "content": "a", "tool_calls": calls}], "")
    assert prepared == [{"role": "assistant", "content": "a"}]


def test_calls_are_shown_one_a_line() -> None:
    calls = tool_calls(
        {
            "tool_calls": [
                {"function": {"name": "f", "arguments": '{"x": "ü"}'}},
                {"name": "bare", "arguments": {}},
            ]
        }
    )
    assert calls_text(calls) == (
        '{"name": "f", "arguments": {"x": "ü"}}\n{"name": "bare", "arguments": {}}'
    )


def test_calls_follow_the_content_where_the_template_has_no_place_for_them() -> None:
    message = {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    (shown,) = prepare_messages([message], "{{ message.content }}")
    assert shown["content"] == 'Let me see.\n{"name": "f", "arguments": {}}'
    (kept,) = prepare_messages([message], "{{ message.tool_calls }}")
    assert kept["content"] == "Let me see."
