"""`prfaas verify`: does a prefill by the peer, or a whole server, give what this node gives?"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prfaas.cli.node_options import config_from, node_options
from prfaas.cli.progress import shown_progress
from prfaas.cli.serve import limit_threads
from prfaas.errors import ConfigError

if TYPE_CHECKING:
    from prfaas.server.verify import VerifyCase, VerifyReport
    from prfaas.server.verify_through import ThroughCase, ThroughReport


@click.command(short_help="Compare a peer's prefill with our own, bit by bit.")
@node_options(sections=("model", "engine", "replay", "cache", "transport"))
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Try a prompt of N tokens, too; may be given again.",
)
@click.option(
    "--through",
    metavar="URL",
    help="Instead of a peer, compare a whole server: a scheduler, or a pd node.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(
    config_path: Path | None,
    *,
    prompt_tokens: tuple[int, ...],
    through: str | None,
    as_json: bool,
    **flags: object,
) -> None:
    """Load the model here, and compare answers prefilled here with answers prefilled by --peer.

    Prompts of many lengths, greedy and seeded: without any cache, then with the caches of both
    sides. The status is 0 if all tokens and the first logits agree in every bit; with a lossy
    --kv-codec, whose differences are told, if the peer's own first logits do.

    With --through the answers of a running server are compared instead, as its clients get them: text, tokens and
    log-probabilities. PRFAAS_API_KEY is sent if it is set.
    """
    config = config_from(config_path, flags | {"role": "pd"}, listens=False)
    if (config.transport.peer is None) == (through is None):
        raise ConfigError(
            "verify needs either --peer host:port, the prefill node to compare with, or --through URL"
        )
    if through is not None and not through.startswith(("http://", "https://")):
        raise ConfigError(f"--through {through!r} is no http:// or https:// address")
    limit_threads(config.engine.threads)
    import asyncio  # slow to import, as is torch behind the next

    import uvloop

    from prfaas.log import configure_logging
    from prfaas.server.verify import VerifyCase, VerifyReport, run_verify
    from prfaas.server.verify_through import run_verify_through

    configure_logging(level="warning", log_format=config.log.format)

    def show(case: "VerifyCase | ThroughCase", done: int, total: int) -> None:
        line = describe(case) if isinstance(case, VerifyCase) else describe_through(case)
        click.echo(f"{done:>3}/{total} {line}", err=as_json)

    with (
        shown_progress(is_quiet=as_json) as progress,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        report: VerifyReport | ThroughReport
        if through is None:
            report = runner.run(
                run_verify(config, progress=progress, on_case=show, more_lengths=prompt_tokens)
            )
        else:
            report = runner.run(
                run_verify_through(
                    config,
                    through,
                    api_key=os.environ.get("PRFAAS_API_KEY"),
                    progress=progress,
                    on_case=show,
                    more_lengths=prompt_tokens,
                )
            )
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        click.echo(verdict(report) if isinstance(report, VerifyReport) else verdict_through(report))
    if not report.has_passed:
        raise click.exceptions.Exit(1)


def verdict(report: "VerifyReport") -> str:
    """Return the line about all cases."""
    if report.tokens_equal and report.bits_equal:
        line = "local and remote answers are equal"
    else:
        line = "local and remote answers are NOT equal"
    if not report.exact:
        difference = report.max_logit_difference
        logits = (
            "no logits to compare" if difference is None else f"logits by up to {difference:.3g}"
        )
        line += (
            f" (codec {report.codec}, exact: false): {logits}, "
            f"{report.greedy_agreement:.1%} of the greedy tokens before the first that differs"
        )
    return line


def describe(case: "VerifyCase") -> str:
    """Return one line about a case."""
    if case.failure is not None:
        verdict = f"FAILED: {case.failure}"
    elif case.tokens_equal and case.bits_equal:
        verdict = "equal"
    else:
        verdict = "tokens equal, " if case.tokens_equal else "tokens DIFFER, "
        verdict += "bits equal" if case.bits_equal else "bits DIFFER"
        if case.max_logit_difference is not None:
            verdict += f" (logits by up to {case.max_logit_difference:.3g})"
    return (
        f"{case.prompt_tokens:>6} tokens {case.sampling:<6} {case.row:<13}"
        f" {case.tokens_reused:>6} reused {case.tokens_remote:>6} remote"
        f" {case.bytes_received / 1e6:>6.1f} MB  {verdict}"
    )


def verdict_through(report: "ThroughReport") -> str:
    """Return the line about all cases of a server."""
    num_equal = sum(case.is_equal for case in report.cases)
    nodes = sorted({case.node for case in report.cases if case.node is not None})
    num_remote = sum(case.route == "remote" for case in report.cases)
    by = f"by {len(nodes)} nodes" if nodes else "by one node"
    equal = "equal to local ones" if report.has_passed else "NOT equal to local ones"
    return f"{num_equal} of {len(report.cases)} answers, {by}, {num_remote} prefilled remotely: {equal}"


def describe_through(case: "ThroughCase") -> str:
    """Return one line about a case of a server."""
    verdict = "equal" if case.is_equal else f"DIFFERS at {case.difference}"
    return (
        f"{case.prompt_tokens:>6} tokens {case.sampling:<6} {case.row:<6} {case.route:<6}"
        f" {case.tokens_reused:>6} reused {case.tokens_remote:>6} remote"
        f" {case.bytes_received / 1e6:>6.1f} MB  {case.node or ''}  {verdict}"
    )
