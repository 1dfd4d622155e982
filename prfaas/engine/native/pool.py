"""The threads that share a kernel's units.

The thread that calls a kernel computes from the first unit on, and helpers take units if they are
awake: nobody waits for a helper that has not come, only for one that is in the middle of a unit. So a
core that another process holds costs its share of the work, where a team with a barrier would wait for
it at the end of every kernel, a few hundred times a token.

A helper looks for the next kernel for SPINS rounds, then sleeps on a futex. One kernel at a time has
the helpers; others that run meanwhile have their own thread alone.
"""

import ctypes
import os
import platform
import sys
from functools import cache
from threading import Lock, Thread
from typing import Any

from llvmlite import ir

from prfaas.engine.native.code import I32, I64, POINTER
from prfaas.engine.native.machine import define, machine_code
from prfaas.log import get_logger

WORKER = ir.FunctionType(ir.VoidType(), [POINTER, I64])
"""A kernel's code for one thread: its frame, and the thread's number."""
RUN = ir.FunctionType(ir.VoidType(), [I64, POINTER, I64])
"""Address of the worker, its frame, and how many threads may share it."""
RUN_NAME, SERVE_NAME = "prfaas_run", "prfaas_serve"
SPINS = 4000
"""Some 100 us: about twice what Python takes from kernel to kernel."""
MAX_WAITS = 1000
"""Rounds for which a helper in the middle of a unit is waited for without giving way."""
LINE_WORDS = 16
"""Words that threads write are that far apart: two cache lines."""
STATE, SLEEPERS, OWNER, JOB = (LINE_WORDS * index for index in range(4))
OPEN, NUM_ACTIVE, EPOCH = 1 << 15, (1 << 15) - 1, 1 << 16
"""The state: an epoch that each kernel raises, whether helpers may join, and how many are in it."""
FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
FUTEX_WAIT, FUTEX_WAKE = 128, 129
MAX_SLEEPERS = 1 << 30
PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}

_words = (ctypes.c_int64 * (4 * LINE_WORDS))()
_growing = Lock()


class _Helpers:
    asked_for = 1
    """Threads that some kernel has wanted, its caller among them; there may be fewer."""
    started = 0


def has_threads() -> bool:
    """Return whether kernels can have helpers on this machine."""
    return sys.platform == "linux" and platform.machine() in FUTEX_NUMBERS


def grow(num_threads: int) -> None:
    """Have helpers enough for kernels of `num_threads`, if this machine can; they stay for good."""
    with _growing:
        _Helpers.asked_for = max(_Helpers.asked_for, num_threads)
        while has_threads() and _Helpers.started < num_threads - 1:
            number = _Helpers.started + 1
            helper = Thread(target=_serve(), args=(number,), name=f"kernel-{number}", daemon=True)
            try:
                helper.start()
            except RuntimeError as error:  # a limit of threads: those there are do all
                get_logger().warning("kernels.too_few_threads", threads=number, error=str(error))
                return
            _Helpers.started = number


def asked_for() -> int:
    """Return the most threads that `grow` has been asked for."""
    return _Helpers.asked_for


def forget_helpers() -> None:
    """Begin anew in a process that was forked, which has none of its parent's threads."""
    _Helpers.asked_for, _Helpers.started = 1, 0
    ctypes.memset(_words, 0, ctypes.sizeof(_words))


@cache
def _serve() -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(_addresses()[SERVE_NAME])


@cache
def _addresses() -> dict[str, int]:
    os.register_at_fork(after_in_child=forget_helpers)
    # Helpers read the words, and run the code, until the process is over.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_words))
    engine = machine_code(_source())
    found = {name: engine.get_function_address(name) for name in (RUN_NAME, SERVE_NAME)}
    engine.detach()
    return found


@cache
def begin() -> None:
    """Let kernels that are compiled from now on call RUN_NAME."""
    if has_threads():
        define(RUN_NAME, _addresses()[RUN_NAME])
    else:
        get_logger().warning("kernels.single_threaded")


def _source() -> str:
    module = ir.Module("pool")
    _Runner(module).write()
    _Helper(module).write()
    return str(module)


class _Writer:
    """A function of the pool in the making."""

    def __init__(self, module: ir.Module, name: str, kind: ir.FunctionType) -> None:
        self.module = module
        self.function = ir.Function(module, kind, name)
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))

    def word(self, index: int) -> ir.Value:
        """Return the address of one of the shared words."""
        address = ctypes.addressof(_words) + 8 * index
        return self.builder.inttoptr(I64(address), POINTER)

    def load(self, index: int) -> ir.Value:
        """Return a word, and see all that was written before it was."""
        return self.builder.load_atomic(self.word(index), "seq_cst", 8, typ=I64)

    def add(self, index: int, number: int) -> None:
        """Add to a word at once."""
        self.builder.atomic_rmw("add", self.word(index), I64(number), "seq_cst")

    def exchanged(self, index: int, old: ir.Value, new: ir.Value) -> ir.Value:
        """Write `new` if the word is `old`; return whether it was."""
        pair = self.builder.cmpxchg(self.word(index), old, new, "seq_cst", "seq_cst")
        return self.builder.extract_value(pair, 1)

    def has(self, state: ir.Value, bits: int) -> ir.Value:
        """Return whether any of the bits is set."""
        return self.builder.icmp_unsigned("!=", self.builder.and_(state, I64(bits)), I64(0))

    def pause(self) -> None:
        """Leave the core to its other thread for a moment."""
        name, values = PAUSES[platform.machine()]
        kind = ir.FunctionType(ir.VoidType(), [I32] * len(values))
        self.call(name, kind, [I32(value) for value in values])

    def futex(self, operation: int, value: ir.Value) -> None:
        """Sleep while the state's low half is `value`, or wake `value` sleepers."""
        kind = ir.FunctionType(I64, [I64], var_arg=True)
        number = I64(FUTEX_NUMBERS[platform.machine()])
        address = self.word(STATE)  # its first half: both machines are little-endian
        rest = [I64(operation), value, I64(0), I64(0), I64(0)]
        self.call("syscall", kind, [number, address, *rest])

    def call(self, name: str, kind: ir.FunctionType, values: list[ir.Value]) -> None:
        """Call a function of the C library or of the processor."""
        found = self.module.globals.get(name)
        self.builder.call(found or ir.Function(self.module, kind, name), values)


class _Runner(_Writer):
    """run(worker, frame, threads): the thread that calls a kernel."""

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, RUN_NAME, RUN)

    def write(self) -> None:
        builder = self.builder
        worker, frame, threads = self.function.args
        is_owner = self.exchanged(OWNER, I64(0), I64(1))
        with builder.if_else(is_owner) as (together, alone):
            with alone:
                _work(builder, worker, frame, I64(0))
            with together:
                self._open(worker, frame, threads)
                _work(builder, worker, frame, I64(0))
                self._close()
        builder.ret_void()

    def _open(self, worker: ir.Value, frame: ir.Value, threads: ir.Value) -> None:
        builder = self.builder
        for index, value in enumerate((worker, frame, threads)):
            builder.store(value, self.word(JOB + index))
        # Closed and with nobody in it, the state has changed for no one since.
        self.add(STATE, EPOCH + OPEN)
        is_anyone = builder.icmp_signed(">", self.load(SLEEPERS), I64(0))
        with builder.if_then(is_anyone):
            self.futex(FUTEX_WAKE, I64(MAX_SLEEPERS))

    def _close(self) -> None:
        builder = self.builder
        builder.atomic_rmw("and", self.word(STATE), I64(~OPEN), "seq_cst")
        spins = builder.alloca(I64)
        builder.store(I64(0), spins)
        wait, done = (builder.append_basic_block(name) for name in ("wait", "done"))
        builder.branch(wait)
        builder.position_at_end(wait)
        self.pause()
        count = builder.add(builder.load(spins, typ=I64), I64(1))
        builder.store(count, spins)
        with builder.if_then(builder.icmp_signed(">", count, I64(MAX_WAITS))):
            self.call("sched_yield", ir.FunctionType(I32, []), [])  # it may need this very core
        builder.cbranch(self.has(self.load(STATE), NUM_ACTIVE), wait, done)
        builder.position_at_end(done)
        builder.atomic_rmw("xchg", self.word(OWNER), I64(0), "seq_cst")


class _Helper(_Writer):
    """serve(number): a helper, for good."""

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, SERVE_NAME, ir.FunctionType(ir.VoidType(), [I64]))

    def write(self) -> None:
        builder = self.builder
        seen, spins = builder.alloca(I64), builder.alloca(I64)
        for place in (seen, spins):
            builder.store(I64(0), place)
        look, join, idle, spin, sleep = (
            builder.append_basic_block(name) for name in ("look", "join", "idle", "spin", "sleep")
        )
        builder.branch(look)
        builder.position_at_end(look)
        state = self.load(STATE)
        builder.cbranch(self._is_wanted(state, seen), join, idle)

        builder.position_at_end(join)
        joined = self.exchanged(STATE, state, builder.add(state, I64(1)))
        with builder.if_then(joined):
            # The job stays as it is until all who joined have left.
            worker, frame, threads = (
                builder.load(self.word(JOB + index), typ=kind)
                for index, kind in enumerate((I64, POINTER, I64))
            )
            (number,) = self.function.args
            with builder.if_then(builder.icmp_signed("<", number, threads)):
                _work(builder, worker, frame, number)
            builder.store(self._epoch(state), seen)
            self.add(STATE, -1)
        builder.store(I64(0), spins)
        builder.branch(look)

        builder.position_at_end(idle)
        count = builder.add(builder.load(spins, typ=I64), I64(1))
        builder.store(count, spins)
        builder.cbranch(builder.icmp_signed("<", count, I64(SPINS)), spin, sleep)
        builder.position_at_end(spin)
        self.pause()
        builder.branch(look)

        builder.position_at_end(sleep)
        self.add(SLEEPERS, 1)  # before the last look: who opens a job looks after
        last = self.load(STATE)
        with builder.if_then(builder.not_(self._is_wanted(last, seen))):
            self.futex(FUTEX_WAIT, builder.and_(last, I64((1 << 32) - 1)))
        self.add(SLEEPERS, -1)
        builder.store(I64(0), spins)
        builder.branch(look)

    def _is_wanted(self, state: ir.Value, seen: ir.Value) -> ir.Value:
        """Return whether there is an open job that this helper has not been in."""
        last = self.builder.load(seen, typ=I64)
        is_new = self.builder.icmp_unsigned("!=", self._epoch(state), last)
        return self.builder.and_(self.has(state, OPEN), is_new)

    def _epoch(self, state: ir.Value) -> ir.Value:
        return self.builder.lshr(state, I64(16))


def _work(builder: ir.IRBuilder, worker: ir.Value, frame: ir.Value, number: ir.Value) -> None:
    builder.call(builder.inttoptr(worker, WORKER.as_pointer()), [frame, number])
