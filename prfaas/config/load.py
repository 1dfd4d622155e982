"""One node's configuration from its sources: flag > environment > TOML file > default."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from prfaas.config.options import NodeConfig, Role
from prfaas.config.rules import check_rules
from prfaas.config.setting import SECTIONS, Setting
from prfaas.config.settings import ROLE_PORTS, SETTINGS
from prfaas.config.values import Value, read_value
from prfaas.errors import ConfigError

CONFIG_VARIABLE = "PRFAAS_CONFIG"
FOREIGN_VARIABLES = frozenset({CONFIG_VARIABLE, "PRFAAS_MODELS_DIR"})
"""Variables with our prefix that are no settings of a node."""

_BY_KEY = {setting.key: setting for setting in SETTINGS}
_BY_VARIABLE = {setting.variable: setting for setting in SETTINGS}
_BY_PARAMETER = {setting.parameter: setting for setting in SETTINGS}


@dataclass(slots=True)
class _Sources:
    """The values set so far and, for messages, how each was written."""

    values: dict[str, Value] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def set(self, setting: Setting, raw: object, origin: str) -> None:
        """Set a value, over what a weaker source said."""
        self.values[setting.key] = read_value(setting, raw, origin=origin)
        self.origins[setting.key] = origin

    def name_of(self, key: str) -> str:
        """Return how the value's source calls it; the flag if nobody set it."""
        return self.origins.get(key) or _BY_KEY[key].flag or key


def load_config(
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config_path: Path | None = None,
    listens: bool = True,
) -> NodeConfig:
    """Return the configuration of one node, each value from its strongest source.

    Args:
        flags: `Setting.parameter` -> what was typed; None for a flag that was not given.
        environ: only `PRFAAS_*` is looked at.
        config_path: a TOML file; `PRFAAS_CONFIG` names one if this is None.
        listens: the process will serve `http.host` and `http.port`.

    Raises:
        ConfigError: an unknown key, a value of another type or out of bounds, a setting that the
            role does not heed, or settings that do not fit together.
    """
    sources = _Sources()
    if config_path is None and environ.get(CONFIG_VARIABLE):
        config_path = Path(environ[CONFIG_VARIABLE])
    if config_path is not None:
        _read_toml(sources, config_path)
    _read_environment(sources, environ)
    for parameter, raw in flags.items():
        setting = _BY_PARAMETER[parameter]
        if raw is not None:
            sources.set(setting, raw, setting.flag or setting.key)
    config = _build(sources.values)
    _check_roles(sources, config.role)
    check_rules(config, sources.name_of, listens=listens)
    return config


def _build(values: Mapping[str, Value]) -> NodeConfig:
    sections = {
        section: options(
            **{
                setting.name: values[setting.key]
                for setting in SETTINGS
                if setting.section == section and setting.key in values
            }
        )
        for section, options in SECTIONS.items()
    }
    role = cast("Role", values.get("role", NodeConfig().role))
    config = NodeConfig(role=role, **sections)
    port = config.http.port if config.http.port is not None else ROLE_PORTS[role]
    return replace(config, http=replace(config.http, port=port))


def _check_roles(sources: _Sources, role: Role) -> None:
    for key in sources.values:
        setting = _BY_KEY[key]
        if role not in setting.roles:
            raise ConfigError(
                f"{sources.name_of(key)} has no effect with role {role};"
                f" it belongs to role {' or '.join(setting.roles)}"
            )


def _read_environment(sources: _Sources, environ: Mapping[str, str]) -> None:
    for variable, text in environ.items():
        if not variable.startswith("PRFAAS_") or variable in FOREIGN_VARIABLES:
            continue
        setting = _BY_VARIABLE.get(variable)
        if setting is None:
            raise ConfigError(
                f"unknown environment variable {variable}"
                + _near(variable, [*_BY_VARIABLE, *FOREIGN_VARIABLES])
            )
        sources.set(setting, text, variable)


def _read_toml(sources: _Sources, path: Path) -> None:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for name, entry in tables.items():
        if name not in SECTIONS:
            _set_toml(sources, path, name, entry)
        elif isinstance(entry, dict):
            for option, raw in entry.items():
                _set_toml(sources, path, f"{name}.{option}", raw)
        else:
            raise ConfigError(f"{path}: {name} is a table; write [{name}]")


def _set_toml(sources: _Sources, path: Path, key: str, raw: object) -> None:
    setting = _BY_KEY.get(key)
    if setting is None:
        section, _, _ = key.rpartition(".")
        known = [*_BY_KEY, *SECTIONS] if not section else list(_BY_KEY)
        raise ConfigError(f"{path}: unknown key {key}" + _near(key, known))
    sources.set(setting, raw, f"{path}: {key}")


def _near(name: str, known: Iterable[str]) -> str:
    """Return a hint naming the known names like `name`, or nothing if none is."""
    known = list(known)
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    last = name.rpartition(".")[2]
    matches += [key for key in known if key.rpartition(".")[2] == last and key not in matches]
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
