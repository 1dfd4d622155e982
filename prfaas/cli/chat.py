"""`prfaas chat`: a conversation with a running node, answer by answer."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

import click

from prfaas.errors import PrfaasError

Message = dict[str, str]

TIMEOUT_S = 600.0
"""Of one silent wait: a long prompt may be prefilled for minutes."""


@click.command(short_help="Talk to a running node.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="A pd node.")
@click.option("--system", metavar="TEXT", help="A system message that opens the conversation.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.7, show_default=True)
def chat(url: str, system: str | None, max_tokens: int, temperature: float) -> None:
    """Talk to a running node; an empty line or Ctrl-D ends it.

    Below each answer stands where its prompt was prefilled. PRFAAS_API_KEY is sent if it is set.
    """
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} is no http:// or https:// address", param_hint="--url")
    conversation: list[Message] = [{"role": "system", "content": system}] if system else []
    while line := _read_line():
        conversation.append({"role": "user", "content": line})
        settings = {"max_tokens": max_tokens, "temperature": temperature}
        answer, story = _answer(url, {"messages": conversation, **settings})
        conversation.append({"role": "assistant", "content": answer})
        click.secho(story, dim=True, err=True)


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        click.echo(err=True)
        return ""


def _answer(url: str, body: dict[str, Any]) -> tuple[str, str]:
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


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("PRFAAS_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(  # noqa: S310 - the scheme is checked where --url is read
        f"{url.rstrip('/')}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            yield from parse_events(answer)
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
