import json
from typing import Any

import pytest

from prfaas.errors import BadRequest
from prfaas.server.openai.fields import Fields
from prfaas.server.openai.messages import parse_messages, parse_tools

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def messages(*items: object) -> list[dict[str, object]]:
    return parse_messages(Fields({"messages": list(items)}))


@pytest.mark.parametrize(
    "roles",
    [
        ["system", "user"],
        ["user", "system"],
        ["system", "system", "user"],
        ["developer", "user"],
        ["user", "user"],
        ["assistant", "user"],
    ],
)
def test_any_order_of_roles_is_passed_on(roles):
    items = [{"role": role, "content": role} for role in roles]
    assert messages(*items) == items


@pytest.mark.parametrize("role", ["ADMIN", "", None, 5, ["user"], "function"])
def test_another_role_is_refused_with_the_index(role):
    with pytest.raises(BadRequest, match=r"messages\[1\].role: must be one of") as error:
        messages(USER, {"role": role, "content": "x"})
    assert error.value.param == "messages[1].role"


@pytest.mark.parametrize("item", [None, "Hi", 5, [USER]])
def test_a_message_is_an_object(item):
    with pytest.raises(BadRequest, match=r"messages\[0\]: must be an object"):
        messages(item)


@pytest.mark.parametrize("value", [None, [], "Hi", {}])
def test_messages_are_a_list_of_some(value):
    with pytest.raises(BadRequest, match="messages"):
        parse_messages(Fields({"messages": value}))


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant", "tool"])
def test_text_parts_are_joined_in_every_role(role):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    (message,) = messages({"role": role, "content": parts, "tool_call_id": "c"} if role == "tool"
                          else {"role": role, "content": parts})  # fmt: skip
    assert message["content"] == "one two"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (None, "content"),
        ([], "content"),
        (5, "content"),
        ({}, "content"),
        ([{"type": "text"}], "content[0].text"),
        ([{"type": "text", "text": 5}], "content[0].text"),
        ([{"type": "text", "text": "a"}, "b"], "content[1]"),
        ([{"type": "video"}], "content[0].type"),
        ([{}], "content[0].type"),
        ([{"type": ["text"]}], "content[0].type"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "content[0].type"),
        ([{"type": "input_audio"}], "content[0].type"),
        ([{"type": "file"}], "content[0].type"),
    ],
)
def test_other_content_is_refused_by_its_place(content, param):
    with pytest.raises(BadRequest) as error:
        messages({"role": "user", "content": content})
    assert error.value.param == f"messages[0].{param}"


@pytest.mark.parametrize("content", [None, "", [], "absent"])
def test_an_assistant_turn_may_be_without_content(content):
    item = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    if content == "absent":
        del item["content"]
    (message,) = messages(item)
    assert message == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_a_refusal_is_what_the_assistant_said():
    assert messages({"role": "assistant", "content": None, "refusal": "No."})[0]["content"] == "No."
    part = {"type": "refusal", "refusal": "No."}
    assert messages({"role": "assistant", "content": [part]})[0]["content"] == "No."


@pytest.mark.parametrize(
    "call",
    [
        "f",
        {"type": "custom", "custom": {"name": "f", "input": ""}},
        {"type": "function"},
        {"type": "function", "function": {"name": 5, "arguments": "{}"}},
        {"type": "function", "function": {"name": "f", "arguments": {}}},
        {**CALL, "id": 5},
    ],
)
def test_a_tool_call_that_is_none_is_refused_by_its_place(call):
    with pytest.raises(BadRequest) as error:
        messages({"role": "assistant", "tool_calls": [CALL, call]})
    assert str(error.value.param).startswith("messages[0].tool_calls[1]")


def test_a_tool_message_names_its_call():
    with pytest.raises(BadRequest, match="tool_call_id: is required"):
        messages({"role": "tool", "content": "42"})


@pytest.mark.parametrize("name", ["reasoning_content", "audio", "function_call", "weight"])
def test_an_unknown_field_of_a_message_is_refused(name):
    with pytest.raises(BadRequest, match="unrecognised field") as error:
        messages({**USER, name: "x"})
    assert error.value.param == f"messages[0].{name}"
    assert messages({**USER, name: None}) == [USER]


def test_tools_are_passed_on_unless_none_is_chosen():
    assert parse_tools(Fields({"tools": [TOOL]})) == [TOOL]
    assert parse_tools(Fields({"tools": [TOOL], "tool_choice": "auto"})) == [TOOL]
    assert parse_tools(Fields({"tools": [TOOL], "tool_choice": "none"})) is None
    assert parse_tools(Fields({"tools": []})) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": ["f"]},
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"description": "x"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]},
        {"tools": [TOOL] * 129},
    ],
)
def test_tools_that_cannot_be_honoured_are_refused(fields):
    with pytest.raises(BadRequest, match="tool"):
        parse_tools(Fields(fields))


def nested(depth: int, kind: type) -> Any:
    """Lists or objects that lie in each other so deep."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize(("depth", "is_refused"), [(64, False), (65, True), (900, True)])
def test_tools_and_calls_are_nested_to_a_limit(depth, is_refused, kind):
    wide: dict[str, object] = {"b": [], "a": nested(depth - 1, kind), "c": 1}
    tool = {"type": "function", "function": {"name": "f", "parameters": wide}}
    call = {**CALL, "function": {"name": "f", "arguments": json.dumps(wide)}}
    said = {"role": "assistant", "tool_calls": [CALL, call]}
    if not is_refused:
        assert parse_tools(Fields({"tools": [tool]})) == [tool]
        assert messages(said)[0]["tool_calls"] == [CALL, call]
        return
    words = f"is nested {depth} deep, the limit is 64"
    with pytest.raises(BadRequest, match=words) as error:
        parse_tools(Fields({"tools": [TOOL, tool]}))
    assert error.value.param == "tools[1].function.parameters"
    with pytest.raises(BadRequest, match=words) as error:
        messages(said)
    assert error.value.param == "messages[0].tool_calls[1].function.arguments"


@pytest.mark.parametrize("arguments", ["", "f(", "[" * 63, "1" * 5000, "NaN"])
def test_arguments_that_are_no_json_are_shown_as_they_are(arguments):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    assert messages({"role": "assistant", "tool_calls": [call]})[0]["tool_calls"] == [call]


def test_arguments_deeper_than_a_parser_goes_are_refused():
    call = {**CALL, "function": {"name": "f", "arguments": "[" * 100_000 + "]" * 100_000}}
    with pytest.raises(BadRequest, match="nested too deeply, the limit is 64"):
        messages({"role": "assistant", "tool_calls": [call]})
