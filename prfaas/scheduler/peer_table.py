"""The peers side by side: what a decision compares of each, in few and short stretches of memory."""

from array import array
from collections.abc import Iterable, Mapping
from math import inf

from prfaas.scheduler.view import PeerView


class PeerTable:
    """Peers by name, each with its view; the earliest first token of all is found at once."""

    def __init__(self, peers: Iterable[PeerView] = ()) -> None:
        self._views: list[PeerView] = []
        self._index: dict[str, int] = {}
        # Numbers, not views: a hundred of those are a thousand places in memory, most of them cold.
        self._queue_s = array("d")
        self._token_s = array("d")
        self._backlog_s = array("d")
        self._byte_s = array("d")
        self._trip_s = array("d")
        self._clear_until_s = array("d")
        for peer in peers:
            self.put(peer)

    def __len__(self) -> int:
        """Return how many peers there are."""
        return len(self._views)

    def __contains__(self, name: str) -> bool:
        """Return whether there is a peer of that name."""
        return name in self._index

    def __getitem__(self, name: str) -> PeerView:
        """Return a peer's view. Raises KeyError for a name that there is not."""
        return self._views[self._index[name]]

    @property
    def views(self) -> tuple[PeerView, ...]:
        """Return all views, in the order in which the peers came."""
        return tuple(self._views)

    def put(self, view: PeerView) -> None:
        """Take a view for what is known of its peer."""
        index = self._index.setdefault(view.peer, len(self._views))
        if index == len(self._views):
            self._views.append(view)
            for column in self._columns:
                column.append(0.0)
        self._views[index] = view
        is_known = view.token_s is not None
        self._token_s[index] = view.token_s or 0.0
        self._queue_s[index] = view.queue_s if is_known else 0.0
        self._backlog_s[index] = view.backlog_s if is_known else 0.0
        self._byte_s[index] = view.byte_s if is_known else 0.0
        self._trip_s[index] = view.trip_s if is_known else 0.0
        self._clear_until_s[index] = view.clear_until_s

    def remove(self, name: str) -> None:
        """Forget a peer. Raises KeyError for a name that there is not."""
        gone = self._index.pop(name)
        del self._views[gone]
        for column in self._columns:
            del column[gone]
        self._index = {view.peer: index for index, view in enumerate(self._views)}

    def best(
        self,
        *,
        num_tokens: int,
        hits: Mapping[str, int],
        num_kv_bytes: int,
        num_tail_bytes: int,
        now_s: float,
    ) -> PeerView | None:
        """Return the usable peer with the earliest first token; None if none is usable.

        `hits` are leading tokens that peers have, by name. One that was heard lately comes before all that
        were not: if none was, all are tried. Those of unknown rate come first, by load; ties by name.
        """
        to_compute = self._to_compute(num_tokens, hits)
        streamed_bytes = num_kv_bytes - num_tail_bytes
        best, best_key = None, (inf, 0, "")
        stale, stale_key = None, (inf, 0, "")
        best_s = inf
        for index, (tokens, queue_s, token_s, backlog_s, byte_s, trip_s) in enumerate(
            zip(
                to_compute,
                self._queue_s,
                self._token_s,
                self._backlog_s,
                self._byte_s,
                self._trip_s,
                strict=True,
            )
        ):
            # As PeerView.ttft_s, without its calls: there may be many peers.
            computed_s, streamed_s = tokens * token_s, streamed_bytes * byte_s
            ttft_s = queue_s + (computed_s if computed_s > streamed_s else streamed_s)  # noqa: FURB136
            if backlog_s + streamed_s > ttft_s:
                ttft_s = backlog_s + streamed_s
            ttft_s += num_tail_bytes * byte_s + trip_s
            if ttft_s > best_s:
                continue
            peer = self._views[index]
            key = (ttft_s, peer.num_inflight_tokens, peer.peer)
            if now_s > self._clear_until_s[index]:
                if peer.refusal(now_s) is not None:
                    continue
                if peer.is_stale(now_s):
                    if stale is None or key < stale_key:
                        stale, stale_key = peer, key
                    continue
            if best is None or key < best_key:
                best, best_key, best_s = peer, key, ttft_s
        return best or stale

    def _to_compute(self, num_tokens: int, hits: Mapping[str, int]) -> "array[float]":
        tokens = array("d", (num_tokens,)) * len(self._views)
        for name, hit_tokens in hits.items():
            index = self._index.get(name)
            if index is not None:
                tokens[index] -= hit_tokens
        return tokens

    def check(self) -> None:
        """Re-derive the numbers from the views."""
        assert self._index == {view.peer: index for index, view in enumerate(self._views)}
        derived = PeerTable(self._views)
        assert self._columns == derived._columns

    @property
    def _columns(self) -> tuple["array[float]", ...]:
        return (
            self._queue_s,
            self._token_s,
            self._backlog_s,
            self._byte_s,
            self._trip_s,
            self._clear_until_s,
        )
