"""An error on purpose ends a command with one line on standard error and a status."""

import sys
from typing import IO, Any

import click

from prfaas.errors import ConfigError, PrfaasError


class Failure(click.ClickException):
    """The end of a command: one line, no traceback, status 1."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        click.echo(f"prfaas: {self.message}", file=file or sys.stderr)


class Misuse(Failure):
    """The operator must change something: status 2, as for a wrong flag."""

    exit_code = 2


class FailingGroup(click.Group):
    """A group whose commands may raise PrfaasError: 2 if the operator must act, else 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise Misuse(str(error)) from error
        except PrfaasError as error:
            raise Failure(str(error)) from error
