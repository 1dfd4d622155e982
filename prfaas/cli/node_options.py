"""The flags of a node, made from the table of settings."""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from prfaas.config.load import load_config
from prfaas.config.options import NodeConfig
from prfaas.config.setting import Setting
from prfaas.config.settings import SETTINGS

Command = TypeVar("Command", bound=Callable[..., Any])

_METAVARS = {
    "integer": "N",
    "number": "SECONDS",
    "rate": "RATE",
    "size": "BYTES",
    "text": "TEXT",
}


def node_options(
    sections: Collection[str] | None = None, *, names: Collection[str] | None = None
) -> Callable[[Command], Command]:
    """Return a decorator that adds `--config` and a flag for each setting that is no secret.

    `sections` limits the flags to those of a pd node in these sections, `names` to these of them. The values arrive as typed,
    None if absent: `config_from` merges and checks them, so that a flag, a variable and a line of
    TOML are refused in the same words.
    """

    def add(command: Command) -> Command:
        for setting in reversed(SETTINGS):
            is_wanted = sections is None or (setting.section in sections and "pd" in setting.roles)
            is_wanted = is_wanted and (names is None or setting.name in names)
            if setting.flag is not None and is_wanted:
                command = _option(setting, setting.flag)(command)
        return click.option(
            "--config",
            "config_path",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="A TOML file of settings; PRFAAS_CONFIG names one too.",
        )(command)

    return add


def config_from(
    config_path: Path | None, flags: Mapping[str, object], *, listens: bool = True
) -> NodeConfig:
    """Return the configuration of the flags, this process's environment and the file."""
    return load_config(flags=flags, environ=os.environ, config_path=config_path, listens=listens)


def _option(setting: Setting, flag: str) -> Callable[[Command], Command]:
    if setting.kind == "switch":
        return click.option(
            f"{flag}/--no-{flag.removeprefix('--')}",
            setting.parameter,
            default=None,
            help=setting.help,
        )
    metavar = "|".join(setting.choices) if setting.choices else _METAVARS[setting.kind]
    if setting.takes_auto:
        metavar = f"auto|{metavar}"
    if metavar == "SECONDS" and not setting.name.endswith("_s"):
        metavar = "NUMBER"
    return click.option(flag, setting.parameter, metavar=metavar, help=setting.help)
