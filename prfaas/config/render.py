"""A configuration as TOML that loads to the same configuration."""

from prfaas.config.options import NodeConfig
from prfaas.config.setting import SECTIONS, Setting
from prfaas.config.settings import SETTINGS

MASK = "********"


def render_toml(config: NodeConfig) -> str:
    """Return the settings that the node's role heeds, secrets masked.

    A setting that is absent stands as a comment. Unless a secret was masked, loading the text gives
    `config` again.
    """
    lines = [f"role = {_toml(config.role)}"]
    for section in SECTIONS:
        settings = [
            setting
            for setting in SETTINGS
            if setting.section == section and config.role in setting.roles
        ]
        if settings:
            lines += ["", f"[{section}]"]
            lines += [
                _line(setting, getattr(getattr(config, section), setting.name))
                for setting in settings
            ]
    return "\n".join(lines) + "\n"


def _line(setting: Setting, value: object) -> str:
    if value is None:
        return f"# {setting.name} is not set"
    return f"{setting.name} = {_toml(MASK if setting.is_secret else value)}"


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case _:
            raise AssertionError(f"no setting has a {type(value).__name__}")
