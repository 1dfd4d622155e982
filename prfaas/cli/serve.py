"""`prfaas serve`: one node in the foreground."""

import gc
import os
import signal
import sys
from pathlib import Path

import click

from prfaas.cli.node_options import config_from, node_options
from prfaas.config.render import render_toml

SCHEDULER_GC_OBJECTS = 10_000
"""Garbage is looked for after so many: at Python's 700 it takes a twelfth of a scheduler's time, which has no tensors."""


@click.command(short_help="Run one node until SIGTERM or Ctrl-C.")
@node_options()
@click.option("--print-config", is_flag=True, help="Print the merged settings as TOML and exit.")
def serve(config_path: Path | None, *, print_config: bool, **flags: object) -> None:
    """Run one node until SIGTERM or Ctrl-C; running answers are finished first.

    A setting comes from its flag, else its variable (for --threads PRFAAS_THREADS), else the TOML
    file, else its default.
    """
    config = config_from(config_path, flags)
    if print_config:
        click.echo(render_toml(config), nl=False)
        return
    limit_threads(config.engine.threads)
    exit_on_signals()
    gc.disable()  # some hundred thousand objects are made, and none of them is garbage
    from prfaas.cli.node_process import run_node  # imports torch and aiohttp

    gc.freeze()
    gc.enable()
    if config.role == "scheduler":
        gc.set_threshold(SCHEDULER_GC_OBJECTS)
    run_node(config)


def limit_threads(threads: int | None) -> None:
    """Let every OpenMP and MKL pool of this process have `threads` threads, and none of them spin.

    The engine's own kernels have threads of their own, and what torch still computes beside them is
    small: its threads would hold cores for a while after each operator.
    Works until torch is imported; torch.set_num_threads would reach the calling thread's pool only.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)


def exit_on_signals() -> None:
    """Let SIGTERM and SIGINT end the process with status 0 until the event loop takes them over.

    Importing torch takes seconds, and nothing is running yet that would have to be drained.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
