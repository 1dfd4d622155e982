"""Chat messages and tools, checked; content parts of type text are concatenated."""

import json

from prfaas.errors import BadRequest
from prfaas.server.openai.fields import Fields, shown

Message = dict[str, object]

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_TOOLS = 128
MAX_NAME_CHARS = 256
MAX_DEPTH = 64
"""Of a tool's parameters and a call's arguments: indented, JSON grows with the square of its depth."""

_SPOKEN = {"role", "content", "name"}
_KNOWN = {
    "system": _SPOKEN,
    "developer": _SPOKEN,
    "user": _SPOKEN,
    "assistant": _SPOKEN | {"refusal", "tool_calls", "annotations"},
    "tool": _SPOKEN | {"tool_call_id"},
}
"""Role -> the fields its messages may have."""


def parse_messages(fields: Fields) -> list[Message]:
    """Return the messages, content always a string; a BadRequest names the message's index."""
    items = fields.items("messages", max_items=MAX_MESSAGES)
    if items is None:
        raise fields.wrong("messages", "is required")
    if not items:
        raise fields.wrong("messages", "must hold at least one message")
    return [_parse_message(item, index) for index, item in enumerate(items)]


def _parse_message(item: object, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(item, dict):
        raise BadRequest(f"{where}: must be an object, not {shown(item)}", param=where)
    fields = Fields(item, f"{where}.")
    role = fields.raw("role")
    if not isinstance(role, str) or role not in _KNOWN:
        raise fields.wrong("role", f"must be one of {', '.join(_KNOWN)}, not {shown(role)}")
    fields.refuse_unknown(_KNOWN[role])
    message: Message = {"role": role, "content": _content(fields, role)}
    name = fields.string("name", max_chars=MAX_NAME_CHARS)
    if name is not None:
        message["name"] = name
    if role == "assistant":
        calls = _tool_calls(fields)
        if calls:
            message["tool_calls"] = calls
    if role == "tool":
        call_id = fields.string("tool_call_id", max_chars=MAX_NAME_CHARS)
        if call_id is None:
            raise fields.wrong("tool_call_id", "is required in a message of role tool")
        message["tool_call_id"] = call_id
    return message


def _content(fields: Fields, role: str) -> str:
    content = fields.raw("content")
    if isinstance(content, str):
        return content
    if role == "assistant" and (content is None or content == []):
        refusal = fields.raw("refusal")
        return refusal if isinstance(refusal, str) else ""
    if content is None:
        raise fields.wrong("content", "is required")
    if not isinstance(content, list):
        raise fields.wrong("content", f"must be text or a list of parts, not {shown(content)}")
    if not content:
        raise fields.wrong("content", "must hold at least one part")
    parts = fields.items("content", max_items=MAX_PARTS) or []
    return "".join(_part(fields, role, part, index) for index, part in enumerate(parts))


def _part(fields: Fields, role: str, part: object, index: int) -> str:
    name = f"content[{index}]"
    if not isinstance(part, dict):
        raise fields.wrong(name, f"must be an object, not {shown(part)}")
    kind = part.get("type")
    if kind == "text" or (kind == "refusal" and role == "assistant"):
        text = part.get(kind)
        if not isinstance(text, str):
            raise fields.wrong(f"{name}.{kind}", f"must be a string, not {shown(text)}")
        return text
    if isinstance(kind, str) and kind in {"image_url", "input_audio", "file"}:
        raise fields.wrong(f"{name}.type", f"{kind} is not supported: the model reads text only")
    raise fields.wrong(f"{name}.type", f"must be text, not {shown(kind)}")


def _tool_calls(fields: Fields) -> list[Message]:
    calls = fields.items("tool_calls", max_items=MAX_TOOLS) or []
    return [_tool_call(fields, call, index) for index, call in enumerate(calls)]


def _tool_call(fields: Fields, call: object, index: int) -> Message:
    name = f"tool_calls[{index}]"
    if not isinstance(call, dict):
        raise fields.wrong(name, f"must be an object, not {shown(call)}")
    if call.get("type", "function") != "function":
        raise fields.wrong(f"{name}.type", f"must be function, not {shown(call.get('type'))}")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise fields.wrong(f"{name}.function", "must be an object with a name")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        raise fields.wrong(f"{name}.function.arguments", "must be a string of JSON")
    _check_arguments(fields, f"{name}.function.arguments", arguments)
    parsed: Message = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise fields.wrong(f"{name}.id", f"must be a string, not {shown(call_id)}")
    return parsed if call_id is None else {"id": call_id, **parsed}


def parse_tools(fields: Fields) -> list[Message] | None:
    """Return the tools that the template shall show, None for none.

    The model's answer is not searched for calls: it stays text. So a choice that would have to be
    enforced is refused.
    """
    items = fields.items("tools", max_items=MAX_TOOLS)
    choice = fields.raw("tool_choice")
    if choice is not None and choice not in ("none", "auto"):
        raise fields.wrong(
            "tool_choice", f"only none and auto can be honoured here, not {shown(choice)}"
        )
    if not items:
        return None
    tools = [_tool(fields, item, index) for index, item in enumerate(items)]
    return None if choice == "none" else tools


def _tool(fields: Fields, item: object, index: int) -> Message:
    name = f"tools[{index}]"
    if not isinstance(item, dict) or item.get("type") != "function":
        raise fields.wrong(name, "must be an object of type function")
    function = item.get("function")
    if not isinstance(function, dict):
        raise fields.wrong(f"{name}.function", "must be an object")
    inner = Fields(function, f"{fields.param(name)}.function.")
    inner.refuse_unknown({"name", "description", "parameters", "strict"})
    if inner.string("name", max_chars=MAX_NAME_CHARS) is None:
        raise inner.wrong("name", "is required")
    if inner.boolean("strict"):
        raise inner.wrong("strict", "cannot be honoured: answers are not constrained")
    _check_depth(inner, "parameters", inner.mapping("parameters"))
    description = inner.raw("description")
    if description is not None and not isinstance(description, str):
        raise inner.wrong("description", f"must be a string, not {shown(description)}")
    return {"type": "function", "function": {**function}}


def _check_arguments(fields: Fields, name: str, arguments: str) -> None:
    """Raise BadRequest if a template that reads the arguments would find them nested too deeply.

    Whatever else they are, the model is shown them as they are.
    """
    try:
        value = json.loads(arguments)
    except ValueError:
        return
    except RecursionError:
        raise fields.wrong(name, f"is nested too deeply, the limit is {MAX_DEPTH}") from None
    _check_depth(fields, name, value)


def _check_depth(fields: Fields, name: str, value: object) -> None:
    """Raise BadRequest if lists and objects lie in each other more than MAX_DEPTH deep."""
    depth, layer = 0, [value]
    while layer := [item for item in layer if isinstance(item, dict | list)]:
        depth += 1
        layer = [
            inner for item in layer for inner in (item.values() if isinstance(item, dict) else item)
        ]
    if depth > MAX_DEPTH:
        raise fields.wrong(name, f"is nested {depth} deep, the limit is {MAX_DEPTH}")
