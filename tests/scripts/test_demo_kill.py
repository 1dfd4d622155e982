"""A demo whose node is killed at any instant leaves no process and no damage: the next one tells both stories."""

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.node_processes import HANG_GUARD_S
from tests.scripts.test_demo import check_stories, children_of, demo, directory

__all__ = ["directory"]
pytestmark = pytest.mark.slow


def nodes_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the nodes of a demo, as soon as both run."""
    deadline_s = time.perf_counter() + HANG_GUARD_S
    while len(nodes := children_of(process.pid)) < 2:
        assert process.poll() is None
        assert time.perf_counter() < deadline_s
        time.sleep(0.02)
    return nodes


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def bytes_of(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_killed_at_random_the_demo_leaves_nothing_and_the_next_one_ends_with_both_stories(
    directory,
):
    rng, model = random.Random(3), bytes_of(directory / "tiny")
    with demo(directory, "--once") as process:
        nodes = nodes_of(process)
        time.sleep(rng.uniform(0.0, 8.0))
        with suppress(ProcessLookupError):  # on a fast machine all is said by then
            os.kill(nodes[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode in {0, 1}
    if process.returncode == 1:
        assert "the pd node ended with status -9" in errors
    assert alive(nodes) == []
    assert bytes_of(directory / "tiny") == model
    with demo(directory, "--once", "--json") as process:
        nodes = nodes_of(process)
        output, errors = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 0, errors
    check_stories(output)
    assert alive(nodes) == []
