"""The decode instances of a cluster; a sequence joins the one with the fewest."""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from math import ceil
from typing import Literal

from prfaas.scheduler.profile import DecodeProfile
from prfaas.sim.decode import Sequence as Stepped
from prfaas.sim.decode import SteppedDecode, fluid_decode
from prfaas.sim.events import Events
from prfaas.sim.sharing import Share, SharedServer

LostSequence = Callable[[int], object]
"""Called with the tokens that it has still to get."""
OnPlace = Callable[[int], object]
"""Called with the instance that a sequence has joined."""


class _Seat:
    """A sequence at an instance."""

    __slots__ = ("_index", "_on_done", "_pool", "on_lost", "place")

    def __init__(
        self, pool: "DecodePool", index: int, on_done: Callable[[], object], on_lost: LostSequence
    ) -> None:
        self._pool = pool
        self._index = index
        self._on_done = on_done
        self.on_lost = on_lost
        self.place: Share | Stepped | None = None

    def end(self) -> None:
        """Give the place back: it has all its tokens."""
        self._pool.left(self._index, self)
        self.place = None  # it refers to this
        self._on_done()


class DecodePool:
    """Instances, and who is where.

    Every instance that is up is in `_queue` with its number of sequences, once; entries of other
    numbers are skipped when they come up.
    """

    def __init__(
        self,
        events: Events,
        profile: DecodeProfile,
        *,
        num_instances: int,
        max_batch: int,
        model: Literal["fluid", "stepped"] = "fluid",
    ) -> None:
        make = fluid_decode if model == "fluid" else SteppedDecode
        self._make = partial(make, events, profile, max_batch=max_batch)
        self._servers: list[SharedServer | SteppedDecode] = [
            self._make() for _ in range(num_instances)
        ]
        self._here: list[dict[_Seat, None]] = [{} for _ in self._servers]
        self._is_up = [True] * num_instances
        self._queue = [(0, index) for index in range(num_instances)]
        self._queued = set(self._queue)
        self._drained: dict[int, Callable[[], object]] = {}
        self._homeless: list[tuple[int, Callable[[], object], LostSequence, OnPlace | None]] = []

    @property
    def num_up(self) -> int:
        """Return the instances that take sequences."""
        return sum(self._is_up) - len(self._drained)

    @property
    def num_sequences(self) -> int:
        """Return the sequences that decode or wait for a place."""
        return sum(len(here) for here in self._here) + len(self._homeless)

    def submit(
        self,
        num_tokens: int,
        on_done: Callable[[], object],
        on_lost: LostSequence,
        on_place: OnPlace | None = None,
    ) -> None:
        """Let a sequence in; without an instance it waits for one."""
        index = self._least_loaded()
        if index is None:
            self._homeless.append((num_tokens, on_done, on_lost, on_place))
            return
        seat = _Seat(self, index, on_done, on_lost)
        seat.place = self._servers[index].submit(num_tokens, seat.end)
        self._here[index][seat] = None
        self._enqueue(index)
        if on_place is not None:
            on_place(index)

    def _enqueue(self, index: int) -> None:
        entry = (len(self._here[index]), index)
        if entry not in self._queued:
            self._queued.add(entry)
            heappush(self._queue, entry)

    def _least_loaded(self) -> int | None:
        """Take the instance with the fewest sequences out of the queue; None without an instance."""
        while self._queue:
            load, index = entry = heappop(self._queue)
            self._queued.remove(entry)
            is_open = self._is_up[index] and index not in self._drained
            if is_open and load == len(self._here[index]):
                return index
        return None

    def lose(self, num_instances: int) -> list[int]:
        """Take instances away at once, with all their sequences; return which."""
        up = [i for i, is_up in enumerate(self._is_up) if is_up and i not in self._drained]
        for index in up[:num_instances]:
            self._is_up[index] = False
            server, here = self._servers[index], self._here[index]
            self._here[index] = {}
            for seat in here:
                assert seat.place is not None, "taken as it came"
                left = _tokens_left(server, seat.place)
                _withdraw(server, seat.place)
                seat.place = None
                seat.on_lost(left)
        return up[:num_instances]

    def restore(self, indices: Sequence[int]) -> None:
        """Bring lost ones back, empty."""
        for index in indices:
            self._is_up[index] = True
            self._take_in(index)

    def _take_in(self, index: int) -> None:
        """Let an empty instance have sequences, those without a home first."""
        self._enqueue(index)
        waiting, self._homeless = self._homeless, []
        for sequence in waiting:
            self.submit(*sequence)

    def _leave_if_drained(self, index: int) -> None:
        if index in self._drained and not self._here[index]:
            self._is_up[index] = False
            self._drained.pop(index)()

    def add(self) -> None:
        """Have one more instance."""
        self._servers.append(self._make())
        self._here.append({})
        self._is_up.append(True)
        self._take_in(len(self._servers) - 1)

    def drain(self, on_drained: Callable[[], object]) -> None:
        """Let the instance with the fewest sequences end them, and then take it away.

        Raises:
            ValueError: there is no instance.
        """
        index = self._least_loaded()
        if index is None:
            raise ValueError("no instance to drain")
        self._drained[index] = on_drained
        self._leave_if_drained(index)

    def check(self) -> None:
        """Assert that each instance has the sequences that were put there."""
        assert sorted(self._queue) == sorted(self._queued)
        for index, server in enumerate(self._servers):
            server.check()
            assert server.num_active + server.num_waiting == len(self._here[index])
            if self._is_up[index] and index not in self._drained:
                assert (len(self._here[index]), index) in self._queued
            elif not self._is_up[index]:
                assert not self._here[index]

    def left(self, index: int, seat: _Seat) -> None:
        """Take note that a sequence has left its instance."""
        del self._here[index][seat]
        if index in self._drained:
            self._leave_if_drained(index)
        else:
            self._enqueue(index)


def _tokens_left(server: SharedServer | SteppedDecode, place: Share | Stepped) -> int:
    if isinstance(server, SteppedDecode):
        assert isinstance(place, Stepped)
        return place.tokens_left
    assert isinstance(place, Share)
    return max(1, ceil(server.amount_left(place)))


def _withdraw(server: SharedServer | SteppedDecode, place: Share | Stepped) -> None:
    if isinstance(server, SteppedDecode):
        assert isinstance(place, Stepped)
        server.withdraw(place)
    else:
        assert isinstance(place, Share)
        server.withdraw(place)
