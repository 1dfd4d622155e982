"""The fleet in configs/compose.yaml starts as it stands: every service is a node that loads, and they find each other."""

import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from prfaas.cli.main import main
from prfaas.cli.serve import serve
from prfaas.config.advertised import advertised
from prfaas.config.load import load_config
from prfaas.config.options import NodeConfig

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "compose.yaml").read_text())
NODES = {name: service for name, service in COMPOSE["services"].items() if name != "models"}


def node_of(name: str) -> NodeConfig:
    """The configuration that a service starts with; every flag must be one that `serve` has."""
    service = NODES[name]
    arguments = [*service.get("command", ["serve"])]
    assert arguments.pop(0) == "serve"
    with serve.make_context("serve", arguments) as context:
        flags = {
            k: v for k, v in context.params.items() if k not in ("config_path", "print_config")
        }
    environ = dict(service["environment"])
    environ.pop("HEALTH_PORT", None)
    shipped = environ.pop("PRFAAS_CONFIG")
    path = ROOT / "configs" / Path(shipped).name if shipped else None
    assert not shipped or shipped.startswith("/etc/prfaas/")
    return load_config(flags=flags, environ=environ, config_path=path)


@pytest.mark.parametrize("name", NODES)
def test_a_service_is_a_node_that_loads_and_is_probed_at_its_port(name):
    config = node_of(name)
    health_port = NODES[name]["environment"].get("HEALTH_PORT", "8000")
    assert int(health_port) == config.http.port
    assert config.http.host == "0.0.0.0"


def test_the_fleet_is_a_scheduler_a_cluster_of_two_and_a_prefill_node():
    configs = {name: node_of(name) for name in NODES}
    roles = sorted(config.role for config in configs.values())
    assert roles == ["pd", "pd", "prefill", "scheduler"]
    clusters = {config.fleet.cluster for config in configs.values() if config.role == "pd"}
    assert len(clusters) == 1
    assert len({config.model.model for config in configs.values()}) == 1


def test_nodes_and_scheduler_find_each_other_by_their_services_names():
    (scheduler,) = (name for name in NODES if node_of(name).role == "scheduler")
    for name in NODES.keys() - {scheduler}:
        config = node_of(name)
        assert advertised(config) == f"{name}:{config.http.port}"
        assert config.fleet.scheduler == f"{scheduler}:{node_of(scheduler).http.port}"
        assert set(NODES[name]["networks"]) & set(NODES[scheduler]["networks"])


def test_only_the_scheduler_is_published_and_on_loopback_alone():
    published = {name: service["ports"] for name, service in NODES.items() if "ports" in service}
    assert published == {"scheduler": ["127.0.0.1:8200:8200"]}
    assert COMPOSE["networks"]["fleet"]["internal"]


def test_the_model_is_fetched_once_before_any_node_starts():
    fetch = COMPOSE["services"]["models"]
    command: click.Command = main
    with click.Context(main) as context:
        for word in fetch["command"][:2]:
            assert isinstance(command, click.Group)
            found = command.get_command(context, word)
            assert found is not None, word
            command = found
    assert fetch["command"][2] == node_of("pd-1").model.model
    for service in NODES.values():
        assert service["depends_on"]["models"]["condition"] == "service_completed_successfully"
        assert service["image"] == fetch["image"] == "prfaas"


def test_the_image_exposes_the_ports_of_all_roles():
    (exposed,) = re.findall(r"^EXPOSE (.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {int(port) for port in exposed.split()} == {node_of(name).http.port for name in NODES}
