"""The `prfaas` command."""

import click

from prfaas import __version__
from prfaas.cli.bench import bench
from prfaas.cli.cache import cache
from prfaas.cli.chat import chat
from prfaas.cli.failures import FailingGroup
from prfaas.cli.model import model
from prfaas.cli.plan import plan
from prfaas.cli.profile import profile
from prfaas.cli.serve import serve
from prfaas.cli.simulate import simulate
from prfaas.cli.verify import verify


@click.group(
    name="prfaas",
    cls=FailingGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="prfaas %(version)s")
def main() -> None:
    """Serve LLMs with prefill as a service: long prompts are prefilled by another node."""


for command in (serve, model, plan, simulate, profile, verify, chat, cache, bench):
    main.add_command(command)
