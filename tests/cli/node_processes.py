"""`prfaas serve` as a person starts it: a process, a port, signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import started

HANG_GUARD_S = 120


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(models_dir: Path) -> dict[str, str]:
    """Return this process's environment with a models directory of its own and no settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PRFAAS_")}
    return kept | {"PRFAAS_MODELS_DIR": str(models_dir)}


SMALL = ("--threads", "1", "--cache-ram", "64MiB", "--kv-ram-bytes", "256MiB")


REPLAYED = ("--cache-ram", "64MiB")
"""A node without weights has no threads and no memory for them."""


def command(name: str, *flags: str) -> list[str]:
    """Return the command line of a small node, or of what is like one."""
    small = REPLAYED if "replay" in flags else SMALL
    return [sys.executable, "-m", "prfaas", name, *small, *flags]


def run_to_its_end(directory: Path, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself, with its models in `directory`."""
    return subprocess.run(
        command(name, *flags),
        env=environment(directory / "models"),
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_GUARD_S,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcess:
    """A running node."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return status and JSON of a GET."""
        return self._send(urllib.request.Request(f"http://127.0.0.1:{self.port}{path}"))

    def metric(self, sample: str) -> float:
        """Return the value of a sample as /metrics names it, labels included; 0 if it is not there."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            for line in answer.read().decode().splitlines():
                name, _, value = line.rpartition(" ")
                if name == sample:
                    return float(value)
        return 0.0

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and JSON of a POST."""
        url = f"http://127.0.0.1:{self.port}{path}"
        headers = {"Content-Type": "application/json"}
        return self._send(urllib.request.Request(url, json.dumps(body).encode(), headers))

    def _send(self, request: urllib.request.Request) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def wait_ready(self) -> None:
        """Return once /ready says 200."""
        self.wait(self._is_ready)

    def _is_ready(self) -> bool:
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False

    def wait(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds, while the node lives."""
        deadline_s = time.perf_counter() + HANG_GUARD_S
        while time.perf_counter() < deadline_s:
            assert self.process.poll() is None, self.log.read_text()
            if condition():
                return
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=HANG_GUARD_S)


@contextmanager
def running_node(directory: Path, *flags: str, port: int | None = None) -> Iterator[NodeProcess]:
    """Start a node with its models and its log in `directory`; it is gone when the block ends."""
    port = port or free_port()
    log = directory / f"{port}.log"
    with log.open("ab") as output:
        node = started(
            command("serve", "--port", str(port), *flags),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(directory / "models"),
        )
        with node as process:
            yield NodeProcess(process=process, port=port, log=log)
