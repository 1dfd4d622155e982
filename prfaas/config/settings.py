"""The table of settings, in the order in which they are shown."""

from prfaas.config.fleet_settings import FLEET_SETTINGS
from prfaas.config.node_settings import NODE_SETTINGS
from prfaas.config.options import Role
from prfaas.config.setting import Setting, setting

ROLE_PORTS: dict[Role, int] = {"pd": 8000, "prefill": 8100, "scheduler": 8200}

SETTINGS: tuple[Setting, ...] = (
    *NODE_SETTINGS,
    *FLEET_SETTINGS,
    setting("log.level", "Least severe event that is logged.", needs_section=True),
    setting("log.format", "Logs on standard error.", needs_section=True),
)
