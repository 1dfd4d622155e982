"""A prefill node at one end of a link, pd nodes and their clients at the other: real processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.link_peers import End
from scripts.bench.link_places import Place

ROOT = Path(__file__).parents[2]
ASK = Path(__file__).with_name("overlap_ask.py")
PREFILL_PORT, PD_PORT = 8100, 8000
STOP_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class Engines:
    """What the nodes run, as flags of `prfaas serve`."""

    name: str
    is_replay: bool
    prefill: Sequence[str]
    pd: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A prefill node and pd nodes without a common cache; `clients` ask the pd nodes."""

    place: Place
    clients: list[End]
    work: Path

    def link(self, seconds: float) -> dict[str, Any]:
        """Return what `prfaas bench link` says of the link, while nothing else uses it."""
        command = [*self.place.receiver, sys.executable, "-m", "prfaas", "bench", "link", "--json"]
        command += ["--allow-plaintext", "--no-codecs", "--seconds", str(seconds)]
        command += [f"{self.place.host}:{PREFILL_PORT}"]
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"prfaas bench link: {done.stderr.strip()}")
        report: dict[str, Any] = json.loads(done.stdout)
        return report


@contextmanager
def running(place: Place, engines: Engines, num_pd: int, work: Path) -> Iterator[Pair]:
    """Run the nodes for the length of the block. RuntimeError has what they said."""
    peer = [
        "--peer",
        f"{place.host}:{PREFILL_PORT}",
        "--allow-plaintext",
        "--policy",
        "always-remote",
    ]
    with ExitStack() as undo:
        prefill = ["--role", "prefill", "--host", place.host, "--port", str(PREFILL_PORT)]
        _start(undo, place.sender, [*prefill, "--allow-plaintext", *engines.prefill], work)
        probe = [*place.receiver, sys.executable, str(ASK), "--host", place.host]
        ready = End([*probe, "--port", str(PREFILL_PORT)], work / "ask.log")
        undo.callback(ready.close)
        ready.read()  # a pd node that finds its peer at once does not have to wait for it later
        clients = []
        for number in range(num_pd):
            port = str(PD_PORT + number)
            flags = ["--served-model-name", "bench", "--port", port, *peer, *engines.pd]
            _start(undo, place.receiver, flags, work)
            ask = [*place.receiver, sys.executable, str(ASK), "--port", port]
            client = End(ask, work / "ask.log")
            undo.callback(client.close)
            clients.append(client)
        for client in clients:
            client.read()
        yield Pair(place=place, clients=clients, work=work)


def _start(undo: ExitStack, enter: Sequence[str], flags: Sequence[str], work: Path) -> None:
    command = [*enter, sys.executable, "-m", "prfaas", "serve", "--log-level", "warning", *flags]
    with (work / "nodes.log").open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    undo.callback(_stop, process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PRFAAS_") or name == "PRFAAS_MODELS_DIR"
    }
