"""Machine code from LLVM IR, for the processor that this process runs on."""

import ctypes
import mmap
import os
import platform
from functools import cache
from typing import Any

from llvmlite import binding as llvm

from prfaas.errors import ConfigError

OPTIMIZATION_LEVEL = 2
"""At 3, or with loops unrolled, compiling takes twice as long and kernels are no faster."""
X86_FEATURES = ("avx2", "fma", "f16c")
"""Without them LLVM calls functions that no library has, and ends the process when it finds none."""


@cache
def _prepare() -> None:
    """Have LLVM know this machine.

    Raises:
        ConfigError: LLVM would end the process here.
    """
    features = llvm.get_host_cpu_features()
    if platform.machine() == "x86_64" and not all(features.get(name) for name in X86_FEATURES):
        names = ", ".join(X86_FEATURES)
        raise ConfigError(f"this CPU ({llvm.get_host_cpu_name()}) lacks one of {names}")
    _require_executable_memory()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _require_executable_memory() -> None:
    """Do what LLVM does with every kernel: write a page, then make it executable."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        start = ctypes.c_char.from_buffer(page)
        protection = mmap.PROT_READ | mmap.PROT_EXEC
        failed = libc.mprotect(ctypes.addressof(start), mmap.PAGESIZE, protection)
        del start  # or the page cannot be closed
    if failed:
        raise ConfigError(
            "this process may not make memory executable, which kernels compiled at start need "
            f"({os.strerror(ctypes.get_errno())}); look for MemoryDenyWriteExecute= of systemd, "
            "SELinux's execmem or a seccomp filter"
        )


def target() -> tuple[str, str]:
    """Return LLVM's name of the CPU that code is made for, and its features; they decide no bits."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def machine_code(source: str) -> Any:
    """Return an engine that holds the module `source`, compiled; ConfigError: this machine cannot run it."""
    _prepare()
    cpu, features = target()
    # The engine takes the target machine with it when it goes, so each has its own.
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu,
        features=features,
        opt=OPTIMIZATION_LEVEL,
    )
    module = llvm.parse_assembly(source)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=OPTIMIZATION_LEVEL)
    options.loop_vectorization = options.slp_vectorization = False  # kernels name their vectors
    options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def define(name: str, address: int) -> None:
    """Let modules that are compiled from now on call what is at `address` by its name."""
    llvm.add_symbol(name, address)


@cache
def vector_lanes() -> int:
    """Return how many float32s this machine's vectors hold; for loops whose bits it does not decide."""
    return 16 if llvm.get_host_cpu_features().get("avx512f", False) else 8
