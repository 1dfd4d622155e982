"""The table of settings: for each field of the rooms' options its name in flags, environment and TOML, its limits, and the roles that heed it."""

import types
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from prfaas.cache.options import CacheOptions
from prfaas.config.options import FleetOptions, HttpOptions, LogOptions, ModelOptions, Role
from prfaas.engine.options import EngineOptions
from prfaas.engine.replay_options import ReplayOptions
from prfaas.scheduler.options import SchedulerOptions
from prfaas.transport.options import TransportOptions

Kind = Literal["choice", "integer", "number", "rate", "size", "switch", "text"]

SECTIONS: dict[str, type[Any]] = {
    "model": ModelOptions,
    "http": HttpOptions,
    "engine": EngineOptions,
    "replay": ReplayOptions,
    "cache": CacheOptions,
    "transport": TransportOptions,
    "scheduler": SchedulerOptions,
    "fleet": FleetOptions,
    "log": LogOptions,
}
"""TOML table -> the options it fills, in the order they are printed."""

ALL_ROLES: tuple[Role, ...] = get_args(Role)
ROLE_PORTS: dict[Role, int] = {"pd": 8000, "prefill": 8100, "scheduler": 8200}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value that a person can set, and everything that is checked of it alone."""

    section: str
    """The TOML table; empty for the top level."""
    name: str
    kind: Kind
    help: str
    choices: tuple[str, ...] = ()
    above: float | None = None
    """The value must be greater than this."""
    minimum: float | None = None
    maximum: float | None = None
    roles: tuple[Role, ...] = ALL_ROLES
    takes_auto: bool = False
    """`auto` stands for no value: what is known decides."""
    is_secret: bool = False
    """Never shown, and without a flag: other users of the machine can read a command line."""
    needs_section: bool = False
    """The field's name alone does not say what it is of, so flag and variable name the section too."""
    typed_name: str | None = None
    """What flag and variable are called where a typed unit makes the field's unit idle."""

    @property
    def key(self) -> str:
        """The name in TOML: `section.name`."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def parameter(self) -> str:
        """The name of the flag as an identifier."""
        if self.typed_name is not None:
            return self.typed_name
        return f"{self.section}_{self.name}" if self.needs_section else self.name

    @property
    def flag(self) -> str | None:
        """The flag: `--threshold-tokens`; None for a secret."""
        return None if self.is_secret else "--" + self.parameter.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable: `PRFAAS_THRESHOLD_TOKENS`."""
        return "PRFAAS_" + self.parameter.upper()


def kind_of(name: str, hint: object) -> tuple[Kind, tuple[str, ...]]:
    """Return how a field of this name and type is read, and its choices if it has a closed set."""
    if get_origin(hint) in {Union, types.UnionType}:
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
    if get_origin(hint) is Literal:
        return "choice", get_args(hint)
    if hint is int and name.endswith("_bytes"):
        return "size", ()
    if hint is float and name.endswith("_bytes_per_s"):
        return "rate", ()
    kinds: dict[object, Kind] = {bool: "switch", int: "integer", float: "number", str: "text"}
    return kinds[hint], ()


def _setting(key: str, help_text: str, **limits: Any) -> Setting:
    section, _, name = key.rpartition(".")
    hint = get_type_hints(SECTIONS[section])[name] if section else Role
    kind, choices = kind_of(name, hint)
    return Setting(section=section, name=name, kind=kind, choices=choices, help=help_text, **limits)


_PD: tuple[Role, ...] = ("pd",)
_NODES: tuple[Role, ...] = ("prefill", "pd")
_API: tuple[Role, ...] = ("pd", "scheduler")

SETTINGS: tuple[Setting, ...] = (
    _setting(
        "role",
        "pd serves the API and decodes; prefill computes KVCache for others; scheduler fronts both.",
    ),
    _setting(
        "model.model", "A fetched name, a GGUF file, or a Hugging Face directory or repository."
    ),
    _setting(
        "model.served_model_name", "What clients call the model. Default: its name.", roles=_API
    ),
    _setting("model.chat_template", "A jinja file used instead of the checkpoint's template."),
    _setting("http.host", "Address to listen on."),
    _setting(
        "http.port",
        "Port to listen on. Default: pd 8000, prefill 8100, scheduler 8200.",
        minimum=1,
        maximum=65_535,
    ),
    _setting("http.max_body_bytes", "Largest request body; beyond it 413.", minimum=1024),
    _setting(
        "http.drain_timeout_s",
        "After SIGTERM running answers get this long.",
        minimum=0,
        maximum=86_400,
    ),
    _setting(
        "http.read_timeout_s",
        "A request's head and body must arrive within this.",
        above=0,
        maximum=86_400,
    ),
    _setting(
        "http.cors_allow_origin",
        "Origin that browsers may call from, or *. Default: none.",
        roles=_API,
    ),
    _setting(
        "http.api_key", "Clients must show this as a bearer token.", is_secret=True, roles=_API
    ),
    _setting(
        "http.api_key_file",
        "Tenants' keys, one a line, mode 0600. They share no cache; they open /v1 only.",
        roles=_API,
    ),
    _setting(
        "http.heartbeat_s",
        "A stream that is silent this long gets a comment line. Default: none.",
        above=0,
        maximum=86_400,
        roles=_API,
    ),
    _setting(
        "engine.kind",
        "torch computes a model; replay keeps a profile's time with real pages and no weights.",
        typed_name="engine",
    ),
    _setting(
        "engine.profile",
        "A profile's TOML file: what replay keeps to; a model's TTFT is predicted by it at first.",
    ),
    _setting("engine.device", "cpu, cuda or cuda:N. Only a CPU gives exact answers.", roles=_NODES),
    _setting(
        "engine.dtype",
        "Of packed weights. auto: float16 on a CPU, bfloat16 (of KV, too) on CUDA.",
        roles=_NODES,
    ),
    _setting(
        "engine.numerics",
        "strict: linear mixers give equal bits for any cut, at a cost; attention always does.",
        roles=_NODES,
    ),
    _setting(
        "engine.threads",
        "Torch threads. Default: all cores. Two nodes on one machine: cores / nodes.",
        minimum=1,
        maximum=1024,
        roles=_NODES,
    ),
    _setting(
        "engine.max_batch_sequences",
        "Sequences that run at once.",
        minimum=1,
        maximum=4096,
        roles=_NODES,
    ),
    _setting(
        "engine.chunk_tokens",
        "Prefill tokens of one step; a multiple of the block.",
        minimum=1,
        maximum=1 << 20,
        roles=_NODES,
    ),
    _setting(
        "engine.kv_ram_bytes", "Working KV of running sequences.", minimum=1 << 20, roles=_NODES
    ),
    _setting(
        "engine.max_context_tokens",
        "Prompt plus completion. Default: the model's limit.",
        minimum=2,
        roles=_NODES,
    ),
    _setting(
        "engine.max_waiting_requests",
        "Requests that may wait; beyond it 503.",
        minimum=1,
        maximum=1 << 20,
        roles=_NODES,
    ),
    _setting(
        "replay.speed",
        "With --engine replay: so many times as fast as the profile.",
        above=0,
        maximum=1e6,
        roles=_NODES,
    ),
    _setting(
        "replay.bytes_scale",
        "With --engine replay: the part of the profile's KV bytes that is really made and sent.",
        above=0,
        maximum=1,
        roles=_NODES,
    ),
    _setting(
        "cache.ram_bytes",
        "Prefix cache in RAM.",
        minimum=1 << 20,
        typed_name="cache_ram",
        roles=_NODES,
    ),
    _setting(
        "cache.dir",
        "Directory that keeps the prefix cache on disk, one node's at a time. Default: none.",
        needs_section=True,
        roles=_NODES,
    ),
    _setting(
        "cache.disk_bytes",
        "With --cache-dir: what its files may take.",
        minimum=1 << 20,
        typed_name="cache_disk",
        roles=_NODES,
    ),
    _setting(
        "cache.tenant_disk_bytes",
        "With --cache-dir: what one API key's pages may take. Default: as much as all.",
        minimum=1 << 20,
        typed_name="cache_tenant_disk",
        roles=_NODES,
    ),
    _setting(
        "cache.ttl_s",
        "With --cache-dir: pages are forgotten at this age. Default: when evicted.",
        above=0,
        maximum=10 * 365 * 86_400,
        typed_name="cache_ttl",
        roles=_NODES,
    ),
    _setting(
        "cache.zero_freed",
        "With --cache-dir: overwrite its files before they are deleted.",
        typed_name="cache_zero",
        roles=_NODES,
    ),
    _setting(
        "cache.block_tokens",
        "Tokens of one block; the same on both sides of a transfer.",
        minimum=1,
        maximum=4096,
        roles=_NODES,
    ),
    _setting(
        "cache.snapshot_tokens",
        "Keep windows and states every so many prompt tokens, a multiple of the block. 0: do not.",
        minimum=0,
        maximum=1 << 24,
        roles=_NODES,
    ),
    _setting("transport.peer", "host:port of the prefill node for long prompts; several, separated by commas.", roles=_PD),
    _setting(
        "transport.connect_timeout_s",
        "How long to wait for a connection to a peer, a node or the scheduler.",
        above=0,
        maximum=3600,
    ),
    _setting(
        "transport.stall_timeout_s",
        "No verified byte from the peer for this long: the rest is prefilled here.",
        above=0,
        maximum=3600,
        roles=_PD,
    ),
    _setting(
        "transport.lease_s",
        "A transfer without progress is dropped after this.",
        above=0,
        maximum=86_400,
        roles=_NODES,
    ),
    _setting(
        "transport.max_transfers",
        "Transfers served at once; more are refused.",
        minimum=1,
        maximum=1 << 16,
        roles=_NODES,
    ),
    _setting(
        "transport.accept_numerics",
        "approximate: take KV from a peer with other numerics; answers say exact: false.",
        roles=_API,
    ),
    _setting("transport.allow_plaintext", "The KV channel may leave loopback unencrypted."),
    _setting(
        "transport.kv_codec",
        "How the peer may encode pages. Up to auto lossless; the others make answers exact: false.",
        roles=_PD,
    ),
    _setting(
        "transport.streams",
        "Connections kept open to the peer, over which each transfer comes.",
        minimum=1,
        maximum=64,
        roles=_PD,
    ),
    _setting(
        "transport.kv_channel",
        "stream: raw connections to the peer, HTTP where a proxy lets none through. http: always HTTP.",
        roles=_PD,
    ),
    _setting(
        "transport.transfer_snapshot_tokens",
        "auto, 0 or N: a transfer that breaks leaves a prefix at a multiple of N tokens.",
        roles=_PD,
    ),
    _setting(
        "transport.tcp_congestion",
        "Congestion control of the KV channel's connections, as the kernel names it. Default: its own.",
        roles=_NODES,
    ),
    _setting(
        "transport.egress_limit_bytes_per_s",
        "KV is sent no faster, over all transfers together: 800Mbit. Default: no limit.",
        minimum=1000,
        typed_name="egress_limit",
        roles=_NODES,
    ),
    _setting(
        "transport.cluster_key_file",
        "A file of mode 600 whose secret both sides of the KV channel must prove to have.",
    ),
    _setting(
        "transport.tls_cert",
        "PEM certificate (chain) that this node shows; in a fleet, its port then speaks TLS alone.",
    ),
    _setting("transport.tls_key", "PEM key of --tls-cert."),
    _setting(
        "transport.tls_ca",
        "PEM of who signs the other side's certificates: reach it by TLS; prefill: demand one of every peer.",
    ),
    _setting(
        "scheduler.policy",
        "Where a prompt is prefilled. Default: static with a number for --threshold-tokens, else predictive.",
        roles=_API,
    ),
    _setting(
        "scheduler.threshold_tokens",
        "Prompts with more uncached tokens than this are prefilled by a peer. auto (default): as observed.",
        minimum=0,
        maximum=1 << 40,
        takes_auto=True,
        roles=_API,
    ),
    _setting(
        "scheduler.egress_target",
        "With --policy threshold or predictive: share of a link that KVCache may fill on average.",
        above=0,
        maximum=1,
        roles=_API,
    ),
    _setting(
        "scheduler.rebalance_period_s",
        "How often threshold, roles and shares of prefill and decode are solved anew.",
        above=0,
        maximum=86_400,
        roles=_API,
    ),
    _setting(
        "scheduler.rebalance_dwell_s",
        "Least time between two changes of a role or a share.",
        minimum=0,
        maximum=86_400,
        roles=_API,
    ),
    _setting(
        "scheduler.rebalance_prompts",
        "The last so many prompts are what they are solved for.",
        minimum=20,
        maximum=10_000,
        roles=_API,
    ),
    _setting(
        "fleet.scheduler",
        "host:port of the scheduler of the fleet that this node joins. Default: none.",
        roles=_NODES,
    ),
    _setting(
        "fleet.cluster",
        "With --scheduler: the cluster that this node is in; its nodes share a fast network.",
        roles=_NODES,
    ),
    _setting(
        "fleet.advertise",
        "With --scheduler: host:port at which others reach this node. Default: --host and --port.",
        roles=_NODES,
    ),
    _setting(
        "fleet.mode",
        "With --scheduler: what this node does until it is told otherwise.",
        roles=_PD,
    ),
    _setting("log.level", "Least severe event that is logged.", needs_section=True),
    _setting("log.format", "Logs on standard error.", needs_section=True),
)
