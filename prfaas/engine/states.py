"""What one linear layer carries from token to token, at exact positions.

A state is the fold of all tokens before its position and has no inverse: it serves a continuation
at that position and no other. Its tensors are never written once held, so forks share them, and a
forward that failed can be run again from where it began.
"""

import math
from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from prfaas.engine.mixer_spec import MixerSpec

CPU = torch.device("cpu")
State = tuple[Tensor, ...]
"""Float32, contiguous; in the order of the spec's states: convolution rows, then the recurrence."""


class LayerState:
    """One layer's state at every position where it is held.

    Attributes:
        shapes: of the tensors of an exported state.
        nbytes: of one exported state.
        wanted: positions that the running forward captures, ascending.
    """

    def __init__(
        self,
        spec: MixerSpec,
        *,
        kv_dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        self.shapes: tuple[tuple[int, ...], ...] = tuple(s.shape for s in spec.states)
        self._dtypes = [kv_dtype if s.dtype == "activation" else torch.float32 for s in spec.states]
        self.nbytes = sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self._dtypes, strict=True)
        )
        self._device = device
        self.wanted: tuple[int, ...] = ()
        self._held: dict[int, State] = {}
        self._arriving: dict[int, _Arrival] = {}

    @property
    def positions(self) -> tuple[int, ...]:
        """Where a state is held, ascending; 0 is not listed, it always works."""
        return tuple(sorted(self._held.keys() - {0}))

    def holds(self, position: int) -> bool:
        """Return whether a forward can go on at `position`."""
        return position == 0 or position in self._held

    def at(self, position: int) -> State:
        """Return the state after `position` tokens; at 0, zeros.

        Raises:
            ValueError: there is none.
        """
        if position == 0 and 0 not in self._held:
            self._held[0] = tuple(torch.zeros(shape, device=self._device) for shape in self.shapes)
        if position not in self._held:
            raise ValueError(f"no state at {position} tokens; there is one at {self.positions}")
        return self._held[position]

    def hold(self, position: int, state: State) -> None:
        """Keep `state`, whose tensors nobody writes any more, as that after `position` tokens."""
        assert tuple(tuple(tensor.shape) for tensor in state) == self.shapes
        self._held[position] = state

    def begin(self, position: int, wanted: Sequence[int], *, kept: int = 0) -> None:
        """Forget all positions but `position`, where a forward starts, and `kept`.

        Args:
            position: of the first token.
            wanted: positions that the forward captures.
            kept: another position, whose state stays if it is held.

        Raises:
            ValueError: there is no state at `position`; nothing is forgotten then.
        """
        state = self.at(position)
        self._held = {at: held for at, held in self._held.items() if at == kept != 0}
        self._held[position] = state
        self._arriving.clear()
        self.wanted = tuple(sorted(wanted))

    def fork(self) -> "LayerState":
        """Return an independent one that holds the same states; not what has come in part."""
        other = copy(self)
        other._held, other._arriving = dict(self._held), {}  # noqa: SLF001  # our own
        return other

    def write_to(self, position: int, out: memoryview, start: int) -> None:
        """Write bytes start, ... of the state at `position` until `out` is full.

        The bytes of a state are its tensors one after another, little-endian: convolution rows in
        the dtype of K and V, all else float32.

        Raises:
            ValueError: there is no state at `position`, or it ends before `out` does.
        """
        self._check_slice(out, start)
        offset = 0
        for tensor, dtype in zip(self.at(position), self._dtypes, strict=True):
            end = offset + tensor.numel() * dtype.itemsize
            low, high = max(start, offset), min(start + out.nbytes, end)
            if low < high:
                source = tensor.to(dtype).reshape(-1).view(torch.uint8)
                part = source[low - offset : high - offset].cpu().numpy()
                out.cast("B")[low - start : high - start] = part.data
            offset = end

    def read_from(self, position: int, data: memoryview, start: int) -> None:
        """Take bytes start, ... of a state at `position`; it is held once every byte has come.

        Slices may come in any order, and more than once.

        Raises:
            ValueError: the slice reaches past the state's end.
        """
        self._check_slice(data, start)
        arrival = self._arriving.get(position)
        if arrival is None:
            arrival = self._arriving[position] = _Arrival(self.shapes, self._dtypes)
        if arrival.take(data, start):
            self._held[position] = tuple(t.to(self._device) for t in arrival.tensors())
            del self._arriving[position]

    def _check_slice(self, data: memoryview, start: int) -> None:
        if start < 0 or start + data.nbytes > self.nbytes:
            end = start + data.nbytes
            raise ValueError(f"bytes {start} to {end} of a state of {self.nbytes} bytes")


class _Arrival:
    """A state of which some bytes have come, in the memory that it will stay in."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> None:
        self._tensors = [
            torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        self._gaps = [(0, sum(tensor.nbytes for tensor in self._tensors))]

    def take(self, data: memoryview, start: int) -> bool:
        """Copy bytes start, ...; return whether all are here."""
        stop = start + data.nbytes
        source, offset = np.frombuffer(data, dtype=np.uint8), 0
        for tensor in self._tensors:
            low, high = max(start, offset), min(stop, offset + tensor.nbytes)
            if low < high:
                room = tensor.view(-1).view(torch.uint8).numpy()
                room[low - offset : high - offset] = source[low - start : high - start]
            offset += tensor.nbytes
        pieces = [(low, min(high, start)) for low, high in self._gaps]
        pieces += [(max(low, stop), high) for low, high in self._gaps]
        self._gaps = sorted((low, high) for low, high in pieces if low < high)
        return not self._gaps

    def tensors(self) -> Iterator[Tensor]:
        """Yield the state in float32; nobody takes more."""
        return (tensor.float() for tensor in self._tensors)
