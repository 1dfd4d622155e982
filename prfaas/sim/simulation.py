"""What `prfaas simulate` does with a plan file: capacities, loads, traces and policies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum

from prfaas.config.plan_file import PlanFile
from prfaas.config.traces import TraceRequest
from prfaas.errors import ConfigError
from prfaas.scheduler.planner import Plan
from prfaas.scheduler.policies import PolicyName, own_policy
from prfaas.sim.arrivals import scaled
from prfaas.sim.capacity import capacities, unit_requests
from prfaas.sim.chrome_trace import Recorder
from prfaas.sim.run import Run, simulate

NUM_SEEDS = 3
LOW_LOAD = 0.05
LOADS = (LOW_LOAD, 0.5, 0.8, 0.9, 1.0)
"""Shares of its own capacity that a deployment is run at."""
POLICY_LOAD = 0.9
"""Share of the deployment's own capacity at which policies are compared."""
MAX_LOAD_REQUESTS = 10_000
"""A run at one load needs fewer requests than a search for a capacity."""

Progress = Callable[[str, int, int], object]
"""(stage, done, total); a total of 0 is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A run at one rate."""

    rate_rps: float
    fraction: float | None
    """Of the capacity; None where that was not looked for."""
    run: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What was simulated of one deployment."""

    capacities_rps: tuple[float, ...]
    """One for each seed; none where a rate or a trace was given."""
    loads: tuple[Load, ...]
    policies: tuple[Load, ...]
    """The same requests under each policy that was asked for, in that order."""

    @property
    def capacity_rps(self) -> float | None:
        """Return the mean over the seeds."""
        found = self.capacities_rps
        return fsum(found) / len(found) if found else None


class Simulation:
    """Simulates the deployments of a plan file, one after the other."""

    def __init__(
        self,
        file: PlanFile,
        *,
        policies: Sequence[PolicyName],
        num_requests: int,
        seed: int,
        progress: Progress,
        num_recorded: int = 0,
    ) -> None:
        """Say what is simulated; the first `num_recorded` requests of each run are recorded."""
        self._file = file
        self._policies = tuple(policies)
        self._num_requests = num_requests
        self._seed = seed
        self._progress = progress
        self._num_recorded = num_recorded
        self.recorders: dict[str, Recorder] = {}
        """Deployment and policy -> what was recorded."""

    def capacities(self) -> dict[str, Simulated]:
        """Return each deployment's capacity, and how it does at LOADS of it.

        Raises:
            ConfigError: too few requests for a deployment of its size.
        """
        return {name: self._capacity(name, plan) for name, plan in self._file.plans.items()}

    def at_rate(self, rate_rps: float) -> dict[str, Simulated]:
        """Return how each deployment does at one rate."""
        requests = self._requests(self._num_requests)
        return self._each(list(scaled(requests, rate_factor=rate_rps)), rate_rps)

    def of_trace(
        self, requests: Sequence[TraceRequest], rate_factor: float
    ) -> dict[str, Simulated]:
        """Return how each deployment does on a trace, so many times as fast.

        Raises:
            ConfigError: all of its requests come at once.
        """
        given = list(scaled(requests, rate_factor=rate_factor))
        if not given[-1].arrival_s > 0:
            raise ConfigError("all requests of the trace come at the same moment")
        return self._each(given, len(given) / given[-1].arrival_s)

    def _each(self, requests: Sequence[TraceRequest], rate_rps: float) -> dict[str, Simulated]:
        found = {}
        for name, plan in self._file.plans.items():
            load = self._run(name, plan, requests, rate_rps, None, own_policy(plan.kind))
            policies = tuple(self._compared(name, plan, requests, load))
            found[name] = Simulated(capacities_rps=(), loads=(load,), policies=policies)
        return found

    def _capacity(self, name: str, plan: Plan) -> Simulated:
        stage = f"{name}: capacity"
        self._progress(stage, 0, 0)
        try:
            found = capacities(
                self._file.model,
                plan,
                policy=own_policy(plan.kind),
                options=self._file.simulation,
                num_requests=self._num_requests,
                seeds=range(self._seed, self._seed + NUM_SEEDS),
                on_progress=lambda done: self._progress(stage, done, self._num_requests),
            )
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None
        capacity_rps = fsum(found) / len(found)
        unit = self._requests(min(self._num_requests, MAX_LOAD_REQUESTS))
        loads = []
        for fraction in LOADS:
            rate_rps = fraction * capacity_rps
            requests = list(scaled(unit, rate_factor=rate_rps))
            loads.append(self._run(name, plan, requests, rate_rps, fraction, own_policy(plan.kind)))
        at = next(load for load in loads if load.fraction == POLICY_LOAD)
        requests = list(scaled(unit, rate_factor=at.rate_rps))
        return Simulated(
            capacities_rps=tuple(found),
            loads=tuple(loads),
            policies=tuple(self._compared(name, plan, requests, at)),
        )

    def _compared(
        self, name: str, plan: Plan, requests: Sequence[TraceRequest], own: Load
    ) -> Iterator[Load]:
        """The policies that were asked for, where there is a choice between two clusters."""
        if plan.kind != "prfaas":
            return
        for policy in self._policies:
            if policy == own.run.policy:
                yield own
            else:
                yield self._run(name, plan, requests, own.rate_rps, own.fraction, policy)

    def _requests(self, num_requests: int) -> list[TraceRequest]:
        return unit_requests(self._file.model.workload, num_requests=num_requests, seed=self._seed)

    def _run(
        self,
        name: str,
        plan: Plan,
        requests: Sequence[TraceRequest],
        rate_rps: float,
        fraction: float | None,
        policy: PolicyName,
    ) -> Load:
        stage = f"{name}: {policy} at {rate_rps:.3g} req/s"
        recorder = None
        if self._num_recorded:
            recorder = self.recorders[f"{name} {policy}"] = Recorder(self._num_recorded)
        self._progress(stage, 0, len(requests))
        run = simulate(
            self._file.model,
            plan,
            requests,
            policy=policy,
            options=self._file.simulation,
            seed=self._seed,
            on_progress=lambda done: self._progress(stage, done, len(requests)),
            recorder=recorder,
        )
        return Load(rate_rps=rate_rps, fraction=fraction, run=run)
