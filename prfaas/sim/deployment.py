"""Simulates a deployment: every request from its arrival to its last token.

A request waits for a prefill instance of the cluster that the policy chose, computes its first token
there, moves its KVCache over the link if that is elsewhere, and decodes in the local cluster.
arrivals = done + in flight, always.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf

from prfaas.config.simulation_table import Rebalancing, SimulationOptions
from prfaas.config.traces import TraceRequest
from prfaas.scheduler.dispatch import Dispatcher
from prfaas.scheduler.forecast import PrefillView, Profiles, Prompt, RemoteView
from prfaas.scheduler.holding import HeldPrompts
from prfaas.scheduler.planner import Plan
from prfaas.scheduler.policies import Decision, Policy, PolicyName, make_policy
from prfaas.scheduler.rebalancer import Rebalancer
from prfaas.scheduler.router import Outcome
from prfaas.scheduler.throughput import ThroughputModel
from prfaas.scheduler.ways import behind
from prfaas.sim.breakers import Sent
from prfaas.sim.chrome_trace import Recorder
from prfaas.sim.conversion import Conversions
from prfaas.sim.decode_pool import DecodePool
from prfaas.sim.events import Action, Events
from prfaas.sim.failures import Failures
from prfaas.sim.journey import Journey, Tally
from prfaas.sim.movement import Movements, PrefixMove
from prfaas.sim.prefix_lru import PrefixLru
from prfaas.sim.remote_cluster import RemotePrefill, remote_clusters, view_of
from prfaas.sim.round_trip import RoundTrip
from prfaas.sim.scheduling import Scheduling
from prfaas.sim.station import Station


class Deployment:
    """A plan's instances, serving requests under one policy."""

    def __init__(
        self,
        model: ThroughputModel,
        plan: Plan,
        *,
        policy: PolicyName,
        options: SimulationOptions,
        seed: int,
        recorder: Recorder | None = None,
    ) -> None:
        assert model.local.decode is not None, "the model needs one"
        self.events = Events()
        self.tally = Tally()
        self._options = options
        self._profiles = Profiles(local=model.local, remote=model.prfaas)
        self._trip = RoundTrip(
            self.events,
            rtt_s=0.0 if model.link is None else model.link.rtt_s,
            jitter_s=options.jitter_s,
            seed=seed,
        )
        self._recorder = recorder
        if recorder is not None:
            recorder.begin(self.events)
        self.prefill = Station(self.events, num_servers=plan.shape.num_prefill)
        self.decode = DecodePool(
            self.events,
            model.local.decode,
            num_instances=plan.shape.num_decode,
            max_batch=model.batch,
            model=options.decode,
        )
        self.cache = PrefixLru(capacity_tokens=options.local_cache_tokens)
        self.remotes = remote_clusters(
            self.events,
            num_instances=plan.shape.num_prfaas,
            link=model.link,
            options=options,
            on_report=self._saw,
        )
        self._scheduling = Scheduling(
            Dispatcher(
                self._made(policy, plan.threshold_tokens or 0.0),
                self._profiles,
                remotes=tuple(remote.view() for remote in self.remotes),
                max_egress_fraction=options.max_egress_fraction,
                moves_cache=options.moves_cache,
            ),
            self.remotes,
        )
        self._held: HeldPrompts[Journey] = HeldPrompts(period_s=options.ttft_slo_s)
        self._is_releasing = False
        self._remote: dict[Journey, RemotePrefill] = {}
        self._movements = Movements(
            self.events,
            cache=self.cache,
            remotes=self.remotes,
            scheduling=self._scheduling,
            profiles=self._profiles,
            trip=self._trip,
            tally=self.tally,
            stall_timeout_s=options.stall_timeout_s,
            on_moved=self._moved,
        )
        self._num_returning = 0
        """First tokens on the way back."""
        self._is_over = False
        self._rebalancer: Rebalancer | None = None
        self._conversions: Conversions | None = None
        if options.rebalance is not None:
            self._convert(model, plan, policy, options.rebalance)
        self._failures = Failures(
            self.events,
            options.failures,
            prefill=self.prefill,
            decode=self.decode,
            remotes=self.remotes,
            on_cluster_lost=self._cluster_lost,
            on_restored=self._release,
        )

    def _convert(
        self, model: ThroughputModel, plan: Plan, policy: PolicyName, rebalance: Rebalancing
    ) -> None:
        """Let t and the local instances' roles follow the prompts."""
        self._rebalancer = Rebalancer(model, plan.kind, rebalance.options)
        self._conversions = Conversions(
            self.events,
            self._rebalancer,
            prefill=self.prefill,
            decode=self.decode,
            num_prfaas=plan.shape.num_prfaas,
            period_s=rebalance.options.period_s,
            conversion_s=rebalance.conversion_s,
            is_over=lambda: self._is_over,
            on_threshold=lambda t: self._scheduling.follow(self._made(policy, t)),
        )

    def _made(self, policy: PolicyName, threshold_tokens: float) -> Policy:
        return make_policy(
            policy,
            profiles=self._profiles,
            threshold_tokens=threshold_tokens,
            ttft_slo_s=self._options.ttft_slo_s,
        )

    @property
    def num_conversions(self) -> int:
        """Return the instances that have changed their role."""
        return 0 if self._conversions is None else self._conversions.num_done

    @property
    def num_held(self) -> int:
        """Return the prompts that the policy holds back."""
        return len(self._held)

    @property
    def egress_bytes(self) -> float:
        """Return the KVCache that has come over all links."""
        return sum(remote.link.sent_bytes for remote in self.remotes)

    def start(self, requests: Iterable[TraceRequest]) -> None:
        """Let requests arrive, in the order of their times."""
        self._next(iter(requests))

    def check(self) -> None:
        """Assert that every part kept every request, and that the counts add up."""
        self.events.check()
        self.prefill.check()
        self.decode.check()
        for remote in self.remotes:
            remote.check()
        self._held.check()
        here = self.prefill.num_waiting + self.prefill.num_serving + self.decode.num_sequences
        self._movements.check()
        moving_here = self._movements.num_to_here
        there = len(self._remote) + moving_here + self._num_returning
        assert self.tally.num_in_flight == here + there + len(self._held), "one is lost, or twice"
        assert self.tally.num_done <= len(self.tally.ttfts_s) <= self.tally.num_arrived
        self._scheduling.check(num_remote=len(self._remote), num_moving_here=moving_here)

    def _counters(self) -> dict[tuple[str, str], float]:
        """Return queues, sequences and egress as they are, for a trace."""
        found = {
            ("local prefill", "queue"): float(self.prefill.num_waiting),
            ("local decode", "sequences"): float(self.decode.num_sequences),
        }
        for index, remote in enumerate(self.remotes):
            found[f"prfaas-{index} prefill", "queue"] = float(remote.station.num_waiting)
            found[f"prfaas-{index} link", "egress_bytes_per_s"] = remote.link.average_bytes_per_s
        return found

    def _next(self, requests: Iterator[TraceRequest]) -> None:
        request = next(requests, None)
        if request is None:
            self._is_over = True
        else:
            self.events.at(request.arrival_s, partial(self._arrive, request, requests))

    def _arrive(self, request: TraceRequest, requests: Iterator[TraceRequest]) -> None:
        now_s, tally = self.events.now_s, self.tally
        journey = Journey(
            number=tally.num_arrived,
            request=request,
            arrived_s=now_s,
            tokens_left=request.output_tokens or 1,
            num_tokens=request.input_tokens,
            prompt=self._prompt(request, request.input_tokens, now_s),
        )
        tally.num_arrived += 1
        tally.backlogs.append(tally.num_in_flight)
        tally.prompt_tokens += request.input_tokens
        if self._recorder is not None:
            self._recorder.arrived(journey, self._counters)
        if self._rebalancer is not None:
            self._rebalancer.saw(journey.prompt.uncached_tokens, request.output_tokens)
        self._dispatch(journey)
        self._next(requests)

    def _prompt(self, request: TraceRequest, num_tokens: int, arrived_s: float | None) -> Prompt:
        blocks = request.block_ids
        if not blocks:
            return Prompt(num_tokens=num_tokens, arrived_s=arrived_s)
        return Prompt(
            num_tokens=num_tokens,
            local_hit_tokens=self.cache.hit_tokens(blocks, num_tokens),
            remote_hit_tokens=tuple(
                remote.cache.hit_tokens(blocks, num_tokens) for remote in self.remotes
            ),
            arrived_s=arrived_s,
        )

    def _dispatch(self, journey: Journey) -> None:
        decision = self._decide(journey.prompt)
        if decision.is_held:
            self._held.hold(journey, journey.prompt, self.events.now_s)
        else:
            self._go(journey, decision)

    def _decide(self, prompt: Prompt) -> Decision:
        return self._scheduling.decide(prompt, self._local_view(), self.events.now_s)

    def _local_view(self) -> PrefillView:
        """Return the local queue, with what will join it behind its prefix."""
        view, works_s = view_of(self.prefill, self.events.now_s), self._movements.works_here_s()
        return replace(view, num_sent=len(works_s), sent_work_s=sum(works_s)) if works_s else view

    def _go(self, journey: Journey, decision: Decision) -> None:
        now_s, tally = self.events.now_s, self.tally
        if journey.ttft_s is None:
            journey.predicted_ttft_s = now_s - journey.arrived_s + decision.predicted_ttft_s
        tally.reasons[decision.reason] += 1
        if decision.remote is not None:
            if not journey.is_remote:
                journey.is_remote = True
                tally.num_remote += 1
            self._prefill_there(journey, decision.remote, decision)
        elif decision.movement is not None:
            self._movements.begin(journey, decision)
        else:
            self._prefill_here(journey)

    def _release(self) -> None:
        """Let go whom the policy holds back no more."""
        if not self._held or self._is_releasing:
            return
        self._is_releasing = True
        for journey, decision in self._held.release(self._decide, self.events.now_s):
            self._go(journey, decision)
        self._is_releasing = False

    def _prefill_here(self, journey: Journey) -> None:
        self.tally.hit_tokens += journey.prompt.local_hit_tokens - journey.kept_tokens
        on_start: Action | None = None
        on_done: Action = partial(self._prefilled, journey)
        on_lost: Action = partial(self._again, journey)
        if self._recorder is not None:
            on_start, on_done, on_lost = self._recorder.prefill(journey, on_done, on_lost)
        work_s = self._profiles.local_work_s(journey.prompt)
        self.prefill.submit(work_s, on_done, on_start, on_lost)

    def _prefill_there(self, journey: Journey, index: int, decision: Decision) -> None:
        remote, now_s, prompt = self.remotes[index], self.events.now_s, journey.prompt
        self.tally.num_remote_sent += 1
        if decision.movement is not None:
            prompt = behind(prompt, decision.movement, index)
        num_tokens = prompt.remote_tokens(index)
        prefill = RemotePrefill(
            remote,
            index=index,
            sent=(self.tally.num_remote_sent, num_tokens, now_s),
            service_s=self._profiles.remote_work_s(prompt, index),
            num_bytes=self._profiles.kv_bytes(prompt),
            num_tokens=num_tokens,
            local_estimate_s=self._local_estimate_s(prompt),
            on_ended=partial(self._remote_ended, journey),
        )
        self._remote[journey] = prefill
        self._scheduling.sent(index, prefill.sent)
        remote.changed()
        if decision.movement is not None:
            self._movements.begin(journey, decision)
        else:
            self.tally.hit_tokens += prompt.num_tokens - num_tokens
            self._trip.there(prefill.begin)

    def _moved(self, move: PrefixMove, outcome: Outcome) -> None:
        """Let the prefill begin behind the prefix, or without it."""
        journey, has_come = move.journey, outcome == "completed"
        if self._recorder is not None:
            self._recorder.moved(move, outcome)
        if move.is_to_here:
            if has_come:
                journey.prompt = behind(journey.prompt, move.movement, None)
            self._prefill_here(journey)
        elif outcome in ("completed", "slower_than_local"):
            prompt, held = journey.prompt, move.movement.num_tokens
            if not has_come:
                held = prompt.num_tokens - prompt.remote_tokens(move.index)
            self.tally.hit_tokens += held
            self._remote[journey].begin(0.0 if has_come else move.saved_s)
        else:
            self._remote[journey].fail(outcome)
        self._release()

    def _local_estimate_s(self, prompt: Prompt) -> float:
        local = self.prefill
        if not local.num_servers:
            return inf
        is_free = local.num_serving < local.num_servers
        wait_s = 0.0 if is_free else self._local_view().wait_s(self.events.now_s)
        return wait_s + self._profiles.local_work_s(prompt)

    def _remote_ended(self, journey: Journey, outcome: Outcome) -> None:
        prefill, now_s = self._remote[journey], self.events.now_s
        index, number = prefill.index, prefill.sent[0]
        if outcome == "transfer_failed":
            self._saw(index, self.remotes[index].view())  # a broken connection says so at once
        here = self._sent_to(index)
        self._scheduling.ended(index, journey.prompt, number, outcome, now_s, here)
        del self._remote[journey]
        if self._recorder is not None:
            self._recorder.remote(journey, prefill, outcome)
        if outcome == "completed":
            self.remotes[index].cache.add(journey.request.block_ids)
            self._num_returning += 1
            self._trip.back(partial(self._returned, journey))
        elif outcome == "transfer_failed":
            self._again(journey)
        else:
            self.tally.num_fallbacks += 1
            journey.keep(prefill.transfer.arrived_fraction)
            self._dispatch(journey)
        self._release()

    def _sent_to(self, index: int) -> Iterator[Sent]:
        return (each.sent for each in self._remote.values() if each.index == index)

    def _returned(self, journey: Journey) -> None:
        self._num_returning -= 1
        self._prefilled(journey)

    def _prefilled(self, journey: Journey) -> None:
        """All KVCache is here, and so is the first token."""
        if journey.request.block_ids:
            self.cache.add(journey.request.block_ids)
        if journey.ttft_s is None:
            journey.ttft_s = ttft_s = self.events.now_s - journey.arrived_s
            self.tally.ttfts_s.append(ttft_s)
            self.tally.errors_s.append(journey.predicted_ttft_s - ttft_s)
        journey.tokens_left -= 1
        if not journey.tokens_left:
            self._done()
        else:
            lost = partial(self._sequence_lost, journey)
            if self._recorder is None:
                self.decode.submit(journey.tokens_left, self._done, lost)
            else:
                watched = self._recorder.decode(journey, self._done, lost)
                self.decode.submit(journey.tokens_left, *watched)
        self._release()

    def _done(self) -> None:
        self.tally.num_done += 1
        self.tally.done_s = self.events.now_s

    def _again(self, journey: Journey) -> None:
        self.tally.num_lost += 1
        arrived_s = journey.arrived_s if journey.ttft_s is None else None
        journey.kept_tokens = 0
        journey.prompt = self._prompt(journey.request, journey.num_tokens, arrived_s)
        self._dispatch(journey)

    def _sequence_lost(self, journey: Journey, tokens_left: int) -> None:
        """Its KVCache is gone; prompt and answer so far are prefilled again."""
        journey.num_tokens += journey.tokens_left - tokens_left
        journey.tokens_left = tokens_left
        self._again(journey)

    def _saw(self, index: int, view: RemoteView) -> None:
        self._scheduling.saw(index, view, self.events.now_s)
        self._release()

    def _cluster_lost(self, index: int) -> None:
        """Without an instance nothing waits there any longer, and nothing moves to or from it."""
        self._movements.lose(index)
        for prefill in list(self._remote.values()):
            if prefill.index == index and prefill.job is not None:
                prefill.lose()
