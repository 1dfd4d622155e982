"""The small client streams answers, keeps the conversation and explains refusals."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from prfaas.cli.conversation import parse_events
from prfaas.cli.main import main
from prfaas.errors import PrfaasError

USAGE = {
    "prompt_tokens": 9,
    "prfaas": {
        "route": "remote",
        "reason": "long",
        "tokens_reused": 1,
        "tokens_local": 0,
        "tokens_remote": 8,
        "ttft_s": 0.5,
    },
}


def sse(*events: dict[str, Any]) -> bytes:
    lines = [b": waiting\n\n"] + [
        b"data: " + json.dumps(event).encode() + b"\n\n" for event in events
    ]
    return b"".join(lines) + b"data: [DONE]\n\n"


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


@contextmanager
def node(
    *answers: tuple[int, bytes],
) -> Iterator[tuple[str, list[dict[str, Any]], list[str | None]]]:
    """Serve these answers in turn; yield the URL, the bodies received and the keys shown."""
    bodies: list[dict[str, Any]] = []
    keys: list[str | None] = []
    remaining = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            self.answer(200, b'{"data": [{"id": "tiny"}]}')

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            keys.append(self.headers["Authorization"])
            self.answer(*remaining.pop(0))

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies, keys
        finally:
            server.shutdown()
            thread.join()


def chat(url: str, lines: str, **environ: str | None):
    return CliRunner().invoke(
        main,
        ["chat", "--url", url, "--system", "Be brief."],
        input=lines,
        env={"PRFAAS_API_KEY": None} | environ,
    )


def test_a_conversation_grows_by_each_answer():
    first = (200, sse(delta("Pa"), delta("ris."), {"choices": [], "usage": USAGE}))
    second = (200, sse(delta("Rome."), {"choices": [], "usage": USAGE}))
    with node(first, second) as (url, bodies, keys):
        result = chat(url, "France?\nItaly?\n")
    assert result.exit_code == 0
    assert "Paris.\n" in result.stdout
    assert "remote: long; 9 prompt tokens: 1 reused, 0 computed here, 8 remotely" in result.stderr
    assert keys == [None, None, None]
    assert {body["model"] for body in bodies} == {"tiny"}
    assert [message["content"] for message in bodies[1]["messages"]] == [
        "Be brief.",
        "France?",
        "Paris.",
        "Italy?",
    ]


def test_the_key_of_the_environment_is_shown_to_the_node():
    with node((200, sse(delta("x"), {"choices": [], "usage": USAGE}))) as (url, _, keys):
        chat(url, "q\n", PRFAAS_API_KEY="sesame")
    assert keys == ["Bearer sesame", "Bearer sesame"]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "too long"}}', "too long"),
        (502, b"<html>", "Bad Gateway"),
        (200, sse({"error": {"message": "engine died"}}), "engine died"),
        (
            200,
            sse(delta("half")).removesuffix(b"data: [DONE]\n\n"),
            "before the answer was complete",
        ),
    ],
)
def test_a_refusal_or_a_cut_is_one_line(status, body, message):
    with node((status, body)) as (url, _, _):
        result = chat(url, "q\n")
    assert result.exit_code == 1
    assert message in result.stderr.splitlines()[-1]


def test_a_node_that_is_not_there_is_one_line():
    with node() as (url, _, _):
        pass
    result = chat(url, "q\n")
    assert result.exit_code == 1
    assert f"cannot reach {url}" in result.stderr.splitlines()[-1]


def test_an_address_that_is_no_web_address_is_refused():
    assert chat("file:///etc/passwd", "q\n").exit_code == 2


def test_comments_and_other_fields_are_skipped():
    lines = [b": waiting\n", b"\n", b"event: x\n", b'data: {"a": 1}\n', b"\n", b"data: [DONE]\n"]
    assert list(parse_events(lines)) == [{"a": 1}]


def test_a_stream_without_its_end_is_an_error_after_its_events():
    events = parse_events([b'data: {"a": 1}\n'])
    assert next(events) == {"a": 1}
    with pytest.raises(PrfaasError):
        next(events)
