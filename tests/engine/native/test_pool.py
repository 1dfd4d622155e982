"""The pool: units shared by whoever is there, from any number of callers, across a fork."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import structlog
import torch
from torch import Tensor

from prfaas.engine.native import pool
from prfaas.engine.native.kernel import Kernel, Task, address

NUM_UNITS = 64
UNIT_VALUES = 512


def write_adding(task: Task) -> None:
    code = task.code
    with task.units(task.number("num_units")) as unit:
        place = task.pointer("values") + unit * UNIT_VALUES
        with code.loop(0, UNIT_VALUES, 8) as index:
            (place + index).store((place + index).load(8) + 1.0)
        (task.pointer("workers") + unit).store(task.worker)


ADDING = Kernel(
    "add_one", {"values": "float32*", "workers": "int64*", "num_units": "int"}, write_adding
)


def added(threads: int, times: int = 1) -> tuple[Tensor, Tensor]:
    values, workers = torch.zeros(NUM_UNITS * UNIT_VALUES), torch.full((NUM_UNITS,), -1)
    for _ in range(times):
        ADDING(address(values), address(workers), NUM_UNITS, threads=threads)
    return values, workers


def test_when_a_kernel_returns_every_unit_is_done() -> None:
    for _ in range(300):
        values, _ = added(3)
        assert bool((values == 1.0).all())


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_workers_have_numbers_below_the_threads_asked_for(threads: int) -> None:
    added(5)  # more helpers than the next may have
    seen = torch.cat([added(threads)[1] for _ in range(50)])
    assert 0 <= int(seen.min()) <= int(seen.max()) < threads


def test_kernels_that_run_at_once_do_not_mix_their_units() -> None:
    times = 300
    with ThreadPoolExecutor(4) as callers:
        results = callers.map(lambda threads: added(threads, times)[0], [2, 3, 1, 3])
        assert all(bool((values == times).all()) for values in results)


def test_helpers_that_sleep_are_woken() -> None:
    """All of them sleep after a while without kernels, and some kernel then has one again."""
    added(3)
    for _ in range(1000):
        if any(int(added(3)[1].max()) > 0 for _ in range(500)):
            return
    pytest.fail("no helper ever took a unit")


@pytest.mark.skipif(not pool.has_threads(), reason="kernels have one thread here")
def test_helpers_are_made_once() -> None:
    added(4)
    before = threading.active_count()
    added(4)
    added(2)
    assert threading.active_count() == before >= 4


@pytest.mark.skipif(not pool.has_threads(), reason="kernels have one thread here")
def test_where_no_thread_can_be_started_those_there_are_do_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    more = pool.asked_for() + 1
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            assert bool((added(more)[0] == 1.0).all())
    assert [entry["event"] for entry in logs] == ["kernels.too_few_threads"]


FORKED = """
import os, sys, torch
from prfaas.engine.native import pool
from tests.engine.native.test_pool import added
added(3)
child = os.fork()
if child == 0:
    were_forgotten = pool.asked_for() == 1
    whole = bool((added(3, 50)[0] == 50).all())
    os._exit(0 if whole and were_forgotten else 1)
_, status = os.waitpid(child, 0)
assert bool((added(3)[0] == 1).all())
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
def test_a_forked_process_makes_helpers_of_its_own() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


ENDED = """
from tests.engine.native.test_pool import added
added(3, 5)
"""


@pytest.mark.slow
def test_a_process_with_helpers_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDED], capture_output=True, text=True, check=False, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
