"""The files of scripts/bench/live_policies.py: profiles that its nodes replay, and the plan that says the same to `prfaas simulate`.

All of it is in the time and the bytes of the live nodes, so that nothing is converted where the two are compared.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.config.plan_file import PlanFile, read_plan_file
from prfaas.config.traces import TraceRequest
from prfaas.scheduler.policies import PolicyName
from prfaas.sim.arrivals import scaled
from prfaas.sim.capacity import unit_requests
from prfaas.sim.run import Run, simulate

CONFIGS = Path(__file__).parents[2] / "configs"
SOURCES = {"local": "h20-internal-1t", "remote": "h200-internal-1t"}
WIDE_BYTES_PER_S = 1e12
EGRESS_SHARE = 0.7
"""Of the link, what KVCache fills at the planned threshold and the load asked for: the paper's limit."""
SLO_S = 10.0
CHUNK_TOKENS = 512
CASE_STUDY = (CONFIGS / "workloads" / "case-study.toml").read_text()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What becomes of the link: (share of the requests' time, share of the bandwidth)."""

    name: str
    changes: tuple[tuple[float, float], ...] = ()


SCENARIOS = {
    "steady": Scenario(name="steady"),
    "halved": Scenario(name="halved", changes=((1 / 3, 0.5), (2 / 3, 1.0))),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan of one PrfaaS instance and one local one, and the requests of a seed."""

    path: Path
    file: PlanFile
    requests: Sequence[TraceRequest]
    rate_rps: float
    seed: int

    @property
    def link_bytes_per_s(self) -> float:
        assert self.file.model.link is not None
        return self.file.model.link.bytes_per_s

    @property
    def threshold_tokens(self) -> int:
        """Return t of the plan."""
        found = self.file.plans["prfaas"].threshold_tokens
        assert found is not None
        return round(found)

    @property
    def slo_s(self) -> float:
        return self.file.simulation.ttft_slo_s

    def simulated(self, policy: PolicyName) -> Run:
        """Return what `prfaas simulate --rate R --policy P` finds."""
        plan = self.file.plans["prfaas"]
        options = self.file.simulation
        model = self.file.model
        return simulate(model, plan, self.requests, policy=policy, options=options, seed=self.seed)


def write_profiles(directory: Path, speed: float) -> dict[str, Path]:
    """Write the case study's profiles, so many times as fast."""
    return {
        side: _write_profile(directory / f"{side}.toml", side, speed, kv=None) for side in SOURCES
    }


def _write_profile(path: Path, side: str, speed: float, kv: dict[int, int] | None) -> Path:
    """Write one; `kv` are bytes at lengths, else it has the model of the source."""
    source = tomllib.loads((CONFIGS / "profiles" / f"{SOURCES[side]}.toml").read_text())
    prefill = dict(source["prefill"])
    for key in ("coefficients", "seconds"):
        if key in prefill:
            prefill[key] = [value / speed for value in prefill[key]]
    tables: dict[str, dict[str, Any]] = {"prefill": prefill}
    if kv is None:
        model = (CONFIGS / "profiles" / source["kv"]["model"]).resolve()
        tables["kv"] = {"model": str(model), "kv_dtype": source["kv"]["kv_dtype"]}
    else:
        tables["kv"] = {"tokens": list(kv), "bytes": list(kv.values())}
    if "decode" in source:
        steps = [value / speed for value in source["decode"]["step_s"]]
        tables["decode"] = source["decode"] | {"step_s": steps}
    top = {
        "name": f"{SOURCES[side]} at speed {speed:g}",
        "hardware": source["hardware"],
        "gpus_per_instance": 1,
    }
    path.write_text("\n".join(_toml(top, tables)) + "\n")
    return path


def _toml(top: dict[str, Any], tables: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield from (f"{key} = {_value(value)}" for key, value in top.items())
    for name, table in tables.items():
        yield f"[{name}]"
        yield from (f"{key} = {_value(value)}" for key, value in table.items())


def _value(value: object) -> str:
    """Return a text, a number or a list of numbers as TOML has it."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def write_case(
    directory: Path,
    scenario: Scenario,
    *,
    speed: float,
    slower: Mapping[str, float],
    kv: dict[int, int],
    load: float,
    num_requests: int,
    output_tokens: int,
    stall_timeout_s: float,
    seed: int,
) -> Case:
    """Write the plan of a scenario, and return it with its requests.

    The link is as fast as it has to be for EGRESS_SHARE of it to be filled. `kv` is what live prompts of some lengths
    moved, `slower` how many times as long as `speed` promises they took on each side.
    """
    for side in SOURCES:
        _write_profile(directory / f"plan-{side}.toml", side, speed / slower[side], kv)
    workload = CASE_STUDY.replace("output_tokens = 1024", f"output_tokens = {output_tokens}")
    (directory / "workload.toml").write_text(workload)
    path = directory / f"plan-{scenario.name}.toml"
    path.write_text(_plan(speed, WIDE_BYTES_PER_S, stall_timeout_s, ()))
    wide = read_plan_file(path).plans["prfaas"].rates
    link = load * wide.egress_bytes_per_s / EGRESS_SHARE
    path.write_text(_plan(speed, link, stall_timeout_s, ()))
    file = read_plan_file(path)
    rate_rps = load * file.plans["prfaas"].rates.lambda_max_rps
    unit = unit_requests(file.model.workload, num_requests=num_requests, seed=seed)
    requests = list(scaled(unit, rate_factor=rate_rps))
    last_s = requests[-1].arrival_s
    changes = [(share * last_s, fraction) for share, fraction in scenario.changes]
    path.write_text(_plan(speed, link, stall_timeout_s, changes))
    return Case(
        path=path,
        file=read_plan_file(path),
        requests=requests,
        rate_rps=rate_rps,
        seed=seed,
    )


def _plan(
    speed: float, link: float, stall_timeout_s: float, changes: Sequence[tuple[float, float]]
) -> str:
    lines = [
        'workload = "workload.toml"',
        "min_decode_tokens_per_s = 1",
        "[profiles]",
        'local = "plan-local.toml"',
        'prfaas = "plan-remote.toml"',
        "[link]",
        f"bytes_per_s = {link!r}",
        "[deployments.prfaas]",
        'kind = "prfaas"',
        "prfaas_gpus = 1",
        "local_gpus = 2  # one prefills, one decodes: the pd node is both, and decodes next to nothing",
        "[simulation]",
        f"ttft_slo_s = {SLO_S / speed!r}",
        f"stall_timeout_s = {stall_timeout_s!r}",
        f"pieces = {27_000 // CHUNK_TOKENS}",
        'decode = "stepped"',
    ]
    for at_s, fraction in changes:
        lines += ["[[simulation.link]]", f"at_s = {at_s!r}", f"bandwidth_fraction = {fraction!r}"]
    return "\n".join(lines) + "\n"
