"""What `prfaas plan feasibility` reads: models with published KV throughputs, clusters and links."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prfaas.config.model_file import read_model
from prfaas.config.tables import Table, read_toml
from prfaas.engine.model_spec import ModelSpec
from prfaas.errors import ConfigError

MAX_TOKENS = 100_000_000
MAX_GPUS = 10_000_000
MAX_RATE = 1e21
GBIT_BYTES = 1e9 / 8

TprefillSource = Literal["implied", "independent"]
"""implied: from the very figure it would be compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The accelerators of one instance and their peaks."""

    name: str
    gpus: int
    flops_per_s: float
    memory_bytes_per_s: float
    bytes_per_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPoint:
    """A published KV throughput; `prefill_s` is None where no T_prefill was published."""

    tokens: int
    phi_bytes_per_s: float
    prefill_s: float | None
    source: str

    @property
    def prefill_source(self) -> TprefillSource:
        """Return whether T_prefill is known apart from the throughput."""
        return "implied" if self.prefill_s is None else "independent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPoints:
    """A model and what was published of it."""

    name: str
    spec: ModelSpec
    table: tuple[PublishedPoint, ...]
    """At the file's lengths."""
    further: tuple[PublishedPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """So many GPUs that prefill one model at one length, and their published egress."""

    model: str
    gpus: int
    tokens: int
    published_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FeasibilityFile:
    """Everything in the file."""

    tokens: tuple[int, ...]
    hardware: Hardware
    models: tuple[ModelPoints, ...]
    clusters: tuple[Cluster, ...]
    cluster_gpus: int
    """Of the cluster that is tried on each link."""
    links: tuple[tuple[str, float], ...]
    """Name and bytes per second."""


def shipped_feasibility() -> Path:
    """Return the file of the checkout that prfaas runs from.

    Raises:
        ConfigError: prfaas is installed without one.
    """
    path = Path(__file__).parents[2] / "configs" / "feasibility.toml"
    if not path.is_file():
        raise ConfigError(f"{path} is not there; give the file")
    return path


def read_feasibility(path: Path) -> FeasibilityFile:
    """Return what is in the file.

    Raises:
        ConfigError: an unknown or missing key, or a value that makes no sense; names both.
    """
    top = read_toml(path)
    lengths = top.numbers("tokens", minimum=1, maximum=MAX_TOKENS)
    for index, length in enumerate(lengths):
        if length != int(length):
            raise top.error(f"tokens[{index}]", f"expected a whole number, not {length:g}")
    tokens = tuple(int(length) for length in lengths)
    models = tuple(_model(table, tokens) for table in top.tables("models"))
    found = FeasibilityFile(
        tokens=tokens,
        hardware=_hardware(top.table("hardware")),
        models=models,
        clusters=tuple(
            _cluster(table, {model.name for model in models}, tokens)
            for table in top.tables("clusters")
        ),
        cluster_gpus=top.integer("cluster_gpus", minimum=1, maximum=MAX_GPUS),
        links=tuple(_link(table) for table in top.tables("links")),
    )
    top.finish()
    return found


def _hardware(table: Table) -> Hardware:
    hardware = Hardware(
        name=table.text("name"),
        gpus=table.integer("gpus", minimum=1, maximum=MAX_GPUS),
        flops_per_s=table.number("flops_per_s", above=0, maximum=MAX_RATE),
        memory_bytes_per_s=table.number("memory_bytes_per_s", above=0, maximum=MAX_RATE),
        bytes_per_weight=table.number("bytes_per_weight", above=0, maximum=8),
    )
    table.finish()
    return hardware


def _model(table: Table, tokens: tuple[int, ...]) -> ModelPoints:
    rates = table.numbers("published_gbits_per_s", above=0, maximum=MAX_RATE)
    times: tuple[float | None, ...] = (None,) * len(tokens)
    source = "PrfaaS Table 3"
    if "prefill_s" in table:
        times = table.numbers("prefill_s", above=0, maximum=1e6)
        source = table.text("source")
    for key, values in (("published_gbits_per_s", rates), ("prefill_s", times)):
        if len(values) != len(tokens):
            raise table.error(key, f"{len(values)} values for {len(tokens)} lengths")
    points = tuple(
        PublishedPoint(
            tokens=length, phi_bytes_per_s=rate * GBIT_BYTES, prefill_s=time_s, source=source
        )
        for length, rate, time_s in zip(tokens, rates, times, strict=True)
    )
    further = table.tables("prefill") if "prefill" in table else ()
    model = ModelPoints(
        name=table.text("name"),
        spec=read_model(table.file("config")),
        table=points,
        further=tuple(_further(point) for point in further),
    )
    table.finish()
    return model


def _further(table: Table) -> PublishedPoint:
    point = PublishedPoint(
        tokens=table.integer("tokens", minimum=1, maximum=MAX_TOKENS),
        phi_bytes_per_s=_gbits(table),
        prefill_s=table.number("seconds", above=0, maximum=1e6),
        source=table.text("source"),
    )
    table.finish()
    return point


def _cluster(table: Table, names: set[str], tokens: tuple[int, ...]) -> Cluster:
    cluster = Cluster(
        model=table.choice("model", sorted(names)),
        gpus=table.integer("gpus", minimum=1, maximum=MAX_GPUS),
        tokens=table.integer("tokens", minimum=1, maximum=MAX_TOKENS),
        published_bytes_per_s=_gbits(table),
    )
    if cluster.tokens not in tokens:
        raise table.error("tokens", f"{cluster.tokens} is none of {', '.join(map(str, tokens))}")
    table.finish()
    return cluster


def _link(table: Table) -> tuple[str, float]:
    link = (table.text("name"), table.number("bytes_per_s", above=0, maximum=MAX_RATE))
    table.finish()
    return link


def _gbits(table: Table) -> float:
    rate = table.number("published_gbits_per_s", above=0, maximum=MAX_RATE)
    return rate * GBIT_BYTES
