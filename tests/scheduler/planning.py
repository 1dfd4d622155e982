"""Small models for tests of the planner."""

from prfaas.scheduler.curves import LinearCurve, PolynomialCurve
from prfaas.scheduler.lengths import Lengths, truncated_lognormal
from prfaas.scheduler.profile import Cost, DecodeProfile, Link, Profile, Workload
from prfaas.scheduler.throughput import ThroughputModel

FAST = PolynomialCurve(coefficients=(0.4, 2.5e-5, 2e-10))
SLOW = PolynomialCurve(coefficients=(1.0, 6.72e-5, 1.066e-9))
KV = LinearCurve(tokens=(1.0, 2.0), values=(180e6 + 17280, 180e6 + 2 * 17280))


def profile(prefill_s=SLOW, *, decodes=True, cost=1.0, **changes) -> Profile:
    decode = DecodeProfile(
        step_s=LinearCurve(tokens=(1.0, 20.0), values=(0.01, 0.025)),
        max_batch=64,
        provenance="measured",
    )
    fields = {
        "name": "p",
        "hardware": "8 x G",
        "gpus_per_instance": 8,
        "prefill_s": prefill_s,
        "prefill_provenance": "measured",
        "kv_bytes": KV,
        "decode": decode if decodes else None,
        "cost": None if cost is None else Cost(per_gpu=cost, provenance="measured"),
    }
    return Profile(**(fields | changes))


def model(
    lengths: Lengths | None = None,
    *,
    link: Link | None = None,
    prfaas: Profile | None = None,
    local: Profile | None = None,
    min_decode_tokens_per_s: float = 40.0,
) -> ThroughputModel:
    if lengths is None:
        lengths = truncated_lognormal(
            mu=9.9, sigma=1.0, min_tokens=128, max_tokens=131072, points=200
        )
    return ThroughputModel(
        workload=Workload(lengths=lengths, mean_output_tokens=1024.0),
        local=local or profile(),
        prfaas=prfaas or profile(FAST, decodes=False, cost=2.0),
        link=link or Link(bytes_per_s=12.5e9),
        min_decode_tokens_per_s=min_decode_tokens_per_s,
    )
