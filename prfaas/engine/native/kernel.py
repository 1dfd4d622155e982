"""Kernels: functions in machine code, compiled for this machine when first called.

A call shares its units of work among the threads of `pool`. Which thread takes which unit is left to
chance and must not matter to the result.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any, Literal

import torch
from llvmlite import ir
from torch import Tensor

from prfaas.engine.native import pool
from prfaas.engine.native.code import (
    BF16,
    F16,
    F32,
    F64,
    I8,
    I64,
    POINTER,
    Code,
    Pointer,
    Value,
)
from prfaas.engine.native.machine import machine_code
from prfaas.engine.native.tape import Call

Argument = Literal["int", "float", "int8*", "bfloat16*", "float16*", "float32*", "int64*"]
ELEMENTS: dict[str, ir.Type] = {
    "int8*": I8,
    "bfloat16*": BF16,
    "float16*": F16,
    "float32*": F32,
    "int64*": I64,
}
_compiling = Lock()


class _Listening(threading.local):
    to: Callable[[Call], None] | None = None


_listening = _Listening()


@contextmanager
def listening(listener: Callable[[Call], None]) -> Iterator[None]:
    """Give each call that this thread makes to `listener`, instead of making it."""
    before = _listening.to
    _listening.to = listener
    try:
        yield
    finally:
        _listening.to = before


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
        self.worker = Value(code, function.args[1])

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
        self._pointers = [index for index, kind in enumerate(arguments.values()) if "*" in kind]
        self._run: Callable[[bytes, int], None] | None = None
        self._entry = 0
        self._engine: Any = None

    def __call__(self, *values: float, threads: int | None = None) -> None:
        """Run it on as many threads as torch has; it returns when all is done, and lets go of the interpreter.

        Args:
            values: of the arguments.
            threads: at most so many; 1 for work that is done before others have woken up.

        Raises:
            ConfigError: at the first call: this machine cannot run kernels.
        """
        run = self._run or self.compile()
        if threads is None:
            threads = torch.get_num_threads()
        if threads > pool.asked_for():
            pool.grow(threads)
        packed = self._pack(*values)
        if _listening.to is not None:
            addresses = tuple(int(values[index]) for index in self._pointers)
            _listening.to(Call(self._entry, packed, threads, addresses))
        else:
            run(packed, threads)

    def compile(self) -> Callable[[bytes, int], None]:
        """Make the machine code, once; raises as the first call does."""
        with _compiling:
            if self._run is None:
                pool.begin()
                self._engine = machine_code(self.llvm_ir())
                self._entry = self._engine.get_function_address(self.name)
                self._run = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64)(self._entry)
            return self._run

    def llvm_ir(self) -> str:
        """Return the kernel's source for LLVM."""
        module = ir.Module(self.name)
        worker = ir.Function(module, pool.WORKER, f"{self.name}_worker")
        task = Task(worker, self._arguments)
        self._body(task)
        task.code.builder.ret_void()
        entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, I64]), self.name)
        code = Code(entry)
        values, threads = entry.args
        frame = code.stack(2, I64)
        frame.store(code.whole(0))
        code.builder.store(values, (frame + 1).ir)
        if pool.has_threads():
            is_alone = code.builder.icmp_signed("<=", threads, I64(1))
            with code.builder.if_else(is_alone) as (alone, together):
                with alone:
                    code.builder.call(worker, [frame.ir, I64(0)])
                with together:
                    run = code.external(pool.RUN_NAME, pool.RUN)
                    code.builder.call(run, [code.builder.ptrtoint(worker, I64), frame.ir, threads])
        else:
            code.builder.call(worker, [frame.ir, I64(0)])
        code.builder.ret_void()
        return str(module)


def address(tensor: Tensor | None) -> int:
    """Return where a tensor's first element lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
