"""Kernels: functions in machine code, compiled for this machine when first called.

A call shares its units of work among torch's own OpenMP threads, so that no second pool competes
with them. Which thread takes which unit is left to chance and must not matter to the result.
"""

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, Literal

import torch
from llvmlite import binding as llvm
from llvmlite import ir
from torch import Tensor

from prfaas.engine.native.code import (
    BF16,
    F16,
    F32,
    F64,
    I8,
    I32,
    I64,
    POINTER,
    Code,
    Pointer,
    Value,
)
from prfaas.errors import ConfigError
from prfaas.log import get_logger

Argument = Literal["int", "float", "int8*", "bfloat16*", "float16*", "float32*", "int64*"]
ELEMENTS: dict[str, ir.Type] = {
    "int8*": I8,
    "bfloat16*": BF16,
    "float16*": F16,
    "float32*": F32,
    "int64*": I64,
}
OPTIMIZATION_LEVEL = 2
"""At 3, or with loops unrolled, compiling takes twice as long and kernels are no faster."""
X86_FEATURES = ("avx2", "fma", "f16c")
"""Without them LLVM calls functions that no library has, and ends the process when it finds none."""
_compiling = Lock()


class Task:
    """What a kernel's body writes its code with.

    Attributes:
        code: the function of one thread.
        worker: which of the threads runs it, 0, 1, ...
    """

    def __init__(self, function: ir.Function, arguments: Mapping[str, Argument]) -> None:
        self.code = code = Code(function)
        frame = function.args[0]
        self._next_unit = Pointer(code, frame, I64)
        values = Pointer(code, code.builder.load((self._next_unit + 1).ir, typ=POINTER), I64)
        self._values: dict[str, Value | Pointer] = {}
        for index, (name, kind) in enumerate(arguments.items()):
            place = (values + index).ir
            if kind == "int":
                self._values[name] = Value(code, code.builder.load(place, typ=I64))
            elif kind == "float":
                wide = code.builder.load(place, typ=F64)
                self._values[name] = Value(code, code.builder.fptrunc(wide, F32))
            else:
                address = code.builder.load(place, typ=POINTER)
                self._values[name] = Pointer(code, address, ELEMENTS[kind])
        number = code.external("omp_get_thread_num", ir.FunctionType(I32, []))
        self.worker = Value(code, code.builder.sext(code.builder.call(number, []), I64))

    def number(self, name: str) -> Value:
        """Return an argument that is an int or a float."""
        value = self._values[name]
        assert isinstance(value, Value)
        return value

    def pointer(self, name: str) -> Pointer:
        """Return an argument that is an address."""
        value = self._values[name]
        assert isinstance(value, Pointer)
        return value

    @contextmanager
    def units(self, count: Value) -> Iterator[Value]:
        """Write the block for units 0, 1, ..., each of which one of the threads takes.

        There is one such loop in a kernel, as nothing waits for the others between two.
        """
        code = self.code
        unit = code.variable(self._take())
        head, body, done = (
            code.builder.append_basic_block(name) for name in ("head", "body", "done")
        )
        code.builder.branch(head)
        code.builder.position_at_end(head)
        code.builder.cbranch((unit.value < count).ir, body, done)
        code.builder.position_at_end(body)
        yield unit.value
        unit.set(self._take())
        code.builder.branch(head)
        code.builder.position_at_end(done)

    def _take(self) -> Value:
        builder = self.code.builder
        return Value(self.code, builder.atomic_rmw("add", self._next_unit.ir, I64(1), "monotonic"))

    def function(self, name: str, kinds: list[Argument], body: Callable[..., None]) -> ir.Function:
        """Return a function of its own, to be called with `code.call`; body(code, *arguments)."""
        module = self.code.function.module
        if (found := module.globals.get(name)) is not None:
            return found
        types = [{"int": I64, "float": F32}.get(kind, POINTER) for kind in kinds]
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), name)
        function.linkage = "internal"
        function.attributes.add("noinline")  # the whole would take twice as long to compile
        code = Code(function)
        body(
            code,
            *(
                Pointer(code, arg, ELEMENTS[kind]) if kind in ELEMENTS else Value(code, arg)
                for kind, arg in zip(kinds, function.args, strict=True)
            ),
        )
        code.builder.ret_void()
        return function


class Kernel:
    """A kernel.

    Args:
        name: of the machine code.
        arguments: names and kinds; a pointer is passed as its address, `tensor.data_ptr()`.
        body: writes the code of one thread.
    """

    def __init__(
        self, name: str, arguments: Mapping[str, Argument], body: Callable[[Task], None]
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._body = body
        codes = {"float": "d"}
        self._pack = struct.Struct(
            "".join(codes.get(kind, "q") for kind in arguments.values())
        ).pack
        self._run: Callable[[bytes, int], None] | None = None
        self._engine: Any = None

    def __call__(self, *values: float, threads: int | None = None) -> None:
        """Run it on torch's threads; it returns when all is done, and lets go of the interpreter.

        Args:
            values: of the arguments.
            threads: 1 for work that is done before others have woken up. OpenMP keeps a team of the
                size it had last: another size than 1 and torch's own costs new threads at every change.

        Raises:
            ConfigError: at the first call: this machine cannot run kernels.
        """
        run = self._run or self.compile()
        run(self._pack(*values), threads or torch.get_num_threads())

    def compile(self) -> Callable[[bytes, int], None]:
        """Make the machine code, once; raises as the first call does."""
        with _compiling:
            if self._run is None:
                self._engine = _machine_code(self.llvm_ir())
                address = self._engine.get_function_address(self.name)
                self._run = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int)(address)
            return self._run

    def llvm_ir(self) -> str:
        """Return the kernel's source for LLVM."""
        module = ir.Module(self.name)
        kind = ir.FunctionType(ir.VoidType(), [POINTER])
        worker = ir.Function(module, kind, f"{self.name}_worker")
        task = Task(worker, self._arguments)
        self._body(task)
        task.code.builder.ret_void()
        entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, I32]), self.name)
        code = Code(entry)
        values, threads = entry.args
        frame = code.stack(2, I64)
        frame.store(code.whole(0))
        code.builder.store(values, (frame + 1).ir)
        if _openmp() is None:
            code.builder.call(worker, [frame.ir])
        else:
            kind = ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I32, I32])
            parallel = code.external("GOMP_parallel", kind)
            is_alone = code.builder.icmp_signed("==", threads, I32(1))
            with code.builder.if_else(is_alone) as (alone, together):
                with alone:  # OpenMP takes 2 us to begin with a team of one
                    code.builder.call(worker, [frame.ir])
                with together:
                    code.builder.call(parallel, [worker, frame.ir, threads, I32(0)])
        code.builder.ret_void()
        return str(module)


@cache
def _openmp() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch has loaded, if it can be called as GNU's is."""
    loaded = ctypes.CDLL(None)
    if hasattr(loaded, "GOMP_parallel") and hasattr(loaded, "omp_get_thread_num"):
        return loaded
    get_logger().warning("kernels.single_threaded")
    return None


def _not_parallel() -> int:
    return 0


_thread_zero = ctypes.CFUNCTYPE(ctypes.c_int)(_not_parallel)


@cache
def _prepare() -> None:
    """Have LLVM know this machine and the functions that kernels call.

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
    openmp = _openmp()
    number = _thread_zero if openmp is None else openmp.omp_get_thread_num
    llvm.add_symbol("omp_get_thread_num", ctypes.cast(number, ctypes.c_void_p).value)
    if openmp is not None:
        parallel = ctypes.cast(openmp.GOMP_parallel, ctypes.c_void_p).value
        llvm.add_symbol("GOMP_parallel", parallel)


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


def _machine_code(source: str) -> Any:
    """Return an engine that holds the compiled module."""
    _prepare()
    # The engine takes the target machine with it when it goes, so each has its own.
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
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


@cache
def vector_lanes() -> int:
    """Return how many float32s this machine's vectors hold; for loops whose bits it does not decide."""
    return 16 if llvm.get_host_cpu_features().get("avx512f", False) else 8


def address(tensor: Tensor | None) -> int:
    """Return where a tensor's first element lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
