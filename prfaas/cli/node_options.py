"""The flags of a node, made from the table of settings."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from prfaas.config.load import load_config
from prfaas.config.options import NodeConfig
from prfaas.config.settings import SETTINGS, Setting

Command = TypeVar("Command", bound=Callable[..., Any])

_METAVARS = {"integer": "N", "number": "SECONDS", "size": "BYTES", "text": "TEXT"}


def node_options(command: Command) -> Command:
    """Add `--config` and a flag for each setting that is no secret.

    The values arrive as typed, None if absent: `config_from` merges and checks them, so that a flag,
    a variable and a line of TOML are refused in the same words.
    """
    for setting in reversed(SETTINGS):
        if setting.flag is not None:
            command = _option(setting, setting.flag)(command)
    return click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A TOML file of settings; PRFAAS_CONFIG names one too.",
    )(command)


def config_from(config_path: Path | None, flags: dict[str, object]) -> NodeConfig:
    """Return the configuration of the flags, this process's environment and the file."""
    return load_config(flags=flags, environ=os.environ, config_path=config_path)


def _option(setting: Setting, flag: str) -> Callable[[Command], Command]:
    if setting.kind == "switch":
        return click.option(
            f"{flag}/--no-{flag.removeprefix('--')}",
            setting.parameter,
            default=None,
            help=setting.help,
        )
    metavar = "|".join(setting.choices) if setting.choices else _METAVARS[setting.kind]
    return click.option(flag, setting.parameter, metavar=metavar, help=setting.help)
