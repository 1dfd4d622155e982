"""Every command of docs/fleet.md that starts a node is one that a node starts with."""

import re
from pathlib import Path

import pytest

from prfaas.cli.serve import serve
from prfaas.config.advertised import advertised
from prfaas.config.load import load_config
from prfaas.config.options import NodeConfig

TEXT = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text(encoding="utf-8")
COMMANDS: list[str] = re.findall(r"^\$ prfaas serve (.+)$", TEXT, flags=re.MULTILINE)
FLEETS: list[list[str]] = [
    re.findall(r"^\$ prfaas serve (.+)$", block, flags=re.MULTILINE)
    for block in re.findall(r"```console\n(.*?)```", TEXT, flags=re.DOTALL)
    if "$ prfaas serve" in block
]


def config_of(command: str) -> NodeConfig:
    """The configuration of a node that is started so."""
    with serve.make_context("serve", command.split()) as context:
        flags = {
            k: v for k, v in context.params.items() if k not in ("config_path", "print_config")
        }
    return load_config(flags=flags, environ={}, config_path=None)


@pytest.mark.parametrize("fleet", FLEETS)
def test_the_nodes_of_a_documented_fleet_join_its_scheduler(fleet):
    scheduler, *members = map(config_of, fleet)
    assert scheduler.role == "scheduler"
    assert {member.role for member in members} == {"pd", "prefill"}
    address = f"{scheduler.http.host}:{scheduler.http.port}"
    assert {member.fleet.scheduler for member in members} == {address}
    assert len({advertised(member) for member in members}) == len(members)


def test_the_fleets_of_the_documentation_are_found():
    assert [len(fleet) for fleet in FLEETS] == [4, 4]
    assert sum(map(len, FLEETS)) == len(COMMANDS)


def test_two_clusters_of_the_documentation_share_one_key():
    configs = [config_of(command) for command in FLEETS[1]]
    assert {str(config.transport.cluster_key_file) for config in configs} == {"cluster.key"}
    clusters = {config.fleet.cluster for config in configs if config.role == "pd"}
    assert clusters == {"east", "west"}
