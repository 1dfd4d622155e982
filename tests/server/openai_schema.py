"""OpenAI's own schemas, as validators; `openai_schema.json` is cut from their OpenAPI document."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

DOCUMENT = json.loads(Path(__file__).with_suffix(".json").read_text())
SCHEMAS = DOCUMENT["components"]["schemas"]


def _modern(schema: Any) -> Any:
    """The document is OpenAPI 3.1, with leftovers of 3.0's `nullable`."""
    if isinstance(schema, list):
        return [_modern(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    fixed = {key: _modern(value) for key, value in schema.items() if key != "nullable"}
    if schema.get("nullable") is True:
        return {"anyOf": [fixed, {"type": "null"}]}
    return fixed


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """The validator of one schema by its name."""
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": {"schemas": _modern(SCHEMAS)}}
    )


def check(name: str, body: Any) -> None:
    """Fail unless `body` is valid."""
    validator(name).validate(body)


def check_stream(endpoint: str, events: list[Any]) -> None:
    """Fail unless each event is valid; the document has no finish_reason null for completions."""
    for event in events:
        if endpoint == "chat":
            check("CreateChatCompletionStreamResponse", _without_null_usage(event))
        else:
            whole = _without_null_usage(event)
            whole["choices"] = [
                {**choice, "finish_reason": choice["finish_reason"] or "stop"}
                for choice in whole["choices"]
            ]
            check("CreateCompletionResponse", whole)


def _without_null_usage(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if (key, value) != ("usage", None)}
