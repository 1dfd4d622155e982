"""The long-distance link delays and loses what it says; where it cannot be made, it says why."""

import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import started

SCRIPT = Path(__file__).parents[2] / "scripts" / "wan.py"
SPEC = importlib.util.spec_from_file_location("wan", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
wan = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(wan)

NAME = "wantest"


def can_make_links() -> bool:
    """Try it: root, tools and a device do not say that a container may make namespaces."""
    if os.geteuid() or not wan.TUN.exists() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    options = wan.read_arguments(["up", "--name", "wantry"])
    try:
        with wan.link(options):
            return True
    except (wan.WanError, OSError):
        return False


@given(
    st.lists(st.floats(0, 1), max_size=30).map(sorted),
    st.floats(0, 0.5),
    st.lists(st.floats(0, 3), max_size=30).map(sorted),
)
def test_packets_come_in_order_and_never_early(sent_s, delay_s, looks_s):
    line = wan.DelayLine(delay_s, 0.0, random.Random(0))
    for number, at_s in enumerate(sent_s):
        line.put(number.to_bytes(2, "big"), at_s)
    come: list[int] = []
    for now_s in [*looks_s, 4.0]:
        while (packet := line.due(now_s)) is not None:
            number = int.from_bytes(packet, "big")
            assert now_s >= sent_s[number] + delay_s
            come.append(number)
            line.sent()
        wait_s = line.wait_s(now_s)
        assert (wait_s is None) == (len(come) == len(sent_s))
        assert wait_s is None or wait_s > 0
    assert come == list(range(len(sent_s)))


@pytest.mark.parametrize("loss", [0.0, 0.25, 1.0])
def test_the_part_that_is_lost_is_what_was_asked_for(loss):
    line = wan.DelayLine(0.0, loss, random.Random(1))
    num_come = 0
    for _ in range(4_000):
        line.put(b"x", 0.0)
        if line.due(0.0) is not None:
            num_come += 1
            line.sent()
    assert num_come / 4_000 == pytest.approx(1 - loss, abs=0.03)


@pytest.mark.parametrize(
    "arguments",
    [["up", "--loss", "2"], ["up", "--delay-ms", "-1"], ["down", "--name", "a b"], ["sideways"]],
)
def test_wrong_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        wan.read_arguments(arguments)
    assert caught.value.code == 2
    assert "usage: scripts/wan" in capsys.readouterr().err


@pytest.mark.parametrize("action", [wan.up, wan.down])
def test_who_is_not_root_is_told_so(action, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(wan.WanError, match="needs root"):
        action(wan.read_arguments(["up"]))


def test_missing_tools_and_devices_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(wan.WanError, match="ip and tc not found: install iproute2"):
        wan.check_machine()
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(wan, "TUN", tmp_path / "tun")
    with pytest.raises(wan.WanError, match="tun is not there"):
        wan.check_machine()


@contextmanager
def link(*flags: str) -> Iterator[None]:
    command = [sys.executable, str(SCRIPT), "up", "--name", NAME, "--seconds", "60", *flags]
    with started(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("up: ")
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


ROUND_TRIP = """
import socket, sys, time
if sys.argv[1] == "serve":
    with socket.create_server(("10.78.0.2", 9000)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)
else:
    began_s = time.monotonic()
    with socket.create_connection(("10.78.0.2", 9000), timeout=60) as connection:
        for _ in range(5):
            connection.sendall(b"x" * 20_000)
            left = 20_000
            while left:
                left -= len(connection.recv(left))
    print((time.monotonic() - began_s) / 6)
"""


@pytest.mark.slow
def test_a_round_trip_takes_twice_the_delay_at_least_and_nothing_is_left_behind():
    if not can_make_links():
        pytest.skip("needs root, /dev/net/tun and iproute2, and to be allowed to use them")
    before = namespaces()
    with link("--rate", "100mbit", "--delay-ms", "15", "--loss", "0.001"):
        assert namespaces() >= {f"{NAME}_a", f"{NAME}_b"}
        enter = ["ip", "netns", "exec"]
        code = [sys.executable, "-c", ROUND_TRIP]
        with started(
            [*enter, f"{NAME}_b", *code, "serve"], stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            asked = subprocess.run(
                [*enter, f"{NAME}_a", *code, "ask"], capture_output=True, text=True, check=True
            )
            assert server.wait(timeout=60) == 0
    assert float(asked.stdout) >= 0.030
    assert namespaces() == before - {f"{NAME}_a", f"{NAME}_b"}
