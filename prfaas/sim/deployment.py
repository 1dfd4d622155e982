"""Simulates a deployment: every request from its arrival to its last token.

A request waits for a prefill instance of the cluster that the policy chose, computes its first token
there, moves its KVCache over the link if that is elsewhere, and decodes in the local cluster.
arrivals = done + in flight, always.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from random import Random

from prfaas.config.simulation_table import SimulationOptions
from prfaas.config.traces import TraceRequest
from prfaas.scheduler.dispatch import Dispatcher
from prfaas.scheduler.forecast import Profiles, Prompt, RemoteView
from prfaas.scheduler.holding import HeldPrompts
from prfaas.scheduler.planner import Plan
from prfaas.scheduler.policies import Decision, Policy, PolicyName, make_policy
from prfaas.scheduler.rebalancer import Rebalancer
from prfaas.scheduler.router import Outcome
from prfaas.scheduler.throughput import ThroughputModel
from prfaas.sim.breakers import Breakers, Sent
from prfaas.sim.chrome_trace import Recorder
from prfaas.sim.conversion import Conversions
from prfaas.sim.decode_pool import DecodePool
from prfaas.sim.events import Action, Events
from prfaas.sim.failures import Failures
from prfaas.sim.journey import Journey, Tally
from prfaas.sim.prefix_lru import PrefixLru
from prfaas.sim.remote_cluster import RemotePrefill, refreshed, remote_clusters, view_of
from prfaas.sim.station import Station


def own_policy(plan: Plan) -> PolicyName:
    """Return the policy that a kind of deployment stands for."""
    if plan.kind == "prfaas":
        return "static"
    return "local" if plan.kind == "homogeneous" else "always-remote"


class Deployment:
    """A plan's instances, serving requests under one policy.

    Only the jitter of the link is drawn at random, from `seed`.
    """

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
        self._random = Random(seed)
        self._profiles = Profiles(local=model.local, remote=model.prfaas)
        self._rtt_s = 0.0 if model.link is None else model.link.rtt_s
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
        self._dispatcher = Dispatcher(
            self._made(policy, plan.threshold_tokens or 0.0),
            self._profiles,
            remotes=tuple(remote.view() for remote in self.remotes),
            max_egress_fraction=options.max_egress_fraction,
        )
        self._seen: list[RemoteView] = [remote.view() for remote in self.remotes]
        self._breakers = Breakers([view.name for view in self._seen])
        self._refused: frozenset[int] = frozenset()
        """Clusters that the policy is not to see, by their breakers."""
        self._held: HeldPrompts[Journey] = HeldPrompts(period_s=options.ttft_slo_s)
        self._is_releasing = False
        self._remote: dict[Journey, RemotePrefill] = {}
        self._num_returning = 0
        """First tokens on the way back."""
        self._is_over = False
        self._rebalancer: Rebalancer | None = None
        self._conversions: Conversions | None = None
        if options.rebalance is not None:
            self._rebalancer = Rebalancer(model, plan.kind, options.rebalance.options)
            self._conversions = Conversions(
                self.events,
                self._rebalancer,
                prefill=self.prefill,
                decode=self.decode,
                num_prfaas=plan.shape.num_prfaas,
                period_s=options.rebalance.options.period_s,
                conversion_s=options.rebalance.conversion_s,
                is_over=lambda: self._is_over,
                on_threshold=lambda t: self._dispatcher.follow(self._made(policy, t)),
            )
        self._failures = Failures(
            self.events,
            options.failures,
            prefill=self.prefill,
            decode=self.decode,
            remotes=self.remotes,
            on_cluster_lost=self._cluster_lost,
            on_restored=self._release,
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
        self._breakers.check(len(self._remote))
        here = self.prefill.num_waiting + self.prefill.num_serving + self.decode.num_sequences
        there = len(self._remote) + self._num_returning
        assert self.tally.num_in_flight == here + there + len(self._held), "one is lost, or twice"
        assert self.tally.num_done <= len(self.tally.ttfts_s) <= self.tally.num_arrived
        assert self._dispatcher.num_inflight == len(self._remote)

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
        now_s = self.events.now_s
        if self._breakers:
            self._refuse(self._breakers.refused(now_s))
        for index, remote in enumerate(self.remotes):
            if remote.is_at_rest:
                self._dispatcher.saw(index, refreshed(self._shown(index), now_s))
        return self._dispatcher.decide(prompt, local=view_of(self.prefill, now_s), now_s=now_s)

    def _refuse(self, refused: frozenset[int]) -> None:
        """Show the policy no instance in clusters that their breakers refuse, if others can serve."""
        others = self.prefill.num_servers > 0 or any(
            view.is_usable for index, view in enumerate(self._seen) if index not in refused
        )
        if not others:
            refused = frozenset()
        changed, self._refused = refused ^ self._refused, refused
        for index in sorted(changed):
            self._dispatcher.saw(index, self._shown(index))

    def _shown(self, index: int) -> RemoteView:
        view = self._seen[index]
        if index not in self._refused:
            return view
        return replace(view, prefill=replace(view.prefill, num_instances=0))

    def _go(self, journey: Journey, decision: Decision) -> None:
        now_s, tally = self.events.now_s, self.tally
        if journey.ttft_s is None:
            journey.predicted_ttft_s = now_s - journey.arrived_s + decision.predicted_ttft_s
        tally.reasons[decision.reason] += 1
        if decision.remote is None:
            self._prefill_here(journey)
            return
        if not journey.is_remote:
            journey.is_remote = True
            tally.num_remote += 1
        self._prefill_there(journey, decision.remote)

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

    def _prefill_there(self, journey: Journey, index: int) -> None:
        remote, prompt, profiles = self.remotes[index], journey.prompt, self._profiles
        hits = prompt.remote_hit_tokens
        self.tally.hit_tokens += hits[index] if hits else 0
        self.tally.num_remote_sent += 1
        now_s, num_tokens = self.events.now_s, prompt.remote_tokens(index)
        prefill = RemotePrefill(
            remote,
            index=index,
            sent=(self.tally.num_remote_sent, num_tokens, now_s),
            service_s=profiles.remote_work_s(prompt, index),
            num_bytes=profiles.kv_bytes(prompt),
            num_tokens=num_tokens,
            local_estimate_s=self._local_estimate_s(prompt, now_s),
            on_ended=partial(self._remote_ended, journey),
        )
        self._remote[journey] = prefill
        if self._breakers:
            self._breakers.sent(index, prefill.sent)
        remote.changed()
        self._later(self._rtt_s / 2, prefill.begin)

    def _local_estimate_s(self, prompt: Prompt, now_s: float) -> float:
        local = self.prefill
        if not local.num_servers:
            return inf
        is_free = local.num_serving < local.num_servers
        wait_s = 0.0 if is_free else view_of(local, now_s).wait_s(now_s)
        return wait_s + self._profiles.local_work_s(prompt)

    def _remote_ended(self, journey: Journey, outcome: Outcome) -> None:
        now_s, prefill, prompt = self.events.now_s, self._remote[journey], journey.prompt
        index = prefill.index
        if outcome == "transfer_failed":
            self._saw(index, self.remotes[index].view())  # a broken connection says so at once
        self._breakers.ended(index, prefill.sent[0], outcome, now_s, self._sent_to(index))
        del self._remote[journey]
        self._dispatcher.ended(index, prompt)
        if self._recorder is not None:
            self._recorder.remote(journey, prefill, outcome)
        if outcome == "completed":
            self.remotes[index].cache.add(journey.request.block_ids)
            self._num_returning += 1
            self._later(self._way_back_s(), partial(self._returned, journey))
        elif outcome == "transfer_failed":
            self._again(journey)
        else:
            self.tally.num_fallbacks += 1
            journey.keep(prefill.transfer.arrived_fraction)
            self._dispatch(journey)
        self._release()

    def _sent_to(self, index: int) -> Iterator[Sent]:
        return (each.sent for each in self._remote.values() if each.index == index)

    def _later(self, delay_s: float, action: Action) -> None:
        if delay_s > 0:
            self.events.after(delay_s, action)
        else:
            action()

    def _way_back_s(self) -> float:
        jitter_s = self._options.jitter_s
        return self._rtt_s / 2 + (self._random.expovariate(1 / jitter_s) if jitter_s else 0.0)

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
        self._seen[index] = view
        is_ready = view.prefill.num_instances > 0
        self._breakers.heard(index, self.events.now_s, is_ready=is_ready)
        self._dispatcher.saw(index, self._shown(index))
        self._release()

    def _cluster_lost(self, index: int) -> None:
        """Without an instance nothing waits there any longer."""
        for prefill in list(self._remote.values()):
            if prefill.index == index and prefill.job is not None:
                prefill.lose()
