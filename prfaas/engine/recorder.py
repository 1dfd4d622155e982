"""Takes down what a forward computes that neither its tokens nor their sequences decide.

While a recorder listens, the forward runs as ever. Kernel calls, and the operations of torch that are
not views, are put on a list in their order, each of which reads and writes memory that stays. What
depends on sequences, positions or values is given to `each_time`, and is called at its place whenever
the list is run.

A recorder would rather fail than be wrong, and then the forward has run plainly: every address that a
recorded call takes must be in memory of the recorder's own or in a tensor that the layers hold; a
value must not leave a tensor, and an operation must be the same function of its inputs each time.

Memory is used again as it was in the forward: a tensor that is gone leaves its room to a later one,
which the list fills later, too; what `each_time` holds is not gone.
"""

import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    torch.Tag.nondeterministic_seeded,
)

Bytes = NDArray[np.uint8]
Step = Callable[["Batch"], None]
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

    def has(self, start: int, num_bytes: int = 1) -> bool:
        """Return whether bytes lie where they will lie as long as the recording is there."""
        return any(
            _covers(regions, start, start + num_bytes) for regions in (self._own, self._held)
        )

    def end(self) -> None:
        """Let nothing be used again."""
        self._views.clear()
        self._free.clear()


def _covers(regions: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    index = bisect_right(regions, start, key=lambda region: region[0]) - 1
    return index >= 0 and end <= regions[index][1]


class Recorder:
    """Records what the thread that enters `recording` does."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._failure: str | None = None
        self._steps: list[Step] = []
        self._calls: list[Call] = []
        self._num_bytes = 0
        self._is_static = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the block; an exception passes, and leaves nothing to use."""
        before, _current.recorder = _current.recorder, self
        try:
            with _Functions(self), _Operations(self), listening(self._take_call):
                yield
            self._end_tape()
        finally:
            _current.recorder = before
            self.memory.end()

    def steps(self) -> tuple[list[Step], int]:
        """Return what was recorded, and its bytes; raises NotRecordableError."""
        if self._failure is not None:
            raise NotRecordableError(self._failure)
        return self._steps, self.memory.nbytes + self._num_bytes

    def is_listening(self) -> bool:
        """Return whether what is computed now is to be recorded."""
        return self._is_static and self._failure is None

    def fail(self, reason: str) -> None:
        """Record no more."""
        self._failure = self._failure or reason

    def each_time(self, step: Step, now: Callable[[], None]) -> None:
        """Call `now`, and `step` at this place whenever the recording is run."""
        self.take_step(step)
        self._is_static = False
        _current.recorder = None
        try:
            with listening(None):
                now()
        finally:
            _current.recorder = self
            self._is_static = True

    def take_step(self, step: Step) -> None:
        """Have `step` called at this place."""
        self._end_tape()
        self._steps.append(step)

    def _take_call(self, call: Call) -> None:
        if not self.is_listening():
            return
        if not all(address == 0 or self.memory.has(address) for address in call.addresses):
            self.fail("a kernel takes memory that is neither the recording's nor the layers'")
        self._calls.append(call)

    def _end_tape(self) -> None:
        if self._calls:
            tape = Tape(self._calls)
            self._num_bytes += tape.nbytes
            self._calls = []
            self._steps.append(lambda _: tape.run())

    def require_known(self, tensors: Iterable[Tensor]) -> None:
        """Raise NotRecordableError if one of them may be gone, or another, next time."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            num_bytes = storage.nbytes()
            if num_bytes and not self.memory.has(storage.data_ptr(), num_bytes):
                raise NotRecordableError("a tensor is neither the recording's nor the layers'")


class _Current(threading.local):
    recorder: Recorder | None = None


_current = _Current()


def current() -> Recorder | None:
    """Return what records this thread now; None inside of `each_time`."""
    return _current.recorder


def by_value(step: Callable[[], None]) -> None:
    """Call `step`, which may look at the values of tensors; if this is recorded, each time."""
    if (recorder := _current.recorder) is None:
        step()
    else:
        recorder.each_time(lambda _: step(), step)


class _Functions(TorchFunctionMode):
    """Watches that no value leaves a tensor."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._recorder.is_listening() and func.__name__ not in FACTS:
            parts = result if isinstance(result, tuple | list) else (result,)
            if not all(part is None or isinstance(part, Tensor) for part in parts):
                self._recorder.fail(f"{func.__name__} gives what may depend on a tensor's values")
        return result


def _require_function(func: Any) -> None:
    """Raise NotRecordableError unless the operation is the same function of its inputs each time."""
    if any(tag in func.tags for tag in CHANGING):
        raise NotRecordableError(f"{func} depends on values, or on chance")


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down torch's operations, and gives their results memory that stays."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = None
        if self._recorder.is_listening():
            try:
                inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                _require_function(func)
                self._recorder.require_known(inputs)
                if func._schema.is_mutable:  # noqa: SLF001  # there is no public name
                    return self._changed(func, args, kwargs, inputs)
                result = func(*args, **kwargs)
                return self._placed(func, args, kwargs, inputs, result)
            except NotRecordableError as error:
                self._recorder.fail(str(error))
        return func(*args, **kwargs) if result is None else result

    def _changed(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor]) -> Any:
        result = func(*args, **kwargs)
        self._recorder.take_step(lambda _: func(*args, **kwargs))
        try:
            self._recorder.require_known(inputs)
        except NotRecordableError as error:  # another memory than before
            self._recorder.fail(str(error))
        return result

    def _placed(
        self, func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor], result: Any
    ) -> Any:
        """Return the result where it is to lie; a view stays as it is."""
        outs = list(result) if isinstance(result, tuple | list) else [result]
        if not all(isinstance(out, Tensor) and out.is_cpu for out in outs):
            raise NotRecordableError(f"{func} does not give a CPU's tensors")
        seen = {x.untyped_storage().data_ptr() for x in inputs}
        if all(out.untyped_storage().data_ptr() in seen for out in outs):
            return result
        memory = self._recorder.memory
        placed = [memory.empty(out.shape, out.stride(), out.dtype) for out in outs]
        if func not in EMPTY:
            is_one = isinstance(result, Tensor)

            def compute(_: object) -> None:
                again = func(*args, **kwargs)
                for out, value in zip(placed, [again] if is_one else again, strict=True):
                    out.copy_(value)

            self._recorder.take_step(compute)
            for out, value in zip(placed, outs, strict=True):
                out.copy_(value)
        return placed[0] if isinstance(result, Tensor) else type(result)(placed)
