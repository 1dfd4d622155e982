"""Whatever nodes say and requests do: nothing goes where it must not, and every count comes back."""

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.scheduler.fleet import Fleet
from prfaas.scheduler.heartbeat import Heartbeat, LinkReport
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.placing import (
    DECODE_REASONS,
    NO_NODE_REASONS,
    PLACEMENT_REASONS,
    NoNode,
    Placement,
    Wanted,
)
from prfaas.scheduler.policies import POLICIES
from prfaas.scheduler.rebalancer import RebalanceOptions
from prfaas.scheduler.router import Outcome
from prfaas.scheduler.standing import FleetLimits
from tests.scheduler.fleets import beat, kv_bytes, prefill_beat

PD = [f"d{i}:1" for i in range(4)]
PRFAAS = [f"p{i}:1" for i in range(2)]
NODES = [*PD, *PRFAAS]
LIMITS = FleetLimits()
ODD_RATES = st.one_of(st.none(), st.floats(), st.floats(1.0, 1e5))
COUNTS = st.one_of(st.integers(0, 20), st.integers(-5, 10**15))
OUTCOMES: list[Outcome] = [
    "completed",
    "cancelled",
    "peer_down",
    "peer_overloaded",
    "transfer_failed",
]


class FleetMachine(RuleBasedStateMachine):
    """A fleet whose nodes come, go, change and lie, and a model of what each said last."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet: Fleet | None = None
        self.now_s = 100.0
        self.said: dict[str, tuple[Heartbeat, str, float]] = {}
        self.failed: dict[str, float] = {}
        """When a node failed, of those not heard since."""
        self.live: dict[str, Placement] = {}
        self.first: set[str] = set()
        self.num = 0

    @precondition(lambda self: self.fleet is None)
    @rule(policy=st.sampled_from([None, *POLICIES]), numbers=st.sampled_from([None, 0, 4096]))
    def begin(self, policy: Any, numbers: int | None) -> None:
        options = SchedulerOptions(policy=policy, threshold_tokens=numbers)
        rebalance = RebalanceOptions(period_s=1.0, dwell_s=0.0, confirmations=1, num_prompts=8)
        self.fleet = Fleet(options, limits=LIMITS, rebalance=rebalance)

    @property
    def it(self) -> Fleet:
        assert self.fleet is not None
        return self.fleet

    @precondition(lambda self: self.fleet is not None)
    @rule(seconds=st.sampled_from([0.0, 0.1, 0.9, 2.0, 2.6, 5.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.fleet is not None)
    @rule(
        node=st.sampled_from(NODES),
        ready=st.booleans(),
        draining=st.sampled_from([False, False, False, True]),
        mode=st.sampled_from(["both", "both", "decode", "prefill"]),
        cluster=st.sampled_from(["east", "east", "west"]),
        epoch=st.integers(1, 3),
        numerics=st.sampled_from(["n", "n", "m"]),
        rate=ODD_RATES,
        step_s=ODD_RATES,
        counts=st.tuples(COUNTS, COUNTS, COUNTS, COUNTS),
        free=st.floats(),
        link=ODD_RATES,
        usable=st.booleans(),
    )
    def hear(self, node: str, ready: bool, draining: bool, mode: Any, cluster: str, epoch: int, numerics: str, rate: float | None, step_s: float | None, counts: tuple[int, ...], free: float, link: float | None, usable: bool) -> None:  # fmt: skip
        changes: dict[str, Any] = {
            "is_ready": ready,
            "is_draining": draining,
            "epoch": epoch,
            "prefill_tokens_per_s": rate,
            "decode_step_s": step_s,
            "num_running": counts[0],
            "num_waiting": counts[1],
            "max_running": counts[2],
            "num_waiting_tokens": counts[3],
            "free_pages_fraction": free,
            "free_kv_bytes": None if counts[0] % 2 else counts[3],
        }
        if node in PD:
            links = {name: LinkReport(rtt_s=link, bytes_per_s=link) for name in NODES}
            peers = {PRFAAS[0]: usable}
            said = beat(
                node, mode=mode, cluster=cluster, links=links, peers_usable=peers, **changes
            )
        else:
            said = prefill_beat(node, **changes)
        if self.it.heard(said, self.now_s, numerics=numerics):
            self.said[node] = (said, numerics, self.now_s)
            self.failed.pop(node, None)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def keep_all_alive(self, data: st.DataObject) -> None:
        for node, (said, numerics, _) in self.said.items():
            if self.it.heard(said, self.now_s, numerics=numerics):
                self.said[node] = (said, numerics, self.now_s)
                self.failed.pop(node, None)

    @precondition(lambda self: self.said)
    @rule(
        num_tokens=st.one_of(st.integers(1, 200), st.integers(1, 100_000)),
        hits=st.dictionaries(st.sampled_from(NODES), st.integers(-10, 120_000), max_size=4),
        force=st.sampled_from([None, None, None, "local", "remote"]),
        numerics=st.sampled_from([None, None, "n", "m"]),
        excluded=st.frozensets(st.sampled_from(NODES), max_size=3),
        num_sequences=st.sampled_from([1, 1, 3]),
        max_tokens=st.sampled_from([None, 1, 10_000]),
    )
    def place(self, num_tokens: int, hits: dict[str, int], force: Any, numerics: str | None, excluded: frozenset[str], num_sequences: int, max_tokens: int | None) -> None:  # fmt: skip
        wanted = Wanted(
            num_tokens=num_tokens,
            hits=hits,
            kv_bytes=kv_bytes,
            force=force,
            numerics=numerics,
            excluded=excluded,
            num_sequences=num_sequences,
            max_tokens=max_tokens,
        )
        explained = self.it.explain(wanted, self.now_s)
        request_id = f"r{self.num}"
        answer = self.it.place(request_id, wanted, self.now_s)
        assert explained.answer == answer
        assert {each.node for each in explained.candidates} == set(self.said)
        if isinstance(answer, NoNode):
            assert answer.reason in NO_NODE_REASONS
            assert answer.retry_after_s >= 1.0
            assert not any(self.can_decode(node, wanted) for node in self.said)
            return
        self.num += 1
        self.live[request_id] = answer
        assert answer.reason in PLACEMENT_REASONS
        assert answer.decode_reason in DECODE_REASONS
        assert answer.predicted_ttft_s is None or answer.predicted_ttft_s >= 0
        self.judge(answer, wanted)

    def judge(self, answer: Placement, wanted: Wanted) -> None:
        decoder = self.said[answer.decode_at][0]
        assert decoder.role == "pd"
        assert decoder.mode != "prefill"
        used = {answer.decode_at, answer.prefill_at, answer.prefix_from} - {None}
        for node in used:
            assert node is not None
            said, numerics, heard_s = self.said[node]
            assert said.is_ready
            assert not said.is_draining
            assert self.now_s - heard_s < LIMITS.dead_after_s
            assert node not in self.failed
            assert node not in wanted.excluded
            assert wanted.numerics in (None, numerics)
        if answer.prefill_at is not None:
            said = self.said[answer.prefill_at][0]
            assert answer.prefill_at != answer.decode_at
            assert said.mode == "prefill"
            assert said.role == "prefill" or said.cluster == decoder.cluster
            assert wanted.force != "local"
        if answer.prefix_from is None:
            assert answer.prefix_tokens == 0
        else:
            assert answer.prefix_from != answer.decode_at
            assert wanted.hit_of(answer.decode_at) < answer.prefix_tokens < wanted.num_tokens
            assert answer.prefix_tokens == wanted.hit_of(answer.prefix_from)

    def can_decode(self, node: str, wanted: Wanted) -> bool:
        """Return whether nothing whatever speaks against a node."""
        said, numerics, heard_s = self.said[node]
        member = next(each for each in self.it.members(self.now_s) if each.node == node)
        return (
            said.role == "pd"
            and said.mode != "prefill"
            and member.wanted_mode is None
            and member.state in ("ready", "late")
            and node not in wanted.excluded
            and wanted.numerics in (None, numerics)
            and self.now_s - heard_s < LIMITS.dead_after_s
        )

    @precondition(lambda self: set(self.live) - self.first)
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES))
    def first_token(self, data: st.DataObject, outcome: Outcome) -> None:
        request_id = data.draw(st.sampled_from(sorted(set(self.live) - self.first)))
        self.it.first_token(request_id, self.now_s, outcome=outcome)
        self.first.add(request_id)

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["completed", "cancelled", "refused", "failed"]),
        route_outcome=st.sampled_from([None, *OUTCOMES]),
        output_tokens=st.integers(0, 1000),
        retry_after_s=st.floats(),
    )
    def end(self, data: st.DataObject, outcome: Any, route_outcome: Any, output_tokens: int, retry_after_s: float) -> None:  # fmt: skip
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        answer = self.live.pop(request_id)
        self.first.discard(request_id)
        self.it.ended(
            request_id,
            outcome,
            self.now_s,
            route_outcome=route_outcome,
            output_tokens=output_tokens,
            retry_after_s=retry_after_s,
        )
        if outcome == "failed" and answer.decode_at in self.said:
            self.failed[answer.decode_at] = self.now_s
        elif outcome == "completed":
            self.failed.pop(answer.decode_at, None)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.said)))
        self.it.left(node, self.now_s)
        del self.said[node]
        self.failed.pop(node, None)

    @precondition(lambda self: self.fleet is not None)
    @rule()
    def expire(self) -> None:
        for node in self.it.expire(self.now_s):
            del self.said[node]
            self.failed.pop(node, None)

    @precondition(lambda self: self.fleet is not None)
    @rule()
    def convert(self) -> None:
        for node, mode in self.it.conversions(self.now_s):
            said, numerics, _ = self.said[node]
            assert said.mode in ("prefill", "decode")
            assert mode != said.mode
            assert self.it.wanted_mode(node) == mode
            if self.it.heard(replace(said, mode=mode), self.now_s, numerics=numerics):
                self.said[node] = (replace(said, mode=mode), numerics, self.now_s)
                self.failed.pop(node, None)

    @invariant()
    def counts_are_right(self) -> None:
        if self.fleet is None:
            return
        self.fleet.check()
        members = self.fleet.members(self.now_s)
        assert [member.node for member in members] == sorted(self.said)
        inflight = sum(member.num_inflight for member in members)
        prefills = sum(
            answer.prefill_at is not None
            for request_id, answer in self.live.items()
            if request_id not in self.first
        )
        assert inflight <= len(self.live) + prefills, "nodes may have left, or begun a new role"
        if not self.live:
            assert inflight == 0


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
