"""The process of one node: its event loop, its progress and its banner on standard error."""

import asyncio
from collections.abc import Sequence
from typing import assert_never

import click
import uvloop

from prfaas.cli.banner import banner
from prfaas.cli.progress import Progress, shown_progress
from prfaas.config.options import NodeConfig, Role
from prfaas.log import configure_logging
from prfaas.server.app import serve, served_name
from prfaas.server.metrics import Metrics
from prfaas.server.node import Node, NodeFactory
from prfaas.server.pd import load_pd_node
from prfaas.server.prefill import load_prefill_node
from prfaas.server.scheduler import load_scheduler_node


def run_node(config: NodeConfig) -> None:
    """Serve until a signal; returns once everything is drained and closed.

    Raises:
        ConfigError: the address, the model or a setting cannot be used.
    """
    configure_logging(level=config.log.level, log_format=config.log.format)

    def announce(node: Node, routes: Sequence[str]) -> None:
        template = getattr(node, "chat_template", None)  # only nodes that serve the API have one
        text = banner(
            config,
            model=served_name(config),
            routes=routes,
            is_plain_template=template is not None and template.is_plain,
        )
        click.echo(text, err=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(showing_progress(node_factory(config.role)), config, on_ready=announce))


def node_factory(role: Role) -> NodeFactory:
    """Return what loads a node of this role."""
    match role:
        case "pd":
            return load_pd_node
        case "prefill":
            return load_prefill_node
        case "scheduler":
            return load_scheduler_node
        case _:
            assert_never(role)


def showing_progress(load: NodeFactory) -> NodeFactory:
    """Return a factory that also shows its progress on standard error."""

    def load_and_show(config: NodeConfig, metrics: Metrics, progress: Progress) -> Node:
        with shown_progress() as show:

            def note(stage: str, done: int, total: int) -> None:
                show(stage, done, total)
                progress(stage, done, total)

            return load(config, metrics, note)

    return load_and_show
