"""Kernel calls that are made again, one after another, without Python between them."""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir

from prfaas.engine.native.code import I64, POINTER
from prfaas.engine.native.machine import machine_code

WORDS = 3
"""Of a call on the tape: the kernel's address, that of its values, and how many threads."""


class Call(NamedTuple):
    """A call of a kernel.

    Attributes:
        entry: the kernel's address.
        values: packed, as the kernel takes them.
        threads: at most so many.
        addresses: those among the values.
    """

    entry: int
    values: bytes
    threads: int
    addresses: tuple[int, ...]


class Tape:
    """Calls in their order; the memory that their values point to must stay."""

    def __init__(self, calls: Sequence[Call]) -> None:
        values = b"".join(call.values for call in calls)
        self._values = (ctypes.c_char * max(1, len(values))).from_buffer_copy(values or b"\0")
        at = ctypes.addressof(self._values)
        self._words = array("q")
        for call in calls:
            self._words.extend((call.entry, at, call.threads))
            at += len(call.values)
        self._place = self._words.buffer_info()[0]
        self._num_calls = len(calls)
        self._walk = _walk()

    @property
    def nbytes(self) -> int:
        """Bytes of the calls."""
        return len(self._values) + len(self._words) * self._words.itemsize

    def run(self) -> None:
        """Make the calls; lets go of the interpreter meanwhile."""
        self._walk(self._place, self._num_calls)


@cache
def _walk() -> Callable[[int, int], None]:
    engine = machine_code(_source())
    address = engine.get_function_address("walk")
    walk: Any = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address)
    walk.engine = engine  # holds the code
    found: Callable[[int, int], None] = walk
    return found


def _source() -> str:
    module = ir.Module("tape")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64, I64]), "walk")
    place, num_calls = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    first = builder.inttoptr(place, POINTER)
    index = builder.alloca(I64)
    builder.store(I64(0), index)
    head, body, done = (function.append_basic_block(name) for name in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    number = builder.load(index, typ=I64)
    builder.cbranch(builder.icmp_signed("<", number, num_calls), body, done)
    builder.position_at_end(body)
    start = builder.mul(number, I64(WORDS))
    entry, values, threads = (
        builder.load(builder.gep(first, [builder.add(start, I64(word))], source_etype=I64), typ=I64)
        for word in range(WORDS)
    )
    kind = ir.FunctionType(ir.VoidType(), [POINTER, I64])
    call = builder.inttoptr(entry, kind.as_pointer())
    builder.call(call, [builder.inttoptr(values, POINTER), threads])
    builder.store(builder.add(number, I64(1)), index)
    builder.branch(head)
    builder.position_at_end(done)
    builder.ret_void()
    return str(module)
