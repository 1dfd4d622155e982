"""All options of one node."""

from dataclasses import dataclass, field
from typing import Literal

from prfaas.cache.options import CacheOptions
from prfaas.engine.options import EngineOptions
from prfaas.engine.replay_options import ReplayOptions
from prfaas.scheduler.options import SchedulerOptions
from prfaas.transport.options import TransportOptions

Role = Literal["prefill", "pd", "scheduler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of the `[model]` section."""

    model: str = "gemma-3-270m"
    """A fetched name, a GGUF file or a Hugging Face directory."""
    served_model_name: str | None = None
    """What clients call it; None is the name or the file's stem."""
    chat_template: str | None = None
    """A jinja file that replaces the checkpoint's template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Options of the `[http]` section."""

    host: str = "127.0.0.1"
    port: int | None = None
    """None is the role's: pd 8000, prefill 8100, scheduler 8200."""
    max_body_bytes: int = 32 << 20
    drain_timeout_s: float = 30.0
    """After SIGTERM, running answers get this long."""
    read_timeout_s: float = 30.0
    """A request's head and body must arrive, and a client take what it is sent, within this."""
    cors_allow_origin: str | None = None
    api_key: str | None = None
    """The operator's: clients must show it as a bearer token; None asks for none."""
    api_key_file: str | None = None
    """One tenant's key a line; each opens the API, and shares no cached block with another."""
    heartbeat_s: float | None = None
    """A stream that is silent this long gets a comment line; None sends none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Options of the `[fleet]` section: the fleet that a node is a member of."""

    scheduler: str | None = None
    """host:port of the scheduler; None is a node on its own."""
    cluster: str = "default"
    """Nodes of one cluster share a fast network."""
    advertise: str | None = None
    """host:port at which others reach this node, and its name; None is where it listens."""
    mode: Literal["prefill", "decode", "both"] = "both"
    """What a pd node does at first; the scheduler may change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Options of the `[log]` section."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node: a role and the options of its rooms."""

    role: Role = "pd"
    model: ModelOptions = field(default_factory=ModelOptions)
    http: HttpOptions = field(default_factory=HttpOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    replay: ReplayOptions = field(default_factory=ReplayOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    transport: TransportOptions = field(default_factory=TransportOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    fleet: FleetOptions = field(default_factory=FleetOptions)
    log: LogOptions = field(default_factory=LogOptions)
