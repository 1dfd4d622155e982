"""The demo shows two routes, says what is wrong, and leaves no process behind."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cli.node_processes import HANG_GUARD_S, environment, free_port
from tests.tiny_models import write_tiny_model

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"
KEYS = [
    "prompt_tokens",
    "route",
    "reason",
    "tokens_reused",
    "tokens_local",
    "tokens_remote",
    "bytes_received",
    "ttft_s",
    "answer",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo")
    write_tiny_model(path / "tiny", "gemma3")
    return path


@contextmanager
def demo(directory: Path, *flags: str, port: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a demo; when the block ends it has ended, its nodes with it, and its pipes are closed."""
    command = [sys.executable, str(DEMO), "--model", str(directory / "tiny"), *flags]
    command += ["--port", str(port or free_port()), "--prefill-port", str(free_port())]
    with subprocess.Popen(
        command,
        env=environment(directory / "models") | {"TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for pid in (*children_of(process.pid), process.pid):
                    os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def check_stories(output: str) -> None:
    """Fail unless a demo that ran to its end with --json tells of both routes."""
    short, long = json.loads(output.splitlines()[-1])["requests"]
    assert list(short) == list(long) == KEYS
    assert (short["route"], long["route"]) == ("local", "remote"), long
    assert short["tokens_remote"] == short["bytes_received"] == 0
    assert long["prompt_tokens"] > 4000
    for story in (short, long):
        parts = story["tokens_reused"] + story["tokens_local"] + story["tokens_remote"]
        assert parts == story["prompt_tokens"]
    assert f"{long['tokens_remote']:,} computed by the peer" in output
    assert "curl http://127.0.0.1:" in output


@pytest.mark.slow
def test_a_fleet_routes_fails_over_without_another_text_and_converts(directory):
    with demo(directory, "--fleet", "--once", "--json", port=free_ports(5)) as process:
        output, errors = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 0, errors
    facts = json.loads(output.splitlines()[-1])
    assert len(facts["routing"]["spread"]) == 2
    assert facts["routing"]["long"]["tokens_remote"] == 24_000
    assert facts["routing"]["again"]["tokens_reused"] >= 23_936
    assert facts["failover"]["is_equal"]
    assert facts["failover"]["node"] != facts["failover"]["killed"]
    (mode,) = facts["converting"]["converted"].values()
    assert mode in {"prefill", "decode"}


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row that nobody listens on now.

    They are below those that the system gives to clients: one that asks again and again whether a port is
    open would meet itself there.
    """
    while True:
        first = random.randrange(20_000, 30_000)
        with ExitStack() as taken:
            try:
                for port in range(first, first + count):
                    taken.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
            return first


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_the_nodes_too(number, directory):
    with demo(directory) as process:
        deadline_s = time.perf_counter() + HANG_GUARD_S
        while len(children := children_of(process.pid)) < 2 and time.perf_counter() < deadline_s:
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode in {0, 128 + number}
    assert len(children) == 2
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_a_used_port_is_named_with_the_flag_that_helps(directory):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with demo(directory, "--once", port=port) as process:
            output, errors = process.communicate(timeout=HANG_GUARD_S)
    assert (process.returncode, output) == (1, "")
    assert f"port {port} cannot be used" in errors
    assert "--port N" in errors


@pytest.mark.slow
def test_a_node_that_cannot_start_is_shown_with_its_log(directory):
    (directory / "broken").mkdir(exist_ok=True)
    with demo(directory, "--once", "--model", str(directory / "broken")) as process:
        _, errors = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 1
    assert "node ended with status 2" in errors
    assert "prfaas: " in errors
