"""The peers side by side: what a decision compares of each, in few and short stretches of memory."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, NamedTuple

from prfaas.scheduler.view import PeerView


@dataclass(frozen=True, slots=True)
class Booking:
    """What of a peer's view changes with each decision; see there."""

    num_inflight: int
    num_inflight_tokens: int
    num_inflight_bytes: int
    spent_bytes: float
    spent_at_s: float


class _Row(NamedTuple):
    """The numbers of one peer; its view has them, too, among many others, and most of its memory is cold.

    While its rate is unknown all are 0 but for the last.
    """

    least_s: float
    """No first token is earlier. Rows are in this order."""
    peer: str
    queue_s: float
    fixed_s: float
    token_s: float
    backlog_s: float
    byte_s: float
    trip_s: float
    clear_until_s: float


class PeerTable:
    """Peers by name, each with its view; the earliest first token is found without a look at all of them."""

    def __init__(self, peers: Iterable[PeerView] = ()) -> None:
        self._views: dict[str, PeerView] = {}
        self._booked: dict[str, Booking] = {}
        """What is newer than the views."""
        self._row_of: dict[str, _Row] = {}
        self._rows: list[_Row] = []
        for peer in peers:
            self.put(peer)

    def __len__(self) -> int:
        """Return how many peers there are."""
        return len(self._views)

    def __contains__(self, name: str) -> bool:
        """Return whether there is a peer of that name."""
        return name in self._views

    def __getitem__(self, name: str) -> PeerView:
        """Return a peer's view. Raises KeyError for a name that there is not."""
        view = self._views[name]
        booked = self._booked.pop(name, None)
        if booked is not None:
            view = self._views[name] = replace(
                view,
                num_inflight=booked.num_inflight,
                num_inflight_tokens=booked.num_inflight_tokens,
                num_inflight_bytes=booked.num_inflight_bytes,
                spent_bytes=booked.spent_bytes,
                spent_at_s=booked.spent_at_s,
            )
        return view

    @property
    def views(self) -> tuple[PeerView, ...]:
        """Return all views, in the order in which the peers came."""
        return tuple([self[name] for name in self._views])

    def put(self, view: PeerView) -> None:
        """Take a view for all that is known of its peer."""
        self._booked.pop(view.peer, None)
        self._views[view.peer] = view
        self._place(
            _row(view, view.num_inflight, view.num_inflight_tokens, view.num_inflight_bytes)
        )

    def book(self, name: str, booked: Booking) -> None:
        """Let a peer have these counts in flight. Raises KeyError for a name that there is not.

        Its view is made anew once somebody asks for it: no decision has to wait for that.
        """
        view = self._views[name]
        self._booked[name] = booked
        self._place(
            _row(view, booked.num_inflight, booked.num_inflight_tokens, booked.num_inflight_bytes)
        )

    def remove(self, name: str) -> None:
        """Forget a peer. Raises KeyError for a name that there is not."""
        del self._views[name]
        self._booked.pop(name, None)
        del self._rows[bisect_left(self._rows, self._row_of.pop(name))]

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
        streamed_bytes, hit_of = num_kv_bytes - num_tail_bytes, hits.get
        best, best_s, stale, stale_s = "", inf, "", inf
        for (
            least_s,
            name,
            queue_s,
            fixed_s,
            token_s,
            backlog_s,
            byte_s,
            trip_s,
            clear_until_s,
        ) in self._rows:
            if least_s > best_s:
                break
            # As PeerView.ttft_s, without its calls: there may be many peers.
            work_s = fixed_s + (num_tokens - hit_of(name, 0)) * token_s
            streamed_s = streamed_bytes * byte_s
            if streamed_s > work_s:
                work_s = streamed_s
            ttft_s = queue_s + work_s
            if backlog_s + streamed_s > ttft_s:
                ttft_s = backlog_s + streamed_s
            ttft_s += num_tail_bytes * byte_s + trip_s
            if ttft_s > best_s:
                continue
            standing = "fresh" if now_s <= clear_until_s else self._standing(name, now_s)
            if standing == "fresh" and self._precedes(name, ttft_s, best, best_s):
                best, best_s = name, ttft_s
            elif standing == "stale" and self._precedes(name, ttft_s, stale, stale_s):
                stale, stale_s = name, ttft_s
        chosen = best or stale
        return self[chosen] if chosen else None

    def check(self) -> None:
        """Re-derive the rows from the views."""
        rows = [
            _row(view, view.num_inflight, view.num_inflight_tokens, view.num_inflight_bytes)
            for view in self.views
        ]
        assert {row.peer: row for row in rows} == self._row_of
        assert sorted(rows) == self._rows
        assert not self._booked

    def _place(self, row: _Row) -> None:
        old = self._row_of.get(row.peer)
        if old is not None:
            del self._rows[bisect_left(self._rows, old)]
        insort(self._rows, row)
        self._row_of[row.peer] = row

    def _standing(self, name: str, now_s: float) -> Literal["fresh", "stale", "refused"]:
        view = self[name]
        if view.refusal(now_s) is not None:
            return "refused"
        return "stale" if view.is_stale(now_s) else "fresh"

    def _precedes(self, name: str, ttft_s: float, other: str, other_s: float) -> bool:
        if not other or ttft_s != other_s:
            return not other or ttft_s < other_s
        ours, theirs = self[name], self[other]
        return (ours.num_inflight_tokens, name) < (theirs.num_inflight_tokens, other)


def _row(
    view: PeerView, num_inflight: int, num_inflight_tokens: int, num_inflight_bytes: int
) -> _Row:
    if view.token_s is None:
        return _Row(0.0, view.peer, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, view.clear_until_s)
    queue_s = view.queue_with_s(num_inflight, num_inflight_tokens)
    return _Row(
        least_s=queue_s + view.trip_s,
        peer=view.peer,
        queue_s=queue_s,
        fixed_s=view.fixed_s,
        token_s=view.token_s,
        backlog_s=view.backlog_with_s(num_inflight_bytes),
        byte_s=view.byte_s,
        trip_s=view.trip_s,
        clear_until_s=view.clear_until_s,
    )
