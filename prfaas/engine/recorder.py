"""Takes down what a forward computes that neither its tokens nor their sequences decide.

While a recorder listens, a forward goes through its layers and nothing is computed: kernel calls, and
those operations of torch that are not views, are put on a list in their order, each of which reads and
writes memory that stays. What depends on sequences, positions or values is given to `each_time`, and
is on the list, too. Nothing of it can get into the rest, as it has not been called when that is made.
Then the list is run: for this forward and for later ones.

A recorder would rather fail than be wrong: every address that a recorded call takes must be in memory
of the recorder's own or in a tensor that the layers hold; a value must not leave a tensor, and an
operation must be the same function of its inputs each time.

Memory is used again as it would be in the forward: a tensor that is gone leaves its room to a later
one, which the list fills later, too; what `each_time` holds is not gone.
"""

import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from prfaas.engine.native.kernel import listening
from prfaas.engine.native.tape import Call, Tape

if TYPE_CHECKING:
    from prfaas.engine.batch import Batch

LINE_BYTES = 64
FACTS = frozenset(
    {
        "__get__",
        "__len__",
        "data_ptr",
        "dim",
        "element_size",
        "is_contiguous",
        "numel",
        "size",
        "storage_offset",
        "stride",
    }
)
"""What may be asked of a tensor that is not a tensor: it does not depend on values. `__get__` is any
property, such as the shape."""
aten: Any = torch.ops.aten
EMPTY = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
CHANGING = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
)

Bytes = NDArray[np.uint8]
Step = Callable[["Batch"], object]
"""What is called with the batch of the time."""


class NotRecordableError(Exception):
    """Says why a forward cannot be recorded."""


class Memory:
    """Where the tensors of a recording lie, and which others its calls may read.

    Attributes:
        nbytes: of what is the recording's own.
    """

    def __init__(self, held: Sequence[tuple[int, int]], max_bytes: int) -> None:
        """Begin without any.

        Args:
            held: start and end of the memory of tensors that outlive the recording, ascending.
            max_bytes: that the recording may have.
        """
        self.nbytes = 0
        self.buffers: list[Bytes] = []
        self._max_bytes = max_bytes
        self._held = held
        self._own: list[tuple[int, int]] = []
        self._free: dict[int, list[Bytes]] = {}
        self._views: dict[int, weakref.ref[Bytes]] = {}

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor that is not filled; raises NotRecordableError if there is no room."""
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        num_elements = last + 1 if all(shape) else 0
        num_bytes = max(1, -(-num_elements * dtype.itemsize // LINE_BYTES)) * LINE_BYTES
        free = self._free.setdefault(num_bytes, [])
        buffer = free.pop() if free else self._new(num_bytes)
        view = buffer[:]
        number = id(view)

        def give_back(_: object) -> None:
            del self._views[number]
            free.append(buffer)

        # The tensor's storage holds the view, whichever tensors see it.
        self._views[number] = weakref.ref(view, give_back)
        with torch.inference_mode(mode=False):
            flat = torch.from_numpy(view).view(dtype)
            return flat.as_strided(tuple(shape), tuple(strides))

    def _new(self, num_bytes: int) -> Bytes:
        if self.nbytes + num_bytes > self._max_bytes:
            raise NotRecordableError(f"it takes more than {self._max_bytes} bytes")
        room = np.empty(num_bytes + LINE_BYTES, dtype=np.uint8)
        first = -room.ctypes.data % LINE_BYTES
        buffer = room[first : first + num_bytes]
        self.nbytes += num_bytes
        self.buffers.append(buffer)
        insort(self._own, (buffer.ctypes.data, buffer.ctypes.data + num_bytes))
        return buffer

    def owns(self, start: int, num_bytes: int = 1) -> bool:
        """Return whether bytes are the recording's own."""
        return _covers(self._own, start, start + num_bytes)

    def has(self, start: int, num_bytes: int = 1) -> bool:
        """Return whether bytes lie where they will lie as long as the recording is there."""
        return self.owns(start, num_bytes) or _covers(self._held, start, start + num_bytes)

    def end(self) -> None:
        """Let nothing be used again."""
        self._views.clear()
        self._free.clear()


def _covers(regions: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    index = bisect_right(regions, start, key=lambda region: region[0]) - 1
    return index >= 0 and end <= regions[index][1]


class Recorder:
    """Records what the thread that enters `recording` would compute.

    Attributes:
        memory: where it will be computed.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._steps: list[Step] = []
        self._calls: list[Call] = []
        self._num_bytes = 0
        self._named: list[tuple[CellType, object]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the block, of which nothing is computed; raises NotRecordableError inside of it."""
        before, _current.recorder = _current.recorder, self
        try:
            with _Functions(), _Operations(self), listening(self._take_call):
                yield
            self._end_tape()
            if any(cell.cell_contents is not thing for cell, thing in self._named):
                raise NotRecordableError("a name that `each_time` uses got another value later")
        finally:
            _current.recorder = before
            self.memory.end()

    @property
    def steps(self) -> tuple[Step, ...]:
        """What was recorded."""
        return tuple(self._steps)

    @property
    def nbytes(self) -> int:
        """Bytes of what was recorded, and of its memory."""
        return self.memory.nbytes + self._num_bytes

    def each_time(self, step: Step) -> None:
        """Have `step` called at this place; what its names mean now, they must mean at the end."""
        self._named += _named(step)
        self.take_step(step)

    def take_step(self, step: Step) -> None:
        """Have a step called at this place whose names nobody else has."""
        self._end_tape()
        self._steps.append(step)

    def _take_call(self, call: Call) -> None:
        if not all(address == 0 or self.memory.has(address) for address in call.addresses):
            raise NotRecordableError("a kernel takes memory that may be gone, or another's")
        self._calls.append(call)

    def _end_tape(self) -> None:
        if self._calls:
            tape = Tape(self._calls)
            self._num_bytes += tape.nbytes
            self._calls = []
            self._steps.append(lambda _: tape.run())


class _Current(threading.local):
    recorder: Recorder | None = None


_current = _Current()


def current() -> Recorder | None:
    """Return what records this thread now."""
    return _current.recorder


def by_value(step: Callable[[], object]) -> None:
    """Call `step`, which may look at the values of tensors: now, or whenever a recording is run."""
    if (recorder := _current.recorder) is None:
        step()
    else:
        recorder.each_time(lambda _: step())


def _named(thing: object) -> Iterator[tuple[CellType, object]]:
    """Yield the names that a function uses of those around it, and their values."""
    if isinstance(thing, FunctionType):
        for cell in thing.__closure__ or ():
            yield cell, cell.cell_contents
            yield from _named(cell.cell_contents)


class _Functions(TorchFunctionMode):
    """Sees to it that no value leaves a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ not in FACTS:
            parts = result if isinstance(result, tuple | list) else (result,)
            if not all(part is None or isinstance(part, Tensor) for part in parts):
                raise NotRecordableError(f"{func.__name__} gives what may depend on values")
        return result


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down torch's operations, and gives their results memory that stays."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._memory = recorder.memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to skip torch's compiler, which nobody uses here, means to import it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(tag in func.tags for tag in CHANGING):
            raise NotRecordableError(f"{func} depends on values, or on chance")
        inputs = _tensors((args, kwargs))
        for tensor in inputs:
            if not _lies_in(self._memory.has, tensor):
                raise NotRecordableError(f"{func} takes memory that may be gone, or another's")
        # On what happens to be in the memory: only the shapes are wanted.
        if func._schema.is_mutable:  # noqa: SLF001  # there is no public name
            self._require_own(_written(func, args, kwargs))
            result = func(*args, **kwargs)
            self._recorder.take_step(lambda _: func(*args, **kwargs))
            self._require_own(_tensors(result))
            return result
        return self._placed(func, args, kwargs, inputs, func(*args, **kwargs))

    def _require_own(self, tensors: Sequence[Tensor]) -> None:
        if not all(_lies_in(self._memory.owns, tensor) for tensor in tensors):
            raise NotRecordableError("what is written is not the recording's own")

    def _placed(
        self, func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor], result: Any
    ) -> Any:
        """Return the result where it is to lie; a view stays as it is."""
        is_one = isinstance(result, Tensor)
        outs = [result] if is_one else list(result)
        if not all(isinstance(out, Tensor) and out.is_cpu for out in outs):
            raise NotRecordableError(f"{func} does not give a CPU's tensors")
        seen = {x.untyped_storage().data_ptr() for x in inputs}
        if all(out.untyped_storage().data_ptr() in seen for out in outs):
            return result
        placed = [self._memory.empty(out.shape, out.stride(), out.dtype) for out in outs]
        if func not in EMPTY:

            def compute(_: object) -> None:
                again = func(*args, **kwargs)
                for out, value in zip(placed, [again] if is_one else again, strict=True):
                    out.copy_(value)

            self._recorder.take_step(compute)
        return placed[0] if is_one else type(result)(placed)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for branch in tree for tensor in _tensors(branch)]


def _lies_in(holds: Callable[[int, int], bool], tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()
    return not storage.nbytes() or holds(storage.data_ptr(), storage.nbytes())


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    names = func._schema.arguments  # noqa: SLF001
    values = [
        *zip(names, args, strict=False),
        *((n, kwargs[n.name]) for n in names if n.name in kwargs),
    ]
    return _tensors([value for name, value in values if name.is_write])
