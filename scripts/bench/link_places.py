"""Where scripts/bench/link.py measures: loopback, and links that scripts/wan makes. Needs root for the latter.

Inside a namespace of ours the route names the congestion control, so that also programs that cannot
choose one for their sockets have the same as all others.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

WAN = Path(__file__).parents[1] / "wan.py"
NAME = f"b{os.getpid():x}"
"""Of the namespaces: two runs at a time do not meet."""
ADDRESSES = ("10.78.0.1", "10.78.0.2")
"""Of the receiver and the sender, as scripts/wan gives them."""
LOOPBACK_NAMESPACE = f"{NAME}_lo"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Two ends and what is between them."""

    name: str
    host: str
    """Of the sender, which listens."""
    sender: tuple[str, ...] = ()
    """What goes before a command that is to run at the sender's end."""
    receiver: tuple[str, ...] = ()
    congestion: str
    """Of all sockets here; of loopback without root only of those that set it."""
    rate_bytes_per_s: float | None = None
    rtt_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A long-distance link."""

    mbit: float | None
    """None: as fast as the relay."""
    rtt_ms: float
    loss: float = 0.0

    @property
    def name(self) -> str:
        rate = "no limit" if self.mbit is None else f"{self.mbit:g} Mbit/s"
        return f"{rate}, RTT {self.rtt_ms:g} ms, loss {self.loss:.1%}"


def why_no_links() -> str | None:
    """Return why links cannot be made here, None if they can."""
    if os.geteuid():
        return "needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    try:
        with long_distance(Shape(mbit=None, rtt_ms=0), "reno"):
            return None
    except RuntimeError as error:
        return str(error)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


@contextmanager
def loopback(congestion: str) -> Iterator[Place]:
    """Loopback of a namespace of our own if we may make one, else this machine's."""
    name = "loopback"
    if os.geteuid() or shutil.which("ip") is None:
        yield Place(name=name, host="127.0.0.1", congestion=congestion)
        return
    with ExitStack() as undo:
        run("ip", "netns", "add", LOOPBACK_NAMESPACE)
        undo.callback(run, "ip", "netns", "del", LOOPBACK_NAMESPACE)
        run("ip", "-n", LOOPBACK_NAMESPACE, "link", "set", "lo", "up")
        for target in ("127.0.0.0/8", "127.0.0.1"):
            route = f"local {target} dev lo table local proto kernel scope host src 127.0.0.1"
            _set_congestion(LOOPBACK_NAMESPACE, route, congestion)
        enter = ("ip", "netns", "exec", LOOPBACK_NAMESPACE)
        yield Place(
            name=name, host="127.0.0.1", sender=enter, receiver=enter, congestion=congestion
        )


@contextmanager
def long_distance(shape: Shape, congestion: str) -> Iterator[Place]:
    """A link between two namespaces for the length of the block. RuntimeError says why not."""
    command = [sys.executable, str(WAN), "up", "--name", NAME, "--loss", str(shape.loss)]
    command += ["--delay-ms", str(shape.rtt_ms / 2)]
    if shape.mbit is not None:
        command += ["--rate", f"{round(shape.mbit * 1000)}kbit"]
    wan = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert wan.stdout is not None
    assert wan.stderr is not None
    try:
        if not wan.stdout.readline().startswith("up: "):
            raise RuntimeError(wan.stderr.read().strip() or "scripts/wan ended")
        for end, (ours, theirs) in zip("ab", (ADDRESSES, ADDRESSES[::-1]), strict=True):
            route = f"{theirs} dev {NAME}-{end} proto kernel scope link src {ours}"
            _set_congestion(f"{NAME}_{end}", route, congestion)
        yield Place(
            name=shape.name,
            host=ADDRESSES[1],
            sender=("ip", "netns", "exec", f"{NAME}_b"),
            receiver=("ip", "netns", "exec", f"{NAME}_a"),
            congestion=congestion,
            rate_bytes_per_s=None if shape.mbit is None else shape.mbit * 1e6 / 8,
            rtt_s=shape.rtt_ms / 1e3,
            loss=shape.loss,
        )
    finally:
        wan.send_signal(signal.SIGTERM)
        wan.wait(30)
        wan.stdout.close()
        wan.stderr.close()


def _set_congestion(namespace: str, route: str, congestion: str) -> None:
    run("ip", "-n", namespace, "route", "change", *route.split(), "congctl", congestion)
