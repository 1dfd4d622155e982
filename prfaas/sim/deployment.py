"""Simulates a deployment: every request from its arrival to its last token.

A request waits for a prefill instance of the cluster that the policy chose, computes its first token
there, moves its KVCache over the link if that is elsewhere, and decodes in the local cluster.
arrivals = done + in flight, always.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from random import Random

from prfaas.config.simulation_table import Failure, SimulationOptions
from prfaas.config.traces import TraceRequest
from prfaas.scheduler.dispatch import Dispatcher
from prfaas.scheduler.forecast import Profiles, Prompt, RemoteView
from prfaas.scheduler.planner import Plan
from prfaas.scheduler.policies import Policy, PolicyName, make_policy
from prfaas.scheduler.rebalancer import Rebalancer
from prfaas.scheduler.throughput import ThroughputModel
from prfaas.sim.conversion import Conversions
from prfaas.sim.decode_pool import DecodePool
from prfaas.sim.events import Action, Events
from prfaas.sim.journey import Journey, Tally
from prfaas.sim.prefix_lru import PrefixLru
from prfaas.sim.remote_cluster import RemoteCluster, RemotePrefill, refreshed, view_of
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
    ) -> None:
        assert model.local.decode is not None, "the model needs one"
        self.events = Events()
        self.tally = Tally()
        self._options = options
        self._random = Random(seed)
        self._profiles = Profiles(local=model.local, remote=model.prfaas)
        self._rtt_s = 0.0 if model.link is None else model.link.rtt_s
        self.prefill = Station(self.events, num_servers=plan.shape.num_prefill)
        self.decode = DecodePool(
            self.events,
            model.local.decode,
            num_instances=plan.shape.num_decode,
            max_batch=model.batch,
            model=options.decode,
        )
        self.cache = PrefixLru(capacity_tokens=options.local_cache_tokens)
        self.remotes: list[RemoteCluster] = []
        shares = _divided(plan.shape.num_prfaas, options.clusters)
        for index, num_instances in enumerate(shares):
            assert model.link is not None, "a PrfaaS cluster without a link"
            bytes_per_s = model.link.bytes_per_s / len(shares)
            self.remotes.append(
                RemoteCluster(
                    self.events,
                    name=f"prfaas-{index}",
                    num_instances=num_instances,
                    link=replace(model.link, bytes_per_s=bytes_per_s),
                    options=options,
                    on_report=partial(self._saw, index),
                )
            )
        self._dispatcher = Dispatcher(
            self._made(policy, plan.threshold_tokens or 0.0),
            self._profiles,
            remotes=tuple(remote.view() for remote in self.remotes),
            max_egress_fraction=options.max_egress_fraction,
        )
        self._seen: list[RemoteView] = [remote.view() for remote in self.remotes]
        self._remote: dict[Journey, tuple[int, RemotePrefill | None]] = {}
        """The cluster, and the prefill there once the request has reached it."""
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
        for failure in options.failures:
            self.events.at(failure.at_s, partial(self._fail, failure))

    def _made(self, policy: PolicyName, threshold_tokens: float) -> Policy:
        return make_policy(policy, profiles=self._profiles, threshold_tokens=threshold_tokens)

    @property
    def num_conversions(self) -> int:
        """Return the instances that have changed their role."""
        return 0 if self._conversions is None else self._conversions.num_done

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
        assert self.tally.num_done <= self.tally.num_arrived
        assert self.tally.num_done <= len(self.tally.ttfts_s) <= self.tally.num_arrived
        assert self._dispatcher.num_inflight == len(self._remote)

    def _next(self, requests: Iterator[TraceRequest]) -> None:
        request = next(requests, None)
        if request is None:
            self._is_over = True
        else:
            self.events.at(request.arrival_s, partial(self._arrive, request, requests))

    def _arrive(self, request: TraceRequest, requests: Iterator[TraceRequest]) -> None:
        self.tally.num_arrived += 1
        self.tally.backlogs.append(self.tally.num_in_flight)
        journey = Journey(
            request=request,
            arrived_s=self.events.now_s,
            tokens_left=max(1, request.output_tokens),
            num_tokens=request.input_tokens,
            prompt=self._prompt(request, request.input_tokens),
        )
        self.tally.prompt_tokens += request.input_tokens
        if self._rebalancer is not None:
            self._rebalancer.saw(journey.prompt.uncached_tokens, request.output_tokens)
        self._dispatch(journey)
        self._next(requests)

    def _prompt(self, request: TraceRequest, num_tokens: int) -> Prompt:
        blocks = request.block_ids
        if not blocks:
            return Prompt(num_tokens=num_tokens)
        return Prompt(
            num_tokens=num_tokens,
            local_hit_tokens=self.cache.hit_tokens(blocks, num_tokens),
            remote_hit_tokens=tuple(
                remote.cache.hit_tokens(blocks, num_tokens) for remote in self.remotes
            ),
        )

    def _dispatch(self, journey: Journey) -> None:
        now_s = self.events.now_s
        for index, remote in enumerate(self.remotes):
            if remote.is_at_rest:
                self._dispatcher.saw(index, refreshed(self._seen[index], now_s))
        decision = self._dispatcher.decide(
            journey.prompt, local=view_of(self.prefill, now_s), now_s=now_s
        )
        if journey.ttft_s is None:
            journey.predicted_ttft_s = now_s - journey.arrived_s + decision.predicted_ttft_s
        self.tally.reasons[decision.reason] += 1
        if decision.remote is None:
            self._prefill_here(journey)
            return
        if not journey.is_remote:
            journey.is_remote = True
            self.tally.num_remote += 1
        self._prefill_there(journey, decision.remote)

    def _prefill_here(self, journey: Journey) -> None:
        self.tally.hit_tokens += journey.prompt.local_hit_tokens
        self.prefill.submit(
            self._profiles.local_work_s(journey.prompt),
            partial(self._prefilled, journey),
            on_lost=partial(self._again, journey),
        )

    def _prefill_there(self, journey: Journey, index: int) -> None:
        remote, prompt = self.remotes[index], journey.prompt
        hits = prompt.remote_hit_tokens
        self.tally.hit_tokens += hits[index] if hits else 0

        def ended(then: Action) -> None:
            del self._remote[journey]
            self._dispatcher.ended(index, prompt)
            then()

        def stalled(prefill: RemotePrefill) -> None:
            self.tally.num_fallbacks += 1
            prefill.give_up()
            has_local = self.prefill.num_servers > 0
            again = self._prefill_here if has_local else self._dispatch
            ended(partial(again, journey))

        def arrived() -> None:
            remote.cache.add(journey.request.block_ids)
            ended(partial(self._later, self._way_back_s(), partial(self._prefilled, journey)))

        def lost() -> None:
            self._saw(index, remote.view())  # a broken connection says so at once
            ended(partial(self._again, journey))

        def begin() -> None:
            prefill = remote.prefill(
                service_s=self._profiles.remote_work_s(prompt, index),
                num_bytes=self._profiles.kv_bytes(prompt),
                on_arrived=arrived,
                on_stalled=stalled,
                on_lost=lost,
            )
            self._remote[journey] = (index, prefill)

        self._remote[journey] = (index, None)
        remote.changed()
        self._later(self._rtt_s / 2, begin)

    def _later(self, delay_s: float, action: Action) -> None:
        if delay_s > 0:
            self.events.after(delay_s, action)
        else:
            action()

    def _way_back_s(self) -> float:
        jitter_s = self._options.jitter_s
        return self._rtt_s / 2 + (self._random.expovariate(1 / jitter_s) if jitter_s else 0.0)

    def _prefilled(self, journey: Journey) -> None:
        """All KVCache is here, and so is the first token."""
        self.cache.add(journey.request.block_ids)
        if journey.ttft_s is None:
            journey.ttft_s = self.events.now_s - journey.arrived_s
            self.tally.ttfts_s.append(journey.ttft_s)
            self.tally.errors_s.append(journey.predicted_ttft_s - journey.ttft_s)
        journey.tokens_left -= 1
        if journey.tokens_left:
            self.decode.submit(
                journey.tokens_left,
                self._done,
                partial(self._sequence_lost, journey),
            )
        else:
            self._done()

    def _done(self) -> None:
        self.tally.num_done += 1
        self.tally.done_s = self.events.now_s

    def _again(self, journey: Journey) -> None:
        self.tally.num_lost += 1
        journey.prompt = self._prompt(journey.request, journey.num_tokens)
        self._dispatch(journey)

    def _sequence_lost(self, journey: Journey, tokens_left: int) -> None:
        """Its KVCache is gone; prompt and answer so far are prefilled again."""
        journey.num_tokens += journey.tokens_left - tokens_left
        journey.tokens_left = tokens_left
        self._again(journey)

    def _saw(self, index: int, view: RemoteView) -> None:
        self._seen[index] = view
        self._dispatcher.saw(index, view)

    def _fail(self, failure: Failure) -> None:
        """Take instances away and bring them back later, of the first PrfaaS cluster."""
        if failure.role == "decode":
            lost = self.decode.lose(failure.instances)
            self.events.after(failure.for_s, partial(self.decode.restore, lost))
        elif failure.role == "prefill":
            self._lose(self.prefill, failure)
        elif self.remotes:
            self._lose(self.remotes[0].station, failure)
            if not self.remotes[0].station.num_servers:
                for index, prefill in list(self._remote.values()):
                    if index == 0 and prefill is not None:
                        prefill.lose()

    def _lose(self, station: Station, failure: Failure) -> None:
        num = min(failure.instances, station.num_servers)
        self.events.after(failure.for_s, partial(self._restore, station, num))
        station.lose(num)
        for remote in self.remotes:
            remote.changed()

    def _restore(self, station: Station, num_servers: int) -> None:
        station.set_servers(station.num_servers + num_servers)
        for remote in self.remotes:
            remote.changed()


def _divided(num_instances: int, num_clusters: int) -> list[int]:
    """Return the instances of each cluster that gets any, as even as can be."""
    shares = [
        num_instances // num_clusters + (i < num_instances % num_clusters)
        for i in range(num_clusters)
    ]
    return [share for share in shares if share]
