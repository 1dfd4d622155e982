"""What a setting is: one field of the rooms' options, with its name in flags, environment and TOML, its limits, and the roles that heed it."""

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
NODES: tuple[Role, ...] = ("prefill", "pd")
API: tuple[Role, ...] = ("pd", "scheduler")


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


def setting(key: str, help_text: str, **limits: Any) -> Setting:
    """Return the setting of a field, `section.name`; its type says what kind it is."""
    section, _, name = key.rpartition(".")
    hint = get_type_hints(SECTIONS[section])[name] if section else Role
    kind, choices = kind_of(name, hint)
    return Setting(section=section, name=name, kind=kind, choices=choices, help=help_text, **limits)
