#!/usr/bin/env python
"""A client of a pd node, run by scripts/bench/overlap.py where that node can be reached.

Reads lines {"prompt": [token ids]} and answers each with when the first and the second token came,
in seconds from the request's first byte, and the node's own story of the request.
"""

import argparse
import http.client
import json
import sys
import time
from typing import Any

TIMEOUT_S = 600


def say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def get(host: str, port: int, path: str) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read().decode()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"GET {path}: {response.status} {body}")
        return body
    finally:
        connection.close()


def wait_ready(host: str, port: int) -> None:
    """Return once the node says that it is ready."""
    deadline_s = time.perf_counter() + TIMEOUT_S
    while time.perf_counter() < deadline_s:
        try:
            get(host, port, "/ready")
        except (OSError, RuntimeError):
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("the node is not ready")


def ask(host: str, port: int, prompt: list[int]) -> dict[str, Any]:
    """Stream two greedy tokens."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    data = json.dumps(body).encode()
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.connect()
        began_s = time.perf_counter()
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{response.status} {response.read().decode()}")
        times_s = []
        while (line := response.readline()).startswith(b"data:") or line == b"\n":
            if line.startswith(b"data: {"):
                times_s.append(time.perf_counter() - began_s)
        response.read()
        story = json.loads(get(host, port, f"/debug/requests/{response.headers['X-Request-Id']}"))
    finally:
        connection.close()
    return {"ttft_s": times_s[0], "second_s": times_s[-1], "story": story}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    wait_ready(options.host, options.port)
    say({"is_open": True})
    for line in sys.stdin:
        say(ask(options.host, options.port, json.loads(line)["prompt"]))


if __name__ == "__main__":
    main()
