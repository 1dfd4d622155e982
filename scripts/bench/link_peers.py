"""What scripts/bench/link.py measures side by side: the KV channel, plain sockets, iperf3, Mooncake.

Each is a sender and a receiver in processes of their own; `run` moves bytes once, over connections
that are open already where the program can keep them.
"""

import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from scripts.bench.link_places import Place

HERE = Path(__file__).parent
ENDS = HERE / "link_ends.py"
MOONCAKE_ENDS = HERE / "link_mooncake.py"
WHEEL = "mooncake-transfer-engine-non-cuda"
START_TIMEOUT_S = 60.0
IPERF3_PORT = 5201
GUARDS = ("none", "checksum", "mac", "tls")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all have in common."""

    streams: int
    page_kib: int
    pool_mib: int
    files: Path
    """Directory of the key and the certificate."""
    mooncake_python: str | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """How one run went."""

    bytes_per_s: float
    detail: dict[str, Any] = field(default_factory=dict)


class Contender(Protocol):
    """One of those that are compared, started."""

    def run(self, num_bytes: int, codec: str = "raw") -> Run: ...


def make_files(directory: Path) -> None:
    """Write a cluster key and a certificate of its own authority for every sender's address."""
    key = directory / "cluster.key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=prfaas bench"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,IP:10.78.0.2"]
    command += ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)


class End:
    """A process that talks in lines of JSON."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._log.read_text(errors="replace").strip()[-2000:] or "it ended")
        value: dict[str, Any] = json.loads(line)
        return value

    def ask(self, value: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True)
class Ends:
    """A receiver that answers how each run went."""

    receiver: End

    def run(self, num_bytes: int, codec: str = "raw") -> Run:
        order: dict[str, Any] = {"num_bytes": num_bytes}
        done = self.receiver.ask(order if codec == "raw" else order | {"codec": codec})
        return Run(bytes_per_s=done["num_bytes"] / done["seconds"], detail=done)


@contextmanager
def ends(
    place: Place, setup: Setup, kind: str, guard: str = "checksum", *flags: str
) -> Iterator[Contender]:
    """The KV channel or plain sockets."""
    command = ["--host", place.host, "--streams", str(setup.streams), "--guard", guard]
    command += ["--page-kib", str(setup.page_kib), "--pool-mib", str(setup.pool_mib)]
    command += ["--congestion", place.congestion, "--files", str(setup.files), *flags]
    log = setup.files / f"{kind}-{guard}.log"
    with ExitStack() as undo:
        sender = End([*place.sender, sys.executable, str(ENDS), "serve", kind, *command], log)
        undo.callback(sender.close)
        port = str(sender.read()["port"])
        receiver = [*place.receiver, sys.executable, str(ENDS), "pull", kind, *command]
        end = End([*receiver, "--port", port], log)
        undo.callback(end.close)
        end.read()
        yield Ends(end)


@dataclass(frozen=True)
class Iperf3:
    """`iperf3 -R -n`: a new set of connections each run, measured at the receiver."""

    place: Place
    streams: int

    def run(self, num_bytes: int, codec: str = "raw") -> Run:
        assert codec == "raw", "iperf3 knows no codec"
        command = [*self.place.receiver, "iperf3", "-c", self.place.host, "-p", str(IPERF3_PORT)]
        command += ["-R", "-n", str(num_bytes), "-P", str(self.streams), "-J"]
        command += ["-C", self.place.congestion]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report = json.loads(done.stdout or "{}")
        if done.returncode or "error" in report:
            raise RuntimeError(f"iperf3: {report.get('error', done.stderr.strip())}")
        end = report["end"]
        return Run(
            bytes_per_s=end["sum_received"]["bits_per_second"] / 8,
            detail={
                "num_bytes": end["sum_received"]["bytes"],
                "seconds": end["sum_received"]["seconds"],
                "num_retransmits": end["sum_sent"].get("retransmits"),
                "congestion": end.get("sender_tcp_congestion"),
            },
        )


@contextmanager
def iperf3(place: Place, setup: Setup) -> Iterator[Contender]:
    """An iperf3 server at the sender's end."""
    if shutil.which("iperf3") is None:
        raise RuntimeError("iperf3 not found: install it to compare with it")
    command = [*place.sender, "iperf3", "-s", "-p", str(IPERF3_PORT), "-B", place.host]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_iperf3(server, place)
        yield Iperf3(place, setup.streams)
    finally:
        server.terminate()
        server.wait()


def _wait_for_iperf3(server: subprocess.Popen[bytes], place: Place) -> None:
    """Return once it listens, as the kernel says: a probing connection would be a test to it."""
    deadline_s = time.perf_counter() + START_TIMEOUT_S
    table = [*place.sender, "cat", "/proc/net/tcp"]
    listening = f":{IPERF3_PORT:04X} 00000000:0000 0A"
    while time.perf_counter() < deadline_s and server.poll() is None:
        if listening in subprocess.run(table, capture_output=True, text=True, check=True).stdout:
            return
        time.sleep(0.05)
    raise RuntimeError("iperf3 does not listen")


@contextmanager
def mooncake(place: Place, setup: Setup) -> Iterator[Contender]:
    """Mooncake's TransferEngine over TCP, which reads pages of the sender in one batch."""
    if setup.mooncake_python is None:
        raise RuntimeError("no Python with Mooncake")
    log = setup.files / "mooncake.log"
    pages = ["--page-kib", str(setup.page_kib), "--pool-mib", str(setup.pool_mib)]
    here = place.host if place.host.startswith("127.") else "10.78.0.1"
    program = [setup.mooncake_python, str(MOONCAKE_ENDS)]
    with ExitStack() as undo:
        sender = End([*place.sender, *program, "serve", "--host", place.host, *pages], log)
        undo.callback(sender.close)
        found = sender.read()
        target = ["--peer", found["peer"], "--address", str(found["address"])]
        receiver = End([*place.receiver, *program, "pull", "--host", here, *pages, *target], log)
        undo.callback(receiver.close)
        receiver.read()
        yield Ends(receiver)


def make_mooncake(directory: Path) -> str:
    """Return a Python that has Mooncake, in a fresh environment. RuntimeError says why there is none."""
    python = directory / "mooncake" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    install = [str(python), "-m", "pip", "install", "-q", WHEEL]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip install {WHEEL}: {done.stderr.strip()[-500:]}")
    return str(python)


def check_mooncake(python: str) -> None:
    """Raise RuntimeError if Mooncake cannot be loaded: its wheel needs libraries of the system."""
    command = [python, "-c", "import mooncake.engine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"Mooncake cannot be loaded: {why} (it needs libibverbs1 and libnl-3)")
