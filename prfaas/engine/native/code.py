"""A small language for kernels: Python that runs once and writes LLVM IR.

Values are 64-bit integers, float32 numbers, and vectors of either; operators on them write
instructions. Nothing is reordered: a float operation is rounded once, where it is written, and `fma`
is fused on every machine. So a kernel's bits are those of its source, whatever the vector width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from llvmlite import ir

I1, I8, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
BF16 = ir.IntType(16)  # read as the upper half of a float32
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
POINTER = ir.PointerType()
ELEMENT_BYTES = {I8: 1, BF16: 2, F16: 2, F32: 4, I32: 4, I64: 8}


class Value:
    """A number or a vector; operators write instructions, Python numbers become constants."""

    def __init__(self, code: "Code", value: ir.Value) -> None:
        self.code = code
        self.ir = value

    @property
    def lanes(self) -> int:
        """Of a vector; 1 for a number."""
        return self.ir.type.count if isinstance(self.ir.type, ir.VectorType) else 1

    @property
    def is_float(self) -> bool:
        """Whether it is float32, not integer."""
        return self._element == F32

    @property
    def _element(self) -> ir.Type:
        kind = self.ir.type
        return kind.element if isinstance(kind, ir.VectorType) else kind

    def _with(self, other: "Value | float", whole: str, real: str) -> "Value":
        operand = self.code.like(self, other)
        write = getattr(self.code.builder, real if self.is_float else whole)
        return Value(self.code, write(self.ir, operand.ir))

    def __add__(self, other: "Value | float") -> "Value":
        return self._with(other, "add", "fadd")

    def __sub__(self, other: "Value | float") -> "Value":
        return self._with(other, "sub", "fsub")

    def __mul__(self, other: "Value | float") -> "Value":
        return self._with(other, "mul", "fmul")

    def __truediv__(self, other: "Value | float") -> "Value":
        return self._with(other, "sdiv", "fdiv")

    def __floordiv__(self, other: "Value | int") -> "Value":
        """Of integers that are not negative."""
        return self._with(other, "udiv", "fdiv")

    def __mod__(self, other: "Value | int") -> "Value":
        """Of integers that are not negative."""
        return self._with(other, "urem", "frem")

    def __lshift__(self, bits: int) -> "Value":
        return self._with(bits, "shl", "shl")

    def __rshift__(self, bits: int) -> "Value":
        """Of integers taken as unsigned."""
        return self._with(bits, "lshr", "lshr")

    def __xor__(self, other: "Value | int") -> "Value":
        return self._with(other, "xor", "xor")

    def __neg__(self) -> "Value":
        if self.is_float:
            return Value(self.code, self.code.builder.fneg(self.ir))
        return self.code.like(self, 0) - self

    def _compare(self, sign: str, other: "Value | float") -> "Value":
        builder = self.code.builder
        write = builder.fcmp_ordered if self.is_float else builder.icmp_signed
        return Value(self.code, write(sign, self.ir, self.code.like(self, other).ir))

    def __lt__(self, other: "Value | float") -> "Value":
        return self._compare("<", other)

    def __le__(self, other: "Value | float") -> "Value":
        return self._compare("<=", other)

    def __gt__(self, other: "Value | float") -> "Value":
        return self._compare(">", other)

    def __ge__(self, other: "Value | float") -> "Value":
        return self._compare(">=", other)

    def equals(self, other: "Value | float") -> "Value":
        """Return whether they are equal."""
        return self._compare("==", other)

    def __and__(self, other: "Value") -> "Value":
        return Value(self.code, self.code.builder.and_(self.ir, other.ir))

    def __or__(self, other: "Value") -> "Value":
        return Value(self.code, self.code.builder.or_(self.ir, other.ir))


class Variable:
    """A value that changes; LLVM keeps it in a register."""

    def __init__(self, code: "Code", initial: Value) -> None:
        self._code = code
        with code.builder.goto_entry_block():
            self._place = code.builder.alloca(initial.ir.type)
        self._type = initial.ir.type
        self.set(initial)

    @property
    def value(self) -> Value:
        """What was set last."""
        return Value(self._code, self._code.builder.load(self._place, typ=self._type))

    def set(self, value: Value) -> None:
        """Change it."""
        self._code.builder.store(value.ir, self._place)


class Pointer:
    """An address of elements: int8, float16, bfloat16, float32, int32 or int64."""

    def __init__(self, code: "Code", address: ir.Value, element: ir.Type) -> None:
        self.code = code
        self.ir = address
        self.element = element

    def __add__(self, offset: "Value | int") -> "Pointer":
        """Return the address of an element further on."""
        index = offset.ir if isinstance(offset, Value) else I64(offset)
        moved = self.code.builder.gep(self.ir, [index], source_etype=self.element)
        return Pointer(self.code, moved, self.element)

    def load(self, lanes: int = 1) -> Value:
        """Return the number here, or a vector; 16-bit floats and int8 as float32, int32 as int64."""
        builder = self.code.builder
        element = self.element
        kind = element if lanes == 1 else ir.VectorType(element, lanes)
        loaded = builder.load(self.ir, align=ELEMENT_BYTES[element], typ=kind)
        wide = F32 if element in (BF16, F16, I8, F32) else I64
        wide = wide if lanes == 1 else ir.VectorType(wide, lanes)
        if element == F16:
            loaded = builder.fpext(loaded, wide)
        elif element == I8:
            loaded = builder.sitofp(loaded, wide)
        elif element == I32:
            loaded = builder.sext(loaded, wide)
        elif element == BF16:
            loaded = builder.zext(loaded, I32 if lanes == 1 else ir.VectorType(I32, lanes))
            return self.code.bits_as_float(Value(self.code, loaded) << 16)
        return Value(self.code, loaded)

    def store(self, value: Value) -> None:
        """Put a number or a vector of the element's own type here; float32 is rounded to float16."""
        stored = value.ir
        if self.element == F16:
            kind = F16 if value.lanes == 1 else ir.VectorType(F16, value.lanes)
            stored = self.code.builder.fptrunc(stored, kind)
        self.code.builder.store(stored, self.ir, align=ELEMENT_BYTES[self.element])

    def load_some(self, count: Value, lanes: int) -> Value:
        """Return a vector of the first `count` float32s here, then 0; what follows is not read."""
        code, kind = self.code, ir.VectorType(F32, lanes)
        types = [POINTER, I32, ir.VectorType(I1, lanes), kind]
        load = code.external(f"llvm.masked.load.v{lanes}f32.p0", ir.FunctionType(kind, types))
        is_read = code.ints(range(lanes), I64) < count
        args = [self.ir, I32(ELEMENT_BYTES[F32]), is_read.ir, code.real(0.0, lanes).ir]
        return Value(code, code.builder.call(load, args))

    def store_some(self, value: Value, count: Value) -> None:
        """Put the first `count` lanes of float32s here; what follows is not touched."""
        code, kind, lanes = self.code, value.ir.type, value.lanes
        types = [kind, POINTER, I32, ir.VectorType(I1, lanes)]
        name = f"llvm.masked.store.v{lanes}f32.p0"
        store = code.external(name, ir.FunctionType(ir.VoidType(), types))
        is_written = code.ints(range(lanes), I64) < count
        args = [value.ir, self.ir, I32(ELEMENT_BYTES[F32]), is_written.ir]
        code.builder.call(store, args)

    def fetch_add(self, number: int) -> Value:
        """Add to the int64 here and return what it was, seeing all that other adders wrote before."""
        old = self.code.builder.atomic_rmw("add", self.ir, I64(number), "acq_rel")
        return Value(self.code, old)

    def load_pointer(self, element: ir.Type) -> "Pointer":
        """Return the address that is kept here."""
        return Pointer(self.code, self.code.builder.load(self.ir, align=8, typ=POINTER), element)

    def prefetch(self) -> None:
        """Have the cache line here read, which need not exist."""
        name, kind = "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        read, keep, data = I32(0), I32(3), I32(1)
        self.code.builder.call(self.code.external(name, kind), [self.ir, read, keep, data])


class Code:
    """The function that is being written."""

    def __init__(self, function: ir.Function) -> None:
        self.function = function
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))

    # ------------------------------------------------------------ values

    def whole(self, value: int) -> Value:
        """Return an int64."""
        return Value(self, I64(value))

    def real(self, value: float, lanes: int = 1) -> Value:
        """Return a float32 constant in every lane."""
        return Value(self, F32(value) if lanes == 1 else ir.VectorType(F32, lanes)([value] * lanes))

    def ints(self, values: Sequence[int], element: ir.Type = I32) -> Value:
        """Return a vector of integers: lane numbers, masks."""
        return Value(self, ir.VectorType(element, len(values))(list(values)))

    def like(self, model: Value, value: "Value | float") -> Value:
        """Return `value` as the type of `model`: a constant, or in every lane."""
        if isinstance(value, Value):
            return self.splat(value, model.lanes) if model.lanes > value.lanes == 1 else value
        kind = model.ir.type
        if isinstance(kind, ir.VectorType):
            return Value(self, kind([value] * kind.count))
        return Value(self, kind(value))

    def splat(self, value: Value, lanes: int) -> Value:
        """Return a vector with the number in every lane."""
        kind = ir.VectorType(value.ir.type, lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(undefined, value.ir, I32(0))
        zeros = ir.VectorType(I32, lanes)([0] * lanes)
        return Value(self, self.builder.shuffle_vector(first, undefined, zeros))

    def vector(self, values: Sequence[Value]) -> Value:
        """Return a vector of these numbers."""
        kind = ir.VectorType(values[0].ir.type, len(values))
        made = ir.Constant(kind, ir.Undefined)
        for lane, value in enumerate(values):
            made = self.builder.insert_element(made, value.ir, I32(lane))
        return Value(self, made)

    def shuffle(self, first: Value, second: Value, lanes: Sequence[int]) -> Value:
        """Return a vector of lanes of both; those of the second are numbered on from the first."""
        mask = ir.VectorType(I32, len(lanes))(list(lanes))
        return Value(self, self.builder.shuffle_vector(first.ir, second.ir, mask))

    def transposed(self, rows: Sequence[Value]) -> list[Value]:
        """Return the columns of a square of float32s, as many as a power of 2."""
        count = len(rows)
        low = [lane for first in range(count) for lane in (first, count + first)]
        columns = [*rows]
        for _ in range(count.bit_length() - 1):
            pairs = zip(columns[: count // 2], columns[count // 2 :], strict=True)
            columns = [
                self.shuffle(first, second, lanes)
                for first, second in pairs
                for lanes in (low[:count], low[count:])
            ]
        return columns

    def lane(self, vector: Value, number: int) -> Value:
        """Return one lane."""
        return Value(self, self.builder.extract_element(vector.ir, I32(number)))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return a * b + c, rounded once."""
        return self._intrinsic("fma", a, self.like(a, b), self.like(a, c))

    def maximum(self, a: Value, b: "Value | float") -> Value:
        """Return the larger of float32s; a NaN loses."""
        return self._intrinsic("maxnum", a, self.like(a, b))

    def minimum(self, a: Value, b: "Value | float") -> Value:
        """Return the smaller of float32s; a NaN loses."""
        return self._intrinsic("minnum", a, self.like(a, b))

    def round(self, a: Value) -> Value:
        """Return the nearest whole float32, of two the even one."""
        return self._intrinsic("nearbyint", a)

    def sqrt(self, a: Value) -> Value:
        """Return the square root, rounded as IEEE 754 asks."""
        return self._intrinsic("sqrt", a)

    def absolute(self, a: Value) -> Value:
        """Return |a|."""
        return self._intrinsic("fabs", a)

    def select(self, condition: Value, a: Value, b: "Value | float") -> Value:
        """Return a where the condition holds, else b."""
        return Value(self, self.builder.select(condition.ir, a.ir, self.like(a, b).ir))

    def larger(self, a: Value, b: "Value | int") -> Value:
        """Return the larger of integers."""
        return self.select(a > b, a, b)

    def smaller(self, a: Value, b: "Value | int") -> Value:
        """Return the smaller of integers."""
        return self.select(a < b, a, b)

    def to_int32(self, a: Value) -> Value:
        """Return whole float32s as int32."""
        kind = I32 if a.lanes == 1 else ir.VectorType(I32, a.lanes)
        return Value(self, self.builder.fptosi(a.ir, kind))

    def to_float(self, a: Value) -> Value:
        """Return integers as float32."""
        kind = F32 if a.lanes == 1 else ir.VectorType(F32, a.lanes)
        return Value(self, self.builder.sitofp(a.ir, kind))

    def to_int8(self, condition: Value) -> Value:
        """Return 1 where the condition holds, else 0."""
        kind = I8 if condition.lanes == 1 else ir.VectorType(I8, condition.lanes)
        return Value(self, self.builder.zext(condition.ir, kind))

    def narrow(self, a: Value) -> Value:
        """Return int32s as int8s, in which they must fit."""
        kind = I8 if a.lanes == 1 else ir.VectorType(I8, a.lanes)
        return Value(self, self.builder.trunc(a.ir, kind))

    def bits_as_float(self, a: Value) -> Value:
        """Return the float32s that have these int32s' bits."""
        return Value(
            self, self.builder.bitcast(a.ir, F32 if a.lanes == 1 else ir.VectorType(F32, a.lanes))
        )

    def _intrinsic(
        self, name: Literal["fma", "maxnum", "minnum", "nearbyint", "sqrt", "fabs"], *args: Value
    ) -> Value:
        kind = args[0].ir.type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        function = self.external(f"llvm.{name}.{suffix}", ir.FunctionType(kind, [kind] * len(args)))
        return Value(self, self.builder.call(function, [arg.ir for arg in args]))

    # ------------------------------------------------------------ memory and control

    def variable(self, initial: Value) -> Variable:
        """Return a variable; make it outside of loops whose rounds it is to outlive."""
        return Variable(self, initial)

    def stack(self, count: int, element: ir.Type = F32) -> Pointer:
        """Return room for `count` elements, which ends with the function; for some KiB."""
        with self.builder.goto_entry_block():
            room = self.builder.alloca(ir.ArrayType(element, count))
            room.align = 64
            room.type = POINTER  # of elements, not of the whole
        return Pointer(self, room, element)

    @contextmanager
    def loop(
        self, start: "Value | int", stop: "Value | int", step: "Value | int" = 1
    ) -> Iterator[Value]:
        """Write the block once for every start, start + step, ... below stop."""
        first, end, stride = (
            self.whole(value) if isinstance(value, int) else value for value in (start, stop, step)
        )
        index = self.variable(first)
        head, body, done = (
            self.builder.append_basic_block(name) for name in ("head", "body", "done")
        )
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch((index.value < end).ir, body, done)
        self.builder.position_at_end(body)
        current = index.value
        yield current
        index.set(current + stride)
        self.builder.branch(head)
        self.builder.position_at_end(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Write the block for where the condition holds."""
        with self.builder.if_then(condition.ir):
            yield

    @contextmanager
    def otherwise(self, condition: Value) -> Iterator[None]:
        """Write the block for where the condition does not hold."""
        with self.builder.if_then(self.builder.not_(condition.ir)):
            yield

    def external(self, name: str, kind: ir.FunctionType) -> ir.Function:
        """Return a function that the machine or a library has."""
        module = self.function.module
        found = module.globals.get(name)
        return ir.Function(module, kind, name) if found is None else found

    def call(self, function: ir.Function, *args: "Value | Pointer") -> None:
        """Call a function that `Kernel.function` made."""
        self.builder.call(function, [arg.ir for arg in args])
