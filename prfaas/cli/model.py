"""`prfaas model`: fetch models and look at what is here."""

import json
from pathlib import Path

import click

from prfaas.cli.progress import shown_progress

SHOWN_LENGTHS = (1024, 4096, 8192, 32_768, 131_072)


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
@click.argument("name")
def inspect(name: str) -> None:
    """Show the layers of a model, and the KVCache that a prompt has to move."""
    from prfaas.engine.config import ModelConfig, bytes_per_token, kv_bytes
    from prfaas.text.chat_template import ChatTemplate

    directory = _ready_directory(name)
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text("utf-8")))
    windows = [layer.window_tokens for layer in config.layers if layer.window_tokens is not None]
    layers = f"{len(config.layers)}, {len(config.layers) - len(windows)} of full attention"
    if windows:
        layers += f", {len(windows)} with a window of {windows[0]} tokens"
    growth = sum(
        bytes_per_token(layer, "float32") for layer in config.layers if layer.window_tokens is None
    )
    is_plain = ChatTemplate.load(directory).is_plain
    rows = {
        "family": config.model_type,
        "context": f"{config.max_context_tokens:,} tokens",
        "vocabulary": f"{config.vocab_size:,}",
        "layers": layers,
        "template": "none: plain transcript" if is_plain else "in the checkpoint",
        "KVCache": f"{growth:,} bytes for each token, float32",
    }
    rows |= {
        f"  at {length:,}": f"{kv_bytes(config, length) / 2**20:,.1f} MiB"
        for length in SHOWN_LENGTHS
        if length <= config.max_context_tokens
    }
    for label, value in rows.items():
        click.echo(f"{label:<12} {value}")


@model.command()
@click.argument("name")
def remove(name: str) -> None:
    """Delete a fetched model."""
    from prfaas.models.store import remove as remove_model

    remove_model(name)


def _ready_directory(name: str) -> Path:
    from prfaas.models.store import resolve

    with shown_progress() as show:
        return resolve(name, show)
