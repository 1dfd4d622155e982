"""What a node says once it takes requests."""

from collections.abc import Sequence

from prfaas import __version__
from prfaas.config.advertised import advertised
from prfaas.config.options import NodeConfig
from prfaas.scheduler.options import SchedulerOptions


def banner(
    config: NodeConfig, *, model: str, routes: Sequence[str], is_plain_template: bool
) -> str:
    """Return the lines that tell a person what runs here and how to reach it."""
    host = f"[{config.http.host}]" if ":" in config.http.host else config.http.host
    # The certificate of a pd node on its own is the one it shows to its peer; its port speaks plain HTTP.
    is_reached = config.role != "pd" or config.fleet.scheduler is not None
    is_tls = is_reached and config.transport.tls_cert is not None
    rows = {
        "model": f"{model}, {_engine(config)}",
        "address": f"{'https' if is_tls else 'http'}://{host}:{config.http.port}",
        "routes": ", ".join(route for route in routes if not route.startswith("*")),
    }
    if is_plain_template:
        rows["template"] = "no chat template in checkpoint: plain transcript"
    if config.role == "scheduler":
        rows["fleet"] = f"policy {config.scheduler.policy_in_force}; nodes join with --scheduler"
    elif config.fleet.scheduler is not None:
        rows["fleet"] = (
            f"cluster {config.fleet.cluster} of scheduler {config.fleet.scheduler},"
            f" as {advertised(config)}"
        )
    elif config.role == "pd":
        rows["peer"] = (
            f"{config.transport.peer} {_peer_use(config.scheduler)}"
            if config.transport.peer
            else "none: every prompt is prefilled here"
        )
    lines = [f"prfaas {__version__}, role {config.role}, is ready"]
    lines += [f"  {label:<9} {value}" for label, value in rows.items()]
    return "\n".join(lines)


def _peer_use(options: SchedulerOptions) -> str:
    """Return what the peer is for."""
    policy, tokens = options.policy_in_force, options.first_threshold_tokens
    match policy:
        case "local":
            return "for nothing: every prompt is prefilled here (policy local)"
        case "always-remote":
            return "for every prompt (policy always-remote)"
        case "static" if options.threshold_tokens is not None:
            return f"for more than {tokens} uncached prompt tokens"
        case _:
            return f"for more than {tokens} uncached prompt tokens at first (policy {policy})"


def _engine(config: NodeConfig) -> str:
    if config.role == "scheduler":
        return "computed by the fleet's nodes"
    if config.engine.kind == "replay":
        replay = config.replay
        return f"replayed at {replay.speed:g} x speed with {replay.bytes_scale:g} of its KV bytes"
    return f"{config.engine.weight_dtype} weights on {config.engine.device}"
