"""One `prfaas serve` process, asked as a client asks: what a bench of prefix hits measures."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = 600
STOP_TIMEOUT_S = 120
READ_BYTES = re.compile(r'^prfaas_store_io_bytes_total\{direction="read"\} (\S+)$', re.MULTILINE)
RSS_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
RSS = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How one prompt fared."""

    ttft_s: float
    """From the request's first byte to the first token's event."""
    node_ttft_s: float
    """The node's own part of it: from the request's head to the first token."""
    prompt_tokens: int
    tokens_reused: int


@dataclass(frozen=True, kw_only=True)
class HitNode:
    """A running node of the pd role."""

    port: int
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=READY_TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read().decode()
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"GET {path}: {response.status} {body}")
            return body
        finally:
            connection.close()

    def ask(self, prompt: str | Sequence[int]) -> Answer:
        """Stream one greedy token."""
        body = {
            "model": "bench",
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
        }
        data = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=READY_TIMEOUT_S)
        try:
            connection.connect()
            began_s = time.perf_counter()
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", data, headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"{response.status} {response.read().decode()}")
            while not response.readline().startswith(b"data:"):
                pass
            ttft_s = time.perf_counter() - began_s
            response.read()
            story = self.story(response.headers["X-Request-Id"])
        finally:
            connection.close()
        return Answer(
            ttft_s=ttft_s,
            node_ttft_s=story["ttft_s"],
            prompt_tokens=story["prompt_tokens"],
            tokens_reused=story["tokens_reused"],
        )

    def story(self, request_id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get(f"/debug/requests/{request_id}"))
        return found

    def read_bytes(self) -> int:
        """Bytes that it has read from the cache on disk."""
        found = READ_BYTES.search(self.get("/metrics"))
        return 0 if found is None else int(float(found[1]))

    def rss_bytes(self, pattern: re.Pattern[str] = RSS) -> int:
        found = pattern.search(Path(f"/proc/{self.process.pid}/status").read_text())
        if found is None:
            raise RuntimeError(f"no {pattern.pattern} of a process")
        return int(found[1]) << 10

    def forget_peak(self) -> None:
        """Let RSS_PEAK begin at what is held now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def wait_ready(self) -> None:
        deadline_s = time.perf_counter() + READY_TIMEOUT_S
        while time.perf_counter() < deadline_s:
            if self.process.poll() is not None:
                break
            try:
                self.get("/ready")
            except (OSError, RuntimeError):
                time.sleep(0.1)
            else:
                return
        raise RuntimeError("the node is not ready")


@contextmanager
def running(model: Path, work: Path, num_threads: int) -> Iterator[HitNode]:
    """Run a node as a person starts it, with its cache in `work`; it has ended after the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {name: value for name, value in os.environ.items() if name[:7] != "PRFAAS_"}
    command = [sys.executable, "-m", "prfaas", "serve", "--model", str(model)]
    command += ["--served-model-name", "bench", "--port", str(port), "--threads", str(num_threads)]
    command += ["--cache-dir", str(work / "cache"), "--log-level", "warning"]
    log = work / "node.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        node = HitNode(port=port, process=process)
        node.wait_ready()
        yield node
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{log.read_text(errors='replace')}") from error
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
