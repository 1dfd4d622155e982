"""`prfaas plan`: how to divide a workload between clusters, and which models could be divided."""

import json
from pathlib import Path

import click

CONFIG_COMMAND = "config"
"""What `prfaas plan FILE` runs."""


class PlanGroup(click.Group):
    """A group whose first argument may be a file instead of a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; without a command in front they are those of CONFIG_COMMAND."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [CONFIG_COMMAND, *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write both forms."""
        formatter.write_usage(ctx.command_path, "CONFIG [--json] [--plot FILE.svg|png]")
        formatter.write_usage(ctx.command_path, "feasibility [FILE] [--json]")


@click.group(cls=PlanGroup, short_help="Plan deployments, and see which models fit which link.")
def plan() -> None:
    """Find the best threshold and roles for a workload, or see which models fit which link.

    CONFIG names a workload, profiles of the instances, a link and deployments, such as
    configs/case_study.toml; --json prints one JSON object, --plot draws Lambda_max over the
    threshold and over N_p : N_d.
    """


@plan.command(name=CONFIG_COMMAND, hidden=True)
@click.argument("config_path", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot",
    "plot_path",
    metavar="FILE.svg|png",
    type=click.Path(path_type=Path),
    help="Draw Lambda_max over the threshold and over N_p : N_d; PNG needs the extra `plot`.",
)
def plan_config(config_path: Path, plot_path: Path | None, *, as_json: bool) -> None:
    """Plan every deployment of CONFIG at its best, beside what was published of it."""
    from prfaas.cli.plan_lines import plan_lines
    from prfaas.config.plan_file import read_plan_file
    from prfaas.errors import ConfigError
    from prfaas.sim.chart_file import check_chart_path, write_charts
    from prfaas.sim.plan_charts import figure_5
    from prfaas.sim.plan_report import report

    if plot_path is not None:
        check_chart_path(plot_path)
    file = read_plan_file(config_path)
    if plot_path is not None:
        drawn = next((p for p in file.plans.values() if p.threshold_tokens is not None), None)
        if drawn is None:
            raise ConfigError(f"--plot: {config_path} has no deployment with a threshold")
        write_charts(figure_5(file.model, drawn), plot_path)
    facts = report(file)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for line in plan_lines(facts, file):
        click.echo(line)
    if plot_path is not None:
        click.echo(f"drawn in {plot_path}")


@plan.command(short_help="Show which models make how much KVCache.")
@click.argument("path", metavar="[FILE]", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def feasibility(path: Path | None, *, as_json: bool) -> None:
    """Show how fast models make KVCache, what clusters of them send, and which link carries it.

    FILE is configs/feasibility.toml of the checkout unless another is given.
    """
    from prfaas.cli.plan_lines import feasibility_lines
    from prfaas.config.feasibility_file import read_feasibility, shipped_feasibility
    from prfaas.sim.feasibility_report import report

    facts = report(read_feasibility(shipped_feasibility() if path is None else path))
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for line in feasibility_lines(facts):
        click.echo(line)
