"""A long-distance link between two network namespaces of this machine.

`up` makes the namespaces NAME_a (10.78.0.1) and NAME_b (10.78.0.2) and carries packets between them
until Ctrl-C, SIGTERM or --seconds; then they are gone. The rate is held by tbf at each sender, the
delay and the loss are made here, packet by packet: no netem is needed. `down` removes what a killed
`up` has left. Nothing outside the two namespaces is touched.

    sudo scripts/wan up --rate 200mbit --delay-ms 20 --loss 0.001
    sudo ip netns exec wan_b prfaas serve --role prefill --host 10.78.0.2 --allow-plaintext ...
    sudo ip netns exec wan_a prfaas serve --peer 10.78.0.2:8100 --allow-plaintext ...

A relay in Python carries about a gigabit per second: measure what it carries without --rate before
you believe a faster link. Only the Python standard library is used.
"""

import argparse
import fcntl
import os
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ADDRESSES = ("10.78.0.1", "10.78.0.2")
TUN = Path("/dev/net/tun")
TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x1001
READS_A_TURN = 64
QUEUE_MS = 200
"""What a sender's queue holds before tbf drops."""
MAX_NAME = 10
"""Interface names have at most 15 characters."""


class WanError(Exception):
    """Why there is no link; one line for a person."""


class DelayLine:
    """One direction: packets come out in order, `delay_s` after they went in, or not at all."""

    def __init__(self, delay_s: float, loss: float, rng: random.Random) -> None:
        self._delay_s = delay_s
        self._loss = loss
        self._rng = rng
        self._packets: deque[tuple[float, bytes]] = deque()

    def put(self, packet: bytes, now_s: float) -> None:
        """Take a packet in, or lose it."""
        if self._rng.random() >= self._loss:
            self._packets.append((now_s + self._delay_s, packet))

    def due(self, now_s: float) -> bytes | None:
        """Return the first packet if its time has come; it stays until `sent`."""
        if self._packets and self._packets[0][0] <= now_s:
            return self._packets[0][1]
        return None

    def sent(self) -> None:
        """Drop the first packet: it is out."""
        self._packets.popleft()

    def wait_s(self, now_s: float) -> float | None:
        """Return how long until a packet is due; None if there is none."""
        return max(0.0, self._packets[0][0] - now_s) if self._packets else None


def run(*command: str) -> None:
    """Run a command; WanError with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WanError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def check_machine() -> None:
    """Raise WanError for what is missing here."""
    if os.geteuid() != 0:
        raise WanError("needs root, to make network namespaces: sudo scripts/wan ...")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise WanError(f"{' and '.join(missing)} not found: install iproute2")
    if not TUN.exists():
        raise WanError(
            f"{TUN} is not there: load the kernel's tun module, or give it to the container"
        )


def open_tun(name: str) -> int:
    """Return the descriptor of a new TUN interface."""
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN_NO_PI))
    return descriptor


def make_end(name: str, end: int, options: argparse.Namespace) -> int:
    """Make one namespace and its interface; return the descriptor of what passes through it."""
    namespace, interface = f"{name}_{'ab'[end]}", f"{name}-{'ab'[end]}"
    run("ip", "netns", "add", namespace)
    descriptor = open_tun(interface)
    run("ip", "link", "set", interface, "netns", namespace)
    inside = ("ip", "-n", namespace)
    run(*inside, "link", "set", "lo", "up")
    address, peer = ADDRESSES[end], ADDRESSES[1 - end]
    run(*inside, "addr", "add", address, "peer", peer, "dev", interface)
    run(*inside, "link", "set", interface, "mtu", str(options.mtu), "txqueuelen", "1000", "up")
    if options.rate:
        shape = ("tbf", "rate", options.rate, "burst", "256kb", "latency", f"{QUEUE_MS}ms")
        run(
            "ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", interface, "root", *shape
        )
    return descriptor


def remove(name: str) -> None:
    """Remove the two namespaces, if they are there; their interfaces go with them."""
    for end in "ab":
        subprocess.run(("ip", "netns", "del", f"{name}_{end}"), capture_output=True, check=False)


@contextmanager
def link(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Make both ends for the length of the block."""
    remove(options.name)
    with ExitStack() as undo:
        undo.callback(remove, options.name)
        first = make_end(options.name, 0, options)
        undo.callback(os.close, first)
        second = make_end(options.name, 1, options)
        undo.callback(os.close, second)
        yield first, second


def carry(ends: tuple[int, int], lines: dict[int, DelayLine], until_s: float) -> None:
    """Move packets between the ends until a time of time.perf_counter.

    Args:
        ends: descriptors of the interfaces.
        lines: for each end, what it is to receive.
        until_s: when to stop.
    """
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    while (now_s := time.perf_counter()) < until_s:
        for end, line in lines.items():
            give(end, line, now_s)
        waits = [
            until_s - now_s,
            *(w for line in lines.values() if (w := line.wait_s(now_s)) is not None),
        ]
        for end in select.select(ends, (), (), max(0.0, min(waits)))[0]:
            take(end, lines[other[end]])


def give(end: int, line: DelayLine, now_s: float) -> None:
    """Write what is due, as far as the interface takes it."""
    while (packet := line.due(now_s)) is not None:
        try:
            os.write(end, packet)
        except BlockingIOError:
            return
        except OSError:  # the interface is down: the packet is lost, as on any link
            pass
        line.sent()


def take(end: int, line: DelayLine) -> None:
    """Read what the interface sends, up to a limit, so that the other end gets its turn."""
    for _ in range(READS_A_TURN):
        try:
            packet = os.read(end, 1 << 16)
        except BlockingIOError:
            return
        line.put(packet, time.perf_counter())


def up(options: argparse.Namespace) -> None:
    """Carry packets until told to stop."""
    check_machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with link(options) as ends:
        delay_s, rng = options.delay_ms / 1e3, random.Random(options.seed)
        lines = {end: DelayLine(delay_s, options.loss, rng) for end in ends}
        print(
            f"up: {options.name}_a {ADDRESSES[0]}, {options.name}_b {ADDRESSES[1]},"
            f" {options.rate or 'no rate limit'}, {options.delay_ms:g} ms each way,"
            f" {options.loss:.3%} lost; Ctrl-C ends it",
            flush=True,
        )
        carry(ends, lines, time.perf_counter() + options.seconds)


def down(options: argparse.Namespace) -> None:
    """Remove what is left of a link."""
    check_machine()
    remove(options.name)


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; argparse ends the process for wrong ones."""
    parser = argparse.ArgumentParser(
        prog="scripts/wan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("--rate", default="", help="of each direction as tc writes it, 200mbit")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="one way (default: 20)")
    parser.add_argument("--loss", type=float, default=0.0, help="part of packets lost, 0.001")
    parser.add_argument("--seconds", type=float, default=1e9, help="end by itself after this")
    parser.add_argument("--mtu", type=int, default=9000, help="largest packet (default: 9000)")
    parser.add_argument("--seed", type=int, default=0, help="of the loss (default: 0)")
    parser.add_argument("--name", default="wan", help="of the namespaces (default: wan)")
    options = parser.parse_args(arguments)
    if not re.fullmatch(rf"[a-z][a-z0-9]{{0,{MAX_NAME - 1}}}", options.name):
        parser.error(f"--name {options.name}: up to {MAX_NAME} small letters and digits")
    if not (options.delay_ms >= 0 and 0 <= options.loss <= 1 and options.seconds > 0):
        parser.error("--delay-ms and --loss are not negative, --loss at most 1, --seconds above 0")
    return options


def main() -> int:
    options = read_arguments(sys.argv[1:])
    try:
        {"up": up, "down": down}[options.action](options)
    except WanError as error:
        print(f"scripts/wan: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
