"""Forwards of few rows that are run from a recording of their layers.

A decode step of a small model would spend a third of its time in Python between kernels. What its
layers compute is the same from step to step, but for whose rows they are: it is recorded once for a
number of rows (`recorder.py`), and run for all sequences and positions. The bits are the same.

Shapes: T rows, D model dim.
"""

import gc
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType

import torch
from torch import Tensor

from prfaas.engine.batch import Batch, Rows
from prfaas.engine.recorder import Memory, Recorder
from prfaas.log import get_logger

MAX_ROWS = 32
"""With more, kernels take most of the time."""
MAX_BYTES = 64 << 20
"""Of all recordings of a model."""
NUM_PLAIN = 2
"""Forwards of a number of rows before they are recorded, which takes about as long as one."""

Layers = Callable[[Tensor, Rows], object]
"""Takes the residual stream through all layers, in place."""


class Recordings:
    """The recordings of one model's layers, for different numbers of rows. One thread at a time.

    Attributes:
        num_recorded: recordings that were made.
        num_run: forwards that were run from a recording.
    """

    def __init__(
        self, held: object, *, max_bytes: int = MAX_BYTES, num_plain: int = NUM_PLAIN
    ) -> None:
        """Begin without any.

        Args:
            held: what holds the tensors that layers compute with, for as long as this is used.
            max_bytes: of all of them; those used longest ago go first. 0: none is made.
            num_plain: forwards of a number of rows before they are recorded.
        """
        self.num_recorded = self.num_run = 0
        self._held = held
        self._max_bytes = max_bytes
        self._plain_first = num_plain
        self._regions: list[tuple[int, int]] | None = None
        self._num_threads = 0
        self._recordings: OrderedDict[int, _Recording] = OrderedDict()
        self._num_plain: Counter[int] = Counter()
        self._refused: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all recordings."""
        return sum(recording.nbytes for recording in self._recordings.values())

    def clear(self) -> None:
        """Forget all recordings, and what could not be recorded."""
        self._recordings.clear()
        self._num_plain.clear()
        self._refused.clear()

    def run(self, x_TD: Tensor, batch: Batch, layers: Layers) -> Tensor:
        """Return the stream after the layers; it is void at the next call, and `x_TD` after this."""
        num_rows = len(x_TD)
        if not x_TD.is_cpu or num_rows > MAX_ROWS or not self._max_bytes:
            layers(x_TD, Rows(batch))
            return x_TD
        if self._num_threads != torch.get_num_threads():
            self.clear()  # calls say how many threads share them
            self._num_threads = torch.get_num_threads()
        if (recording := self._recordings.get(num_rows)) is not None:
            self._recordings.move_to_end(num_rows)
            self.num_run += 1
            return recording.run(x_TD, batch)
        if num_rows in self._refused or self._num_plain[num_rows] < self._plain_first:
            self._num_plain[num_rows] += 1
            layers(x_TD, Rows(batch))
            return x_TD
        return self._record(x_TD, batch, layers)

    def _record(self, x_TD: Tensor, batch: Batch, layers: Layers) -> Tensor:
        num_rows = len(x_TD)
        try:
            recording = self._recorded(x_TD, layers)
        except Exception as error:  # noqa: BLE001  # a fault of the layers shows in the plain run
            self._refused.add(num_rows)
            get_logger().debug("recording.refused", rows=num_rows, reason=str(error))
            layers(x_TD, Rows(batch))
            return x_TD
        self.num_recorded += 1
        self._num_plain[num_rows] = 0
        while self._recordings and self.nbytes + recording.nbytes > self._max_bytes:
            self._recordings.popitem(last=False)
        self._recordings[num_rows] = recording
        self.num_run += 1
        return recording.run(x_TD, batch)

    def _recorded(self, x_TD: Tensor, layers: Layers) -> "_Recording":
        """Return the recording; raises what keeps it from being made."""
        if self._regions is None:
            self._regions = _regions(self._held)
        recorder = Recorder(Memory(self._regions, self._max_bytes))
        own_TD = recorder.memory.empty(x_TD.shape, x_TD.stride(), x_TD.dtype)
        with recorder.recording():
            layers(own_TD, Rows(None, len(x_TD)))
        return _Recording(own_TD, recorder)


class _Recording:
    def __init__(self, x_TD: Tensor, recorder: Recorder) -> None:
        self.nbytes = recorder.nbytes
        self._x_TD = x_TD
        self._steps = recorder.steps
        self._memory = recorder.memory  # what the steps' kernels read and write

    def run(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """Return the stream; an error of a step passes, and the recording can be run again."""
        self._x_TD.copy_(x_TD)
        for step in self._steps:
            step(batch)
        return self._x_TD


def _regions(held: object) -> list[tuple[int, int]]:
    """Return start and end of the memory of all tensors that can be reached, ascending."""
    storages = (tensor.untyped_storage() for tensor in _tensors(held))
    found = ((storage.data_ptr(), storage.nbytes()) for storage in storages)
    return sorted({(start, start + num_bytes) for start, num_bytes in found if num_bytes})


def _tensors(held: object) -> Iterator[Tensor]:
    seen: set[int] = set()
    found: list[object] = [held]
    while found:
        thing = found.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType | str | int | float):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            if thing.is_cpu:
                yield thing
        elif isinstance(thing, FunctionType):  # not what its module knows besides
            found += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__]
        else:
            found += gc.get_referents(thing)
