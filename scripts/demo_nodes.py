"""The nodes that a demo starts on this machine, and how it ends them, whatever ends it."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

HOST = "127.0.0.1"
READY_TIMEOUT_S = 600
STOP_TIMEOUT_S = 40
LOG_LINES_SHOWN = 20
PEER_NOT_USABLE = re.compile(rb"^prfaas_peer_usable\{.*\} 0", re.MULTILINE)

notes = Console(stderr=True, highlight=False)
results = Console(highlight=False)


class DemoError(Exception):
    """The demo cannot go on; the message is for the person who started it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcess:
    """One `prfaas serve` that the demo started."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def check_running(self) -> None:
        """Raise DemoError with the end of the log if the node is gone."""
        status = self.process.poll()
        if status is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
            raise DemoError(
                f"the {self.name} node ended with status {status}; the end of {self.log}:\n"
                + "\n".join(lines)
            )

    def readiness(self, *, needs_peers: bool) -> tuple[bool, str]:
        """Return whether the node takes requests, with peers to send them to, and what it is at if not."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5):  # noqa: S310 - our own node
                pass
            if not needs_peers:
                return True, "ready"
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:  # noqa: S310
                has_peers = PEER_NOT_USABLE.search(answer.read()) is None
            return has_peers, "ready" if has_peers else "waiting for its peer"
        except urllib.error.HTTPError as error:
            with error:
                return False, reason_in(error.read())
        except (OSError, HTTPException):
            return False, "starting"


class Ending:
    """Turns signals into exceptions, so that every `finally` runs and no node is left behind."""

    def __init__(self) -> None:
        self._is_held = False
        self._received: int | None = None

    def receive(self, signal_number: int, _frame: FrameType | None) -> None:
        """End the demo now, at the end of `held`, or where it next waits.

        What is raised while Python runs a finalizer is lost: `check` is for that.
        """
        self._received = signal_number
        if not self._is_held:
            self._end()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no signal come between the steps of the block."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        self.check()

    def check(self) -> None:
        """End the demo if a signal has come."""
        if self._received is not None:
            self._end()

    def wait(self, seconds: float) -> None:
        """Sleep, unless a signal has come or comes."""
        self.check()
        time.sleep(seconds)

    def _end(self) -> NoReturn:
        if self._received in {None, signal.SIGINT}:
            raise KeyboardInterrupt
        raise SystemExit(128 + self._received)


ENDING = Ending()


def reason_in(body: bytes) -> str:
    """Return what a node that is not ready says it is at."""
    try:
        answer = json.loads(body)
    except ValueError:
        return "starting"
    reason = answer.get("reason") if isinstance(answer, dict) else None
    return reason if isinstance(reason, str) else "starting"


def prfaas(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prfaas", *arguments]


def check_free(port: int, flag: str) -> None:
    """Raise DemoError unless a node can listen on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no port number"
            raise DemoError(
                f"port {port} cannot be used ({reason}); choose another with {flag} N"
            ) from error


@contextmanager
def logs_kept_on_failure() -> Iterator[Path]:
    """Give a directory for the nodes' logs; it stays if the demo fails."""
    logs = Path(tempfile.mkdtemp(prefix="prfaas-demo-"))
    try:
        yield logs
    except DemoError:
        notes.print(f"logs are in {logs}", soft_wrap=True)
        raise
    except BaseException:
        shutil.rmtree(logs)
        raise
    shutil.rmtree(logs)


def start(
    running: ExitStack, name: str, port: int, logs: Path, flags: Sequence[str]
) -> NodeProcess:
    log = logs / f"{name}.log"
    command = prfaas("serve", "--host", HOST, "--port", str(port), *flags)
    notes.print(f"[dim]$ prfaas {' '.join(command[3:])}", soft_wrap=True)
    with log.open("wb") as output, ENDING.held():
        # A session of its own: Ctrl-C reaches the demo, which then stops its nodes in order.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        running.callback(stop, process)
    return NodeProcess(name=name, url=f"http://{HOST}:{port}", log=log, process=process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a node: asked first, then made to, at once if a second signal comes."""
    try:
        process.terminate()
        process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        notes.print(f"a node did not end within {STOP_TIMEOUT_S} s and is killed")
    finally:
        process.kill()
        process.wait()


def wait_ready(waiting: Sequence[NodeProcess], *, needs_peers: bool) -> None:
    """Return once every node takes requests, showing what each is at."""
    deadline_s = time.perf_counter() + READY_TIMEOUT_S
    with notes.status("starting") as status:
        while True:
            for node in waiting:
                node.check_running()
            states = {node.name: node.readiness(needs_peers=needs_peers) for node in waiting}
            status.update(", ".join(f"{name}: {reason}" for name, (_, reason) in states.items()))
            if all(is_ready for is_ready, _ in states.values()):
                return
            if time.perf_counter() > deadline_s:
                raise DemoError(
                    f"not ready after {READY_TIMEOUT_S} s; logs: {waiting[0].log.parent}"
                )
            ENDING.wait(0.2)


def served_model(node: NodeProcess) -> str:
    """Return what clients call the node's model."""
    with urllib.request.urlopen(f"{node.url}/v1/models", timeout=5) as answer:  # noqa: S310
        name: str = json.load(answer)["data"][0]["id"]
    return name
