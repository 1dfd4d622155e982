"""`prfaas bench`: what is between two nodes and what it is worth, and how a server answers a load."""

import json
from pathlib import Path

import click

from prfaas.cli.bench_serve import serve
from prfaas.cli.node_options import config_from, node_options
from prfaas.cli.progress import shown_progress
from prfaas.cli.ranges import FiniteRange

LINK_SETTINGS = (
    "connect_timeout_s",
    "stall_timeout_s",
    "allow_plaintext",
    "cluster_key_file",
    "tls_cert",
    "tls_key",
    "tls_ca",
    "tcp_congestion",
    "streams",
)


@click.group(short_help="Measure a link, or load a server.")
def bench() -> None:
    """Measure what is between two nodes, or how a running server answers a load."""


bench.add_command(serve)


@bench.command()
@click.argument("peer", metavar="HOST:PORT")
@node_options(sections=("transport",), names=LINK_SETTINGS)
@click.option(
    "--seconds",
    type=FiniteRange(min=0.05, max=20),
    default=2.0,
    show_default=True,
    help="How long each rate is measured.",
)
@click.option("--codecs/--no-codecs", default=True, help="Measure every codec, too.")
@click.option(
    "--local-tokens-per-s",
    type=FiniteRange(min=0, min_open=True),
    metavar="N",
    help="What this side prefills: gives a threshold.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def link(
    peer: str,
    config_path: Path | None,
    *,
    seconds: float,
    codecs: bool,
    local_tokens_per_s: float | None,
    as_json: bool,
    **flags: object,
) -> None:
    """Measure the link to the prefill node at HOST:PORT, which must be running.

    Made-up pages come over the KV channel as KV does: the rate with 1, 2, 4 ... up to --streams
    connections, round trip, loss, what checksum, MAC and TLS cost, what each codec makes of the rate,
    and which prompts are worth a remote prefill. The node serves its peers meanwhile; they share the link.
    """
    config = config_from(config_path, flags | {"role": "pd", "peer": peer}, listens=False)
    import asyncio  # slow to import, as is aiohttp behind the next

    import uvloop

    from prfaas.bench.link import FIXED_CODECS, measure_link
    from prfaas.bench.link_report import to_json, to_lines
    from prfaas.clock import monotonic_s
    from prfaas.log import configure_logging
    from prfaas.transport.address import parse_address
    from prfaas.transport.security import asker_security

    configure_logging(level="warning", log_format=config.log.format)
    most = config.transport.streams
    with (
        shown_progress(is_quiet=as_json) as progress,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        figures = runner.run(
            measure_link(
                parse_address(peer),
                config.transport,
                asker_security(config.transport),
                streams=[2**power for power in range(most.bit_length()) if 2**power < most]
                + [most],
                seconds=seconds,
                codecs=FIXED_CODECS if codecs else (),
                clock=monotonic_s,
                progress=progress,
            )
        )
    report = to_json(figures, local_tokens_per_s)
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for line in to_lines(report):
        click.echo(line)
