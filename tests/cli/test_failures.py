"""An error on purpose is one line and a status; a mistake of ours stays a traceback."""

import click
import pytest
from click.testing import CliRunner

from prfaas.cli.failures import FailingGroup
from prfaas.errors import BadRequest, ConfigError, PrfaasError, TransferError


def run(error: Exception):
    @click.group(cls=FailingGroup)
    def group() -> None:
        pass

    @group.command()
    def fail() -> None:
        raise error

    return CliRunner().invoke(group, ["fail"])


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("port 1 is taken"), 2),
        (TransferError("peer went away"), 1),
        (PrfaasError("no"), 1),
        (BadRequest("no"), 1),
    ],
)
def test_an_error_is_one_line_on_standard_error(error, status):
    result = run(error)
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr == f"prfaas: {error}\n"


def test_a_message_of_many_lines_becomes_one():
    assert run(ConfigError("not TOML:\n  line 3\n")).stderr == "prfaas: not TOML: line 3\n"


def test_a_mistake_of_ours_is_not_dressed_up():
    assert isinstance(run(KeyError("x")).exception, KeyError)
