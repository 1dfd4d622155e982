"""Small deployments and requests for tests of the simulator."""

from itertools import islice
from random import Random

from prfaas.config.simulation_table import SimulationOptions
from prfaas.config.traces import TraceRequest
from prfaas.scheduler.planner import Kind, Plan, plan
from prfaas.scheduler.policies import PolicyName, own_policy
from prfaas.scheduler.profile import Link
from prfaas.scheduler.throughput import ThroughputModel
from prfaas.sim.arrivals import poisson_arrivals
from prfaas.sim.deployment import Deployment
from tests.scheduler.planning import model

MODEL = model(link=Link(bytes_per_s=12.5e9, rtt_s=0.02))


def planned(kind: Kind = "prfaas", *, of: ThroughputModel = MODEL, num_local: int = 4) -> Plan:
    return plan(of, kind, num_prfaas=0 if kind == "homogeneous" else 2, num_local=num_local)


def arriving(num: int, rate_rps: float, seed: int = 0) -> list[TraceRequest]:
    return list(
        islice(poisson_arrivals(MODEL.workload, rate_rps=rate_rps, random=Random(seed)), num)
    )


def deployed(
    at: Plan,
    *,
    of: ThroughputModel = MODEL,
    policy: PolicyName | None = None,
    seed: int = 0,
    **options,
) -> Deployment:
    return Deployment(
        of,
        at,
        policy=policy or own_policy(at.kind),
        options=SimulationOptions(**options),
        seed=seed,
    )
