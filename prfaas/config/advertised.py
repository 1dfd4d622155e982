"""Under which address a fleet knows a node."""

from prfaas.config.options import NodeConfig
from prfaas.config.rules import split_peer


def advertised(config: NodeConfig) -> str:
    """Return "host:port" or "[v6]:port", the node's name in its fleet.

    `config` has passed `check_rules`: its port is set.
    """
    host, port = config.http.host, config.http.port
    if config.fleet.advertise is not None:
        host, port = split_peer(config.fleet.advertise)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
