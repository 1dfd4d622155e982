"""`prfaas profile`: what this machine takes, as a file that plans, simulations and nodes read."""

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prfaas.cli.bench import LINK_SETTINGS
from prfaas.cli.node_options import config_from, node_options
from prfaas.cli.progress import Progress, shown_progress
from prfaas.cli.ranges import FiniteRange
from prfaas.cli.serve import limit_threads
from prfaas.errors import ConfigError

if TYPE_CHECKING:
    from prfaas.bench.profile_file import MeasuredProfile
    from prfaas.config.options import NodeConfig
    from prfaas.scheduler.profile import Link

ENGINE_SETTINGS = (
    "model",
    "device",
    "dtype",
    "threads",
    "max_batch_sequences",
    "chunk_tokens",
    "kv_ram_bytes",
    "max_context_tokens",
    "ram_bytes",
    "block_tokens",
)
LINK_SECONDS = 2.0


@click.command(short_help="Measure this machine; the file feeds plans, simulations and nodes.")
@node_options(
    sections=("model", "engine", "cache", "transport"),
    names=("peer", *ENGINE_SETTINGS, *LINK_SETTINGS),
)
@click.option(
    "-o",
    "--output",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    required=True,
    help="The TOML file to write.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option(
    "--seconds",
    type=FiniteRange(min=0.1, max=86_400),
    default=60.0,
    show_default=True,
    help="For the engine, about: more time, longer prompts.",
)
@click.option("--decode/--no-decode", "decodes", default=True, help="Measure decoding, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def profile(
    config_path: Path | None,
    path: Path,
    *,
    force: bool,
    seconds: float,
    decodes: bool,
    as_json: bool,
    **flags: object,
) -> None:
    """Load the model here and measure what this machine takes for it.

    T_prefill of prompts of 64, 128, 256 ... tokens while there is time, in the chunks that `serve` computes; S_kv
    as the model's layers have it, checked against the pages that these prompts made; T_decode with 1, 2, 4 ... up to
    --max-batch-sequences sequences; with --peer, which must be a running prefill node, the link to it.
    """
    config = config_from(config_path, flags | {"role": "pd"}, listens=False)
    if config.engine.kind != "torch":
        raise ConfigError("profile measures a model; a replayed engine has a profile already")
    check_output(path, force=force)
    limit_threads(config.engine.threads)
    from prfaas.bench.profile_file import to_json, to_lines, to_toml
    from prfaas.log import configure_logging

    configure_logging(level="warning", log_format=config.log.format)
    with shown_progress(is_quiet=as_json) as progress:
        link = measured_link(config, progress)
        measured = measured_profile(config, link, seconds, decodes=decodes, progress=progress)
    write_file(path, to_toml(measured))
    report = to_json(measured)
    if as_json:
        click.echo(json.dumps(report | {"file": str(path)}, indent=2))
        return
    for line in to_lines(report):
        click.echo(line)
    click.echo(f"written to {path}")


def check_output(path: Path, *, force: bool) -> None:
    """Raise ConfigError if `path` could not be written in the end, before minutes of measuring."""
    if path.is_dir():
        raise ConfigError(f"--output: {path} is a directory")
    if not path.parent.is_dir():
        raise ConfigError(f"--output: there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--output: no permission to write in {path.parent}")
    if path.exists() and not force:
        raise ConfigError(f"--output: {path} exists; --force replaces it")


def write_file(path: Path, text: str) -> None:
    """Write all of `text` or nothing. Raises ConfigError."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except OSError:
            with suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def measured_link(config: "NodeConfig", progress: Progress) -> "Link | None":
    """Return the link to the peer over the connections that a node would keep; None without a peer.

    Raises:
        TransferError: there is no such node.
        Overloaded: it is measured by somebody else.
    """
    if config.transport.peer is None:
        return None
    import asyncio  # slow to import, as is aiohttp behind the next

    import uvloop

    from prfaas.bench.link import measure_link
    from prfaas.clock import monotonic_s
    from prfaas.scheduler.profile import Link
    from prfaas.transport.address import parse_address
    from prfaas.transport.security import asker_security

    def show(_stage: str, done: int, total: int) -> None:
        progress("measure link", done, total)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(
            measure_link(
                parse_address(config.transport.peer),
                config.transport,
                asker_security(config.transport),
                streams=[config.transport.streams],
                seconds=LINK_SECONDS,
                codecs=(),
                clock=monotonic_s,
                progress=show,
            )
        )
    return Link(bytes_per_s=figures.best.bytes_per_s, rtt_s=figures.rtt_s)


def measured_profile(
    config: "NodeConfig",
    link: "Link | None",
    seconds: float,
    *,
    decodes: bool,
    progress: Progress,
) -> "MeasuredProfile":
    """Return what the engine takes, measured in about so many seconds after the model is loaded."""
    import time
    from datetime import UTC, datetime

    from prfaas.bench.machine import this_machine
    from prfaas.bench.profile_file import MeasuredProfile
    from prfaas.bench.profiling import EngineBench, measure_engine
    from prfaas.server.app import served_name
    from prfaas.server.model_parts import load_model_parts

    own = replace(config.cache, dir=None)  # no disk: it would be another one's, too
    parts = load_model_parts(replace(config, cache=own), progress)
    began_s, began_cpu_s = parts.clock(), time.thread_time()
    try:
        figures = measure_engine(
            EngineBench(parts.runner, parts.cache, vocab_size=parts.vocab_size, clock=parts.clock),
            max_prompt_tokens=parts.runner.max_context_tokens - 1,
            max_batch=config.engine.max_batch_sequences,
            decodes=decodes,
            seconds=seconds,
            clock=parts.clock,
            progress=progress,
        )
        cpu_fraction = (time.thread_time() - began_cpu_s) / (parts.clock() - began_s)
    finally:
        parts.cache.close()
    return MeasuredProfile(
        name=served_name(config),
        machine=this_machine(config.engine.device),
        weight_dtype=config.engine.weight_dtype,
        kv_dtype=parts.identity.kv_dtype,
        chunk_tokens=config.engine.chunk_tokens,
        layout=parts.cache.layout,
        figures=figures,
        link=link,
        peer=config.transport.peer,
        streams=config.transport.streams,
        date=datetime.now(UTC).date().isoformat(),
        cpu_fraction=cpu_fraction if config.engine.device == "cpu" else None,
    )
