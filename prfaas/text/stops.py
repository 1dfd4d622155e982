"""Stop strings in a stream of text, whatever pieces it comes in."""

from collections import deque
from collections.abc import Iterable

from prfaas.errors import BadRequest


class StopMatcher:
    """Passes one choice's text through until the first stop string.

    The stop string that is complete first wins, and of those complete at the same character the longest: so
    the text let through does not depend on how it was cut into pieces. Text is held back only while it is
    the beginning of a stop string. Each character costs constant time, amortised (Aho and Corasick, 1975).
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Build the automaton.

        Raises:
            BadRequest: a stop string is empty.
        """
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._match_length = [0]
        """Per node: length of the longest stop string that ends there; 0 is none."""
        for stop in stops:
            self._add(stop)
        self._link()
        self._node = 0
        self._held: deque[str] = deque()
        """The last characters: as many as the node is deep."""
        self._is_stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Return (text that may be sent, whether a stop string was completed).

        What follows a completed stop string, and the stop string itself, is dropped.
        """
        sent: list[str] = []
        if self._is_stopped:
            return "", True
        for character in text:
            self._held.append(character)
            self._node = self._next(self._node, character)
            length = self._match_length[self._node]
            sent += self._take(len(self._held) - (length or self._depth[self._node]))
            if length:
                self._held.clear()
                self._is_stopped = True
                break
        return "".join(sent), self._is_stopped

    def finish(self) -> str:
        """Return the text held back: the beginning of a stop string that was never completed."""
        self._node = 0
        return "".join(self._take(len(self._held)))

    def _take(self, count: int) -> list[str]:
        return [self._held.popleft() for _ in range(count)]

    def _add(self, stop: str) -> None:
        if not stop:
            raise BadRequest("a stop string must not be empty", param="stop")
        node = 0
        for character in stop:
            child = self._children[node].get(character)
            if child is None:
                child = len(self._children)
                self._children[node][character] = child
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._fallback.append(0)
                self._match_length.append(0)
            node = child
        self._match_length[node] = len(stop)

    def _link(self) -> None:
        """Set each node's fallback, the longest proper suffix that is also a node, level by level."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._children[node].items():
                self._fallback[child] = self._next(self._fallback[node], character)
                queue.append(child)
            if not self._match_length[node]:
                self._match_length[node] = self._match_length[self._fallback[node]]

    def _next(self, node: int, character: str) -> int:
        while True:
            child = self._children[node].get(character)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self._fallback[node]
