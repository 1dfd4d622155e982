"""Kernels: every unit once, from any thread, and one clear error where there can be none."""

import gc
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from llvmlite import binding as llvm
from torch import Tensor

from prfaas.engine.native import machine
from prfaas.engine.native.kernel import Kernel, Task, address
from prfaas.errors import ConfigError

NUM_UNITS = 1000


def write_counting(task: Task) -> None:
    counts = task.pointer("counts")
    with task.units(task.number("n")) as unit:
        (counts + unit).store((counts + unit).load() + task.number("step"))
        (task.pointer("workers") + unit).store(task.worker)


def counting() -> Kernel:
    """Return a kernel of which nothing is compiled yet."""
    arguments = {"counts": "float32*", "workers": "int64*", "n": "int", "step": "float"}
    return Kernel("count", arguments, write_counting)  # type: ignore[arg-type]


def count(kernel: Kernel, threads: int | None = None) -> tuple[Tensor, Tensor]:
    counts, workers = torch.zeros(NUM_UNITS), torch.full((NUM_UNITS,), -1)
    kernel(address(counts), address(workers), NUM_UNITS, 1.5, threads=threads)
    return counts, workers


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_unit_is_done_once_by_one_of_the_threads(threads: int) -> None:
    counts, workers = count(counting(), threads)
    assert bool((counts == 1.5).all())
    assert 0 <= int(workers.min()) <= int(workers.max()) < threads


def test_a_kernel_of_no_units_does_nothing() -> None:
    kernel, nothing = counting(), torch.zeros(1)
    kernel(address(nothing), 0, 0, 1.0)
    assert not nothing.any()


def test_several_threads_may_be_the_first_to_call() -> None:
    kernel = counting()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: count(kernel)[0], range(8)))
    assert all(bool((counts == 1.5).all()) for counts in results)


def test_a_kernel_that_is_let_go_leaves_the_others_in_place() -> None:
    kept = counting()
    count(kept)
    for _ in range(3):
        count(counting())
        gc.collect()
    assert bool((count(kept)[0] == 1.5).all())


def test_a_cpu_without_the_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_prepare", machine._prepare.__wrapped__)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    features = {"avx2": True, "f16c": True}
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)
    with pytest.raises(ConfigError, match="lacks one of avx2, fma, f16c"):
        count(counting())


DENIED = """
import ctypes, sys
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1
import torch
from prfaas.engine.native.product import pack_panels
from prfaas.errors import ConfigError
if ctypes.CDLL(None).prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0):
    sys.exit(77)
try:
    pack_panels(torch.zeros(16, 8), torch.float16)
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_process_that_may_not_make_memory_executable_says_so() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DENIED], capture_output=True, text=True, check=False
    )
    if ended.returncode == 77:
        pytest.skip("this kernel of Linux cannot deny it")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "MemoryDenyWriteExecute" in ended.stdout
