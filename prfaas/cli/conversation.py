"""A conversation with a running node over its API, answer by answer."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from prfaas.errors import PrfaasError

TIMEOUT_S = 600.0
"""Of one silent wait: a long prompt may be prefilled for minutes."""


def print_answer(url: str, body: dict[str, Any]) -> tuple[str, str]:
    """Print the answer while it comes; return it and one line about its prefill."""
    parts: list[str] = []
    story = ""
    for event in _events(url, body | {"stream": True, "stream_options": {"include_usage": True}}):
        if "error" in event:
            raise PrfaasError(f"{url}: {event['error'].get('message')}")
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content") or ""
            click.echo(text, nl=False)
            parts.append(text)
        if event.get("usage"):
            story = describe(event["usage"])
    click.echo()
    return "".join(parts), story


def describe(usage: dict[str, Any]) -> str:
    """Return one line about how a prompt was prefilled."""
    story = usage["prfaas"]
    return (
        f"[{story['route']}: {story['reason']}; {usage['prompt_tokens']} prompt tokens:"
        f" {story['tokens_reused']} reused, {story['tokens_local']} computed here,"
        f" {story['tokens_remote']} remotely; first token after {story['ttft_s']:.2f} s]"
    )


def served_model(url: str, name: str | None = None) -> str:
    """Return the name of the model that the server answers to: `name`, or else its first.

    Raises:
        PrfaasError: there is no server, it refuses, or it has no model of that name.
    """
    with _opened(url, "/v1/models", None) as answer:
        names: list[str] = [model["id"] for model in json.load(answer)["data"]]
    if name is not None and name not in names:
        raise PrfaasError(f"--model: {url} has no {name!r}, but {', '.join(names)}")
    return name or names[0]


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with _opened(url, "/v1/chat/completions", json.dumps(body).encode()) as answer:
        yield from parse_events(answer)


@contextmanager
def _opened(url: str, path: str, body: bytes | None) -> Iterator[IO[bytes]]:
    """Open an answer of the node; its refusals and the network's raise PrfaasError."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("PRFAAS_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    # The scheme was checked where --url is read.
    request = urllib.request.Request(f"{url.rstrip('/')}{path}", body, headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            yield answer
    except urllib.error.HTTPError as error:
        with error:
            raise PrfaasError(f"{url}: {_refusal(error.read(), error.reason)}") from None
    except OSError as error:
        raise PrfaasError(f"cannot reach {url}: {getattr(error, 'reason', error)}") from error


def parse_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each server-sent event until `[DONE]`; comments are skipped.

    Raises:
        PrfaasError: the stream ended without `[DONE]`, so the answer is cut.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise PrfaasError("the node closed the stream before the answer was complete")


def _refusal(body: bytes, otherwise: str) -> str:
    """Return the message of an OpenAI error body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return otherwise
