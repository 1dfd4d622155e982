"""`prfaas cache`: what the cache directory of a stopped node holds, and whether it is whole."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from prfaas.cli.progress import shown_progress

if TYPE_CHECKING:
    from prfaas.cache.store_directory import CacheDirectory, Generation
    from prfaas.cache.store_records import Records

Command = TypeVar("Command", bound=Callable[..., Any])


def _options(command: Command) -> Command:
    command = click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")(
        command
    )
    return click.option(
        "--cache-dir",
        type=click.Path(path_type=Path),
        envvar="PRFAAS_CACHE_DIR",
        show_envvar=True,
        required=True,
        metavar="DIR",
        help="The directory that the node was given.",
    )(command)


@click.group(short_help="Look at the KVCache on disk, check it, clear it.")
def cache() -> None:
    """Look at the KVCache that a stopped node left on disk, check it, clear it.

    A node keeps nothing on disk unless it is given a directory, so these need it, too. A running
    node holds its directory; its figures are in its metrics.
    """


@cache.command()
@_options
def stats(cache_dir: Path, *, is_json: bool) -> None:
    """Show how much is stored, of which models."""
    with _held(cache_dir) as directory:
        path = str(directory.path)
        generations = [_figures(directory, found) for found in directory.generations()]
    if is_json:
        click.echo(json.dumps({"directory": path, "generations": generations}, indent=2))
        return
    click.echo(path)
    for figures in generations:
        click.echo(f"\n{figures['name']}")
        for label, text in _figure_lines(figures):
            click.echo(f"  {label:<12} {text}")
    if not generations:
        click.echo("nothing is stored")


@cache.command(name="ls")
@_options
@click.option("--limit", type=click.IntRange(min=0), help="Show at most this many records.")
def list_records(cache_dir: Path, *, is_json: bool, limit: int | None) -> None:
    """List the records: generation, group of layers, block key, bytes, tenant, time."""
    rows: list[dict[str, Any]] = []
    num_records = 0
    with _held(cache_dir) as directory:
        for generation in directory.generations():
            with _records(directory, generation) as records:
                for key, record in records.listing() if records is not None else ():
                    num_records += 1
                    if limit is None or len(rows) < limit:
                        rows.append(_row(generation, key, record))
    if is_json:
        click.echo(json.dumps({"num_records": num_records, "records": rows}, indent=2))
        return
    for row in rows:
        click.echo(
            f"{row['generation'][:11]}  group {row['group']:<3} {row['key'][:16]}"
            f"  {row['length_bytes']:>12,}  {row['tenant'][:8] or '-':<8}  {row['created']}"
        )
    hidden = f", {num_records - len(rows):,} not shown" if len(rows) < num_records else ""
    click.echo(f"{num_records:,} records{hidden}", err=True)


@cache.command()
@_options
def verify(cache_dir: Path, *, is_json: bool) -> None:
    """Read every record and compare it with its checksum; damaged ones are removed.

    The status is 0 if all were whole, else 1.
    """
    totals = {"num_records": 0, "total_bytes": 0, "num_damaged": 0}
    unread = []
    with _held(cache_dir) as directory, shown_progress(is_quiet=is_json) as show:
        for generation in directory.generations():
            with _records(directory, generation) as records:
                if records is None:
                    unread.append(generation.path.name)
                    continue
                for name, number in _verified(records, generation.path.name, show).items():
                    totals[name] += number
    if is_json:
        click.echo(json.dumps(totals | {"unreadable_generations": unread}, indent=2))
    else:
        click.echo(
            f"{totals['num_records']:,} records of {_mib(totals['total_bytes'])}:"
            f" {totals['num_damaged']:,} damaged and removed"
        )
        for name in unread:
            click.echo(f"{name} cannot be read; `prfaas cache clear` deletes it")
    if totals["num_damaged"] or unread:
        raise click.exceptions.Exit(1)


@cache.command()
@_options
@click.option("--zero", is_flag=True, help="Overwrite the bytes before deleting the files.")
def clear(cache_dir: Path, *, is_json: bool, zero: bool) -> None:
    """Delete everything that is stored.

    With --zero the files are overwritten first; a drive that remaps its blocks, or a file system
    that copies on write, may still keep the old ones.
    """
    from prfaas.errors import StoreError

    num_generations = num_bytes = 0
    with _held(cache_dir) as directory, shown_progress(is_quiet=is_json) as show:
        found = directory.generations()
        for generation in found:
            try:
                directory.remove(generation, zero=zero)
            except OSError as error:
                raise StoreError(f"cannot delete {generation.path}: {error.strerror}") from error
            num_generations += 1
            num_bytes += generation.num_bytes
            show("clear", num_generations, len(found))
    if is_json:
        click.echo(json.dumps({"num_generations": num_generations, "freed_bytes": num_bytes}))
    else:
        click.echo(f"{_mib(num_bytes)} of {num_generations} generations deleted")


@contextmanager
def _held(cache_dir: Path) -> "Iterator[CacheDirectory]":
    from prfaas.cache.store_directory import locked_directory
    from prfaas.log import configure_logging

    configure_logging(level="warning")
    with locked_directory(cache_dir, create=False) as directory:
        yield directory


@contextmanager
def _records(directory: "CacheDirectory", generation: "Generation") -> "Iterator[Records | None]":
    """Yield the records of a generation, nothing evicted; None if it was moved aside."""
    from prfaas.cache.options import StoreOptions
    from prfaas.cache.store_open import open_records
    from prfaas.clock import wall_s

    if generation.identity is None or generation.is_damaged:
        yield None
        return
    no_limit = StoreOptions(quota_bytes=1 << 62)
    records = open_records(directory, generation.identity, no_limit, wall=wall_s)
    try:
        yield records
    finally:
        records.close()


def _verified(
    records: "Records", name: str, show: Callable[[str, int, int], None]
) -> dict[str, int]:
    from prfaas.cache.store_verify import verify_records

    totals: dict[str, int] = {}
    for progress in verify_records(records):
        show(f"verify {name}", progress.done_bytes, progress.total_bytes)
        totals = {
            "num_records": progress.num_records,
            "total_bytes": progress.total_bytes,
            "num_damaged": progress.num_damaged,
        }
    return totals


def _figures(directory: "CacheDirectory", generation: "Generation") -> dict[str, Any]:
    figures: dict[str, Any] = {
        "name": generation.path.name,
        "identity": generation.identity,
        "is_readable": False,
        "file_bytes": generation.num_bytes,
        "last_used": _when(generation.used_s) if generation.used_s else None,
    }
    with _records(directory, generation) as records:
        if records is not None:
            found = records.stats()
            figures |= {
                "is_readable": True,
                "num_records": found.num_records,
                "live_bytes": found.live_bytes,
                "num_segments": found.num_segments,
                "oldest": None if found.oldest_s is None else _when(found.oldest_s),
                "tenant_bytes": {name.hex(): size for name, size in found.tenant_bytes.items()},
            }
    return figures


def _figure_lines(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "identity", figures["identity"] or "unknown"
    if figures["is_readable"]:
        yield "records", f"{figures['num_records']:,} of {_mib(figures['live_bytes'])}"
        yield "tenants", str(len(figures["tenant_bytes"]))
        yield "oldest", figures["oldest"] or "-"
    else:
        yield "unreadable", "moved aside; `prfaas cache clear` deletes it"
    yield "on disk", f"{_mib(figures['file_bytes'])}, last used {figures['last_used'] or 'never'}"


def _row(generation: "Generation", key: Any, record: Any) -> dict[str, Any]:
    return {
        "generation": generation.path.name,
        "group": key[0],
        "key": key[1].hex(),
        "length_bytes": record.length,
        "tenant": record.tenant.hex(),
        "created": _when(record.created_s),
    }


def _when(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
