"""Nodes on loopback as processes of their own, and loads sent to them from this one."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from prfaas.bench.load import Load
from prfaas.bench.load_client import load_server
from prfaas.bench.load_prompts import LoadPrompts, planned_requests
from prfaas.config.traces import TraceRequest

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 60.0
MODEL = "bench"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A process of `prfaas serve`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def get(self, path: str) -> str:
        request = self.url + path
        with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as answer:  # noqa: S310
            body: bytes = answer.read()
        return body.decode()

    def metric(self, name: str) -> float | None:
        """Return the value of a metric's first sample; None if there is none."""
        for line in self.get("/metrics").splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name:
                return float(value)
        return None

    def cpu_s(self) -> float:
        """Return the processor time that its process has taken, of all its threads."""
        times = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")

    def wait_until_ready(self) -> None:
        """Return once /ready says 200. RuntimeError has what the node said."""
        deadline_s = time.perf_counter() + START_TIMEOUT_S
        while self.process.poll() is None and time.perf_counter() < deadline_s:
            try:
                self.get("/ready")
            except (OSError, urllib.error.HTTPError):
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"{self.log}: {self.log.read_text(errors='replace')[-3000:]}")


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(work: Path, *flags: str, port: int | None = None) -> Iterator[Node]:
    """Run a node for the length of the block; it may not be ready yet."""
    port = port or free_port()
    log = work / f"node-{port}.log"
    command = [sys.executable, "-m", "prfaas", "serve", "--port", str(port)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PRFAAS_")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--log-level", "warning", *flags],
            cwd=ROOT,
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield Node(process=process, port=port, log=log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def loaded(
    url: str, requests: Sequence[TraceRequest], *, max_s: float, key: str = ""
) -> Load:
    """Send the requests, with prompts that no cache knows unless the key is the same."""
    prompts = LoadPrompts(key or os.urandom(16).hex())
    planned = planned_requests(list(requests), prompts, MODEL)
    load = await load_server(url, planned, max_s=max_s)
    if load.stopped_by in {"SIGINT", "SIGTERM"}:
        raise KeyboardInterrupt
    return load


def load_now(url: str, requests: Sequence[TraceRequest], *, max_s: float, key: str = "") -> Load:
    """Do the same without a loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(loaded(url, requests, max_s=max_s, key=key))


def print_json(report: dict[str, Any]) -> None:
    print(json.dumps(report, indent=2))
