"""`prfaas model`: fetch models and look at what is here."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prfaas.cli.progress import shown_progress

if TYPE_CHECKING:
    from prfaas.engine.mixer_spec import KvDtype


@click.group(short_help="Fetch models and look at what is here.")
def model() -> None:
    """Fetch models and look at what is here; PRFAAS_MODELS_DIR says where."""


@model.command(short_help="Bring models onto this machine.")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--quiet", is_flag=True, help="No progress and no notices.")
def fetch(names: tuple[str, ...], *, quiet: bool) -> None:
    """Bring models onto this machine and make them ready to load.

    NAME is gemma-3-270m, smollm2-135m-instruct, or a Hugging Face repository (owner/name; needs the
    extra `hub`). What is here already is left alone.
    """
    from prfaas.models.fetch import fetch as fetch_model

    for name in names:
        with shown_progress(is_quiet=quiet) as show:
            fetched = fetch_model(name, show)
        if fetched.notice and not quiet:
            click.echo(fetched.notice, err=True)
        click.echo(fetched.path)


@model.command(name="list", short_help="Show what is here and what can be fetched.")
def list_models() -> None:
    """Show the models that are here with their sizes, and the names that can be fetched."""
    from prfaas.models.catalog import CATALOG
    from prfaas.models.directory import models_dir
    from prfaas.models.store import installed

    found = installed()
    absent = sorted(set(CATALOG) - {entry.name for entry in found})
    width = max(len(name) for name in (*absent, *(entry.name for entry in found), ""))
    for entry in found:
        click.echo(f"{entry.name:<{width}}  {entry.num_bytes / 1e6:>9,.1f} MB  {entry.path}")
    for name in absent:
        click.echo(f"{name:<{width}}  {'not here':>12}  prfaas model fetch {name}")
    click.echo(f"models are in {models_dir()}", err=True)


@model.command()
@click.argument("name")
def path(name: str) -> None:
    """Print the directory that a model is loaded from."""
    click.echo(_ready_directory(name))


@model.command(short_help="Show the layers and the KVCache of a model.")
@click.argument("name", metavar="PATH_OR_NAME")
@click.option(
    "--kv-dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="What K, V and convolution rows are kept in; recurrent state is float32.",
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def inspect(name: str, kv_dtype: "KvDtype", *, is_json: bool) -> None:
    """Show the layers of a model, and the KVCache that a prompt has to move.

    PATH_OR_NAME is a config.json, a directory with one, or anything that a node can serve. The
    config alone is read, of every family that prfaas knows; "unsupported" says what keeps this
    engine from running the model.
    """
    from prfaas.cli.model_report import lines, read_config, report

    path = _config_path(name)
    facts = report(read_config(path), kv_dtype)
    if is_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for line in lines(facts, _template(path.parent)):
        click.echo(line)


@model.command()
@click.argument("name")
def remove(name: str) -> None:
    """Delete a fetched model."""
    from prfaas.models.store import remove as remove_model

    remove_model(name)


def _config_path(name: str) -> Path:
    """The config.json that `name` is, has, or stands for."""
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    return _ready_directory(name) / "config.json"


def _template(directory: Path) -> str | None:
    """What a checkpoint says of its chat template; None where there is no tokenizer."""
    from prfaas.text.chat_template import ChatTemplate

    if not (directory / "tokenizer.json").is_file():
        return None
    is_plain = ChatTemplate.load(directory).is_plain
    return "none: plain transcript" if is_plain else "in the checkpoint"


def _ready_directory(name: str) -> Path:
    from prfaas.models.store import resolve

    with shown_progress() as show:
        return resolve(name, show)
