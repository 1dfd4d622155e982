"""Cached prefixes on their way to the cluster of a prefill that begins behind them."""

from collections.abc import Callable, Sequence
from functools import partial

from prfaas.config.traces import MOONCAKE_BLOCK_TOKENS
from prfaas.scheduler.forecast import Profiles
from prfaas.scheduler.monitor import Verdict
from prfaas.scheduler.policies import Decision
from prfaas.scheduler.router import Outcome
from prfaas.scheduler.ways import Movement, behind
from prfaas.sim.events import Events
from prfaas.sim.journey import Journey, Tally
from prfaas.sim.kv_link import KvLink
from prfaas.sim.prefix_lru import PrefixLru
from prfaas.sim.remote_cluster import RemoteCluster
from prfaas.sim.round_trip import RoundTrip
from prfaas.sim.scheduling import Scheduling
from prfaas.sim.transfer import Transfer

OnMoved = Callable[[Outcome], object]
"""Called once, with what became of a movement."""


def other_end(decision: Decision) -> int:
    """Return the PrfaaS cluster that a prefix comes from, or goes to."""
    assert decision.movement is not None, "nothing moves"
    index = decision.movement.source if decision.remote is None else decision.remote
    assert index is not None, "one end of a link is a PrfaaS cluster"
    return index


class PrefixMove:
    """One movement, until the prefix is there or is given up.

    It is judged as a transfer is: stuck when nothing is heard, and too slow when the destination
    would sooner have computed the prefix.
    """

    def __init__(
        self,
        events: Events,
        link: KvLink,
        *,
        journey: Journey,
        decision: Decision,
        saved_s: float,
        stall_timeout_s: float,
        on_ended: OnMoved,
    ) -> None:
        """Begin nothing yet; `saved_s` is what the prefill takes less for the prefix."""
        assert decision.movement is not None, "nothing moves"
        self.index = other_end(decision)
        """The PrfaaS cluster at the one end; the other one is the local cluster."""
        self.movement: Movement = decision.movement
        self.decision = decision
        self.journey = journey
        self.saved_s = saved_s
        self.began_s: float | None = None
        """None while the request for it is on its way."""
        self._events = events
        self._on_ended = on_ended
        self._transfer: Transfer | None = Transfer(
            events,
            link,
            num_bytes=self.movement.num_bytes,
            num_tokens=self.movement.num_tokens,
            pieces=1,
            stall_timeout_s=stall_timeout_s,
            local_estimate_s=saved_s,
            on_arrived=self._arrived,
            on_given_up=self._given_up,
        )

    @property
    def is_to_here(self) -> bool:
        """Return whether the local cluster gets it."""
        return self.decision.remote is None

    def begin(self) -> None:
        """Send it, all of it at once: it is computed."""
        if self._transfer is not None:
            self.began_s = self._events.now_s
            self._transfer.begin(0.0)
            self._transfer.finish()

    def lose(self) -> None:
        """Give it up if it is not through: the cluster at the other end is gone."""
        if self._transfer is not None:
            self._transfer.give_up()
            self._end("transfer_failed")

    def _arrived(self) -> None:
        self._end("completed")

    def _given_up(self, verdict: Verdict) -> None:
        self._end("peer_stuck" if verdict == "stuck" else "slower_than_local")

    def _end(self, outcome: Outcome) -> None:
        self._transfer = None  # it refers to this
        self._on_ended(outcome)


class Movements:
    """All movements of a deployment that have not ended, each for one prefill.

    begun = arrived + given up + on their way, always.
    """

    def __init__(
        self,
        events: Events,
        *,
        cache: PrefixLru,
        remotes: Sequence[RemoteCluster],
        scheduling: Scheduling,
        profiles: Profiles,
        trip: RoundTrip,
        tally: Tally,
        stall_timeout_s: float,
        on_moved: Callable[[PrefixMove, Outcome], object],
    ) -> None:
        """Begin with none; `on_moved` lets the prefill begin, behind the prefix or without it."""
        self._events = events
        self._cache = cache
        self._remotes = remotes
        self._scheduling = scheduling
        self._profiles = profiles
        self._trip = trip
        self._tally = tally
        self._stall_timeout_s = stall_timeout_s
        self._on_moved = on_moved
        self._moving: dict[Journey, PrefixMove] = {}

    @property
    def num_to_here(self) -> int:
        """Return the local prefills that wait for a prefix."""
        return sum(move.is_to_here for move in self._moving.values())

    def works_here_s(self) -> list[float]:
        """Return the seconds of each prefill that will join the local queue behind its prefix."""
        return [
            self._profiles.local_work_s(behind(journey.prompt, move.movement, None))
            for journey, move in self._moving.items()
            if move.is_to_here
        ]

    def begin(self, journey: Journey, decision: Decision) -> None:
        """Send a prefix ahead of a prefill; one that comes here is asked for first."""
        assert decision.movement is not None, "nothing moves"
        prompt, profiles, remote = journey.prompt, self._profiles, decision.remote
        moved = behind(prompt, decision.movement, remote)
        if remote is None:
            saved_s = profiles.local_work_s(prompt) - profiles.local_work_s(moved)
        else:
            saved_s = profiles.remote_work_s(prompt, remote) - profiles.remote_work_s(moved, remote)
        cluster = self._remotes[other_end(decision)]
        self._moving[journey] = move = PrefixMove(
            self._events,
            cluster.link if remote is None else cluster.link_there,
            journey=journey,
            decision=decision,
            saved_s=saved_s,
            stall_timeout_s=self._stall_timeout_s,
            on_ended=partial(self._ended, journey),
        )
        self._tally.num_movements += 1
        if remote is None:
            self._trip.there(move.begin)
        else:
            move.begin()

    def lose(self, index: int) -> None:
        """Give up what moves to or from a cluster that is gone."""
        for move in list(self._moving.values()):
            if move.index == index:
                move.lose()

    def check(self) -> None:
        """Assert that none was lost or made."""
        tally = self._tally
        ended = tally.num_moved + tally.num_moves_given_up
        assert tally.num_movements == ended + len(self._moving)
        assert all(journey is move.journey for journey, move in self._moving.items())

    def _ended(self, journey: Journey, outcome: Outcome) -> None:
        """What was given up is known at once; what is through is there half a round trip later."""
        then = partial(self._out, journey, outcome)
        if outcome != "completed":
            then()
        elif self._moving[journey].is_to_here:
            self._trip.back(then)
        else:
            self._trip.there(then)

    def _out(self, journey: Journey, outcome: Outcome) -> None:
        move = self._moving.pop(journey)
        self._scheduling.moved(journey.prompt, move.decision, self._events.now_s)
        if outcome == "completed":
            self._tally.num_moved += 1
            self._tally.moved_bytes += move.movement.num_bytes
            num_blocks = move.movement.num_tokens // MOONCAKE_BLOCK_TOKENS
            cache = self._cache if move.is_to_here else self._remotes[move.index].cache
            cache.add(journey.request.block_ids[:num_blocks])
        else:
            self._tally.num_moves_given_up += 1
        self._on_moved(move, outcome)
