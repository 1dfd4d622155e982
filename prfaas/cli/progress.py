"""Long steps shown on standard error: bars on a terminal, one line a stage elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

Progress = Callable[[str, int, int], None]
"""(stage, done, total); a total of 0 is a stage of unknown length."""


@contextmanager
def shown_progress(*, is_quiet: bool = False) -> Iterator[Progress]:
    """Yield a callable that shows each stage until the block ends; quiet shows none."""
    if is_quiet:
        yield lambda _stage, _done, _total: None
    elif sys.stderr.isatty():
        with _bars() as show:
            yield show
    else:
        yield _lines()


def _lines() -> Progress:
    stages: set[str] = set()

    def show(stage: str, _done: int, _total: int) -> None:
        if stage not in stages:
            stages.add(stage)
            click.echo(f"{stage} ...", err=True)

    return show


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich import progress as bars  # slow to import
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeRemainingColumn(),
    )
    tasks: dict[str, bars.TaskID] = {}
    with bars.Progress(*columns, console=Console(stderr=True)) as display:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = display.add_task(stage)
            display.update(tasks[stage], completed=done, total=total or None)

        yield show
