"""OpenAI's messages in the shape that checkpoints' templates expect."""

import json
from collections.abc import Mapping, Sequence

from prfaas.errors import BadRequest

Message = Mapping[str, object]


def prepare_messages(messages: Sequence[Message], template_source: str) -> list[dict[str, object]]:
    """Return copies whose content is a string and whose roles and tool calls the template can show.

    A developer message is a system message to a template that does not know the role. Arguments of tool
    calls are objects, as templates want them; a template without a place for tool calls gets them as
    JSON in the content, so that the turn is not lost.
    """
    knows_developer = "developer" in template_source
    knows_tool_calls = "tool_calls" in template_source
    prepared = []
    for index, message in enumerate(messages):
        copy: dict[str, object] = {**message, "content": content_text(message, index)}
        if copy.get("role") == "developer" and not knows_developer:
            copy["role"] = "system"
        calls = tool_calls(message)
        if calls and knows_tool_calls:
            copy["tool_calls"] = calls
        elif calls:
            copy["content"] = "\n".join(filter(None, [str(copy["content"]), calls_text(calls)]))
        else:
            copy.pop("tool_calls", None)
        prepared.append(copy)
    return prepared


def content_text(message: Message, index: int) -> str:
    """Return the text of a message: a string, the joined text parts, or "" for null.

    Raises:
        BadRequest: the content is something else; the message is named by `index`.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise BadRequest(
        f"messages[{index}].content is neither a text nor a list of text parts",
        param=f"messages[{index}].content",
    )


def tool_calls(message: Message) -> list[dict[str, object]]:
    """Return the message's tool calls, with arguments that are JSON objects parsed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return []
    return [_with_parsed_arguments(call) for call in calls if isinstance(call, Mapping)]


def calls_text(calls: Sequence[Message]) -> str:
    """Return one line of JSON a call: its name and arguments."""
    lines = []
    for call in calls:
        function = call.get("function")
        shown = function if isinstance(function, Mapping) else call
        fields = {key: shown[key] for key in ("name", "arguments") if key in shown}
        lines.append(json.dumps(fields, ensure_ascii=False))
    return "\n".join(lines)


def _with_parsed_arguments(call: Message) -> dict[str, object]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
    return {**call, "function": {**function, "arguments": arguments}}
