"""What `scripts/demo` runs once everything is installed."""

import argparse
import json
import os
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
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

TEXTS = Path(__file__).parent / "texts"
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

    def readiness(self) -> tuple[bool, str]:
        """Return whether the node takes requests, and what it is at if not."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5):  # noqa: S310 - our own node
                pass
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:  # noqa: S310
                has_peers = PEER_NOT_USABLE.search(answer.read()) is None
            return has_peers, "ready" if has_peers else "waiting for its peer"
        except urllib.error.HTTPError as error:
            with error:
                return False, reason_in(error.read())
        except OSError:
            return False, "starting"


class Ending:
    """Turns signals into exceptions, so that every `finally` runs and no node is left behind."""

    def __init__(self) -> None:
        self._is_held = False
        self._received: int | None = None

    def receive(self, signal_number: int, _frame: FrameType | None) -> None:
        """End the demo now, or at the end of `held`."""
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
        if self._received is not None:
            self._end()

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return its exit status."""
    options = parse(arguments)
    for signal_number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signal_number, ENDING.receive)
    try:
        run(options)
    except DemoError as error:
        notes.print(Text(f"scripts/demo: {error}"))
        return 1
    except KeyboardInterrupt:
        notes.print("stopped")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Start a prefill node and a pd node here and send them a short and a long prompt.",
    )
    parser.add_argument("--once", action="store_true", help="exit after the two answers")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--port", type=int, default=8000, help="of the pd node (8000)")
    parser.add_argument("--prefill-port", type=int, default=8100, help="of the prefill node (8100)")
    parser.add_argument(
        "--model", default="gemma-3-270m", help="name or path of what both serve (gemma-3-270m)"
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Start both nodes, ask both questions, and serve on unless told `--once`."""
    if shutil.which("curl") is None:
        raise DemoError("needs curl, which sends the prompts")
    for port, flag in ((options.port, "--port"), (options.prefill_port, "--prefill-port")):
        check_free(port, flag)
    fetch_model(options.model)
    with nodes(options) as (prefill, pd):
        wait_ready((prefill, pd))
        model = served_model(pd)
        requests = [ask(pd, model, name, messages) for name, messages in conversations()]
        results.print(f"\nTry it:\n{curl_line(pd, model)}", soft_wrap=True)
        if options.json:
            print(json.dumps({"requests": requests}), flush=True)
        if not options.once:
            notes.print("Serving until Ctrl-C.")
            while True:
                prefill.check_running()
                pd.check_running()
                time.sleep(1)


def fetch_model(model: str) -> None:
    """Bring a model that is named, not given as a path; quick if it is here."""
    if Path(model).exists():
        return
    done = subprocess.run(prfaas("model", "fetch", model), stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise DemoError(f"could not get the model {model}")


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
def nodes(options: argparse.Namespace) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """Run both nodes for the length of the block; their logs stay if it fails."""
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    logs = Path(tempfile.mkdtemp(prefix="prfaas-demo-"))
    common = ("--model", options.model, "--threads", str(threads))
    peer = f"{HOST}:{options.prefill_port}"
    try:
        with ExitStack() as running:
            prefill = start(
                running, "prefill", options.prefill_port, logs, ("--role", "prefill", *common)
            )
            pd = start(running, "pd", options.port, logs, ("--role", "pd", "--peer", peer, *common))
            yield prefill, pd
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


def wait_ready(waiting: Sequence[NodeProcess]) -> None:
    """Return once every node takes requests, showing what each is at."""
    deadline_s = time.perf_counter() + READY_TIMEOUT_S
    with notes.status("starting") as status:
        while True:
            for node in waiting:
                node.check_running()
            states = {node.name: node.readiness() for node in waiting}
            status.update(", ".join(f"{name}: {reason}" for name, (_, reason) in states.items()))
            if all(is_ready for is_ready, _ in states.values()):
                return
            if time.perf_counter() > deadline_s:
                raise DemoError(
                    f"not ready after {READY_TIMEOUT_S} s; logs: {waiting[0].log.parent}"
                )
            time.sleep(0.2)


def conversations() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield a short and a long prompt, each with a name to show."""
    yield "short", [{"role": "user", "content": "What is the capital of France?"}]
    text = (TEXTS / "selm_point.txt").read_text(encoding="utf-8")
    question = "Who was the first woman to be principal keeper?"
    yield "long", [{"role": "system", "content": text}, {"role": "user", "content": question}]


def served_model(node: NodeProcess) -> str:
    """Return what clients call the node's model."""
    with urllib.request.urlopen(f"{node.url}/v1/models", timeout=5) as answer:  # noqa: S310
        name: str = json.load(answer)["data"][0]["id"]
    return name


def ask(node: NodeProcess, model: str, name: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Send one chat prompt with curl, show the answer and its story, and return the story."""
    settings = {"model": model, "max_tokens": 48, "temperature": 0, "stop": ["\n"]}
    body = json.dumps({"messages": messages, **settings})
    command = ["curl", "--silent", "--show-error", "--max-time", "900", "--data-binary", "@-"]
    command += ["--header", "Content-Type: application/json", f"{node.url}/v1/chat/completions"]
    with notes.status(f"{name} prompt"):
        done = subprocess.run(command, input=body.encode(), capture_output=True, check=False)
    if done.returncode:
        node.check_running()
        raise DemoError(f"curl: {done.stderr.decode(errors='replace').strip()}")
    try:
        answer = json.loads(done.stdout)
        usage = answer["usage"]
        story = {"prompt_tokens": usage["prompt_tokens"]}
        story |= {key: usage["prfaas"][key] for key in ("route", "reason", *COUNTS, "ttft_s")}
        story["answer"] = answer["choices"][0]["message"]["content"].strip()
    except (ValueError, KeyError, TypeError, IndexError) as error:
        node.check_running()
        raise DemoError(f"unexpected answer: {done.stdout[:500]!r}") from error
    show(name, messages[-1]["content"], story)
    return story


COUNTS = ("tokens_reused", "tokens_local", "tokens_remote", "bytes_received")


def show(name: str, question: str, story: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    rows = {
        "question": question,
        "answer": story["answer"],
        "prompt": f"{story['prompt_tokens']:,} tokens",
        "route": f"{story['route']} ({story['reason']})",
        "prefill": f"{story['tokens_reused']:,} tokens reused, {story['tokens_local']:,} computed here,"
        f" {story['tokens_remote']:,} computed by the peer",
        "received": f"{story['bytes_received'] / 1e6:,.1f} MB of KVCache",
        "first token": f"after {story['ttft_s']:.2f} s",
    }
    for label, value in rows.items():
        table.add_row(Text(label, style="dim"), Text(value))
    results.print(Panel(table, title=f"{name} prompt", title_align="left"))


def curl_line(node: NodeProcess, model: str) -> str:
    question = [{"role": "user", "content": "Who wrote Hamlet?"}]
    body = json.dumps({"model": model, "messages": question})
    return f"curl {node.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


if __name__ == "__main__":
    sys.exit(main())
