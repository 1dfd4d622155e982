"""What stays light: a policy, a configuration or a help text loads no torch and opens no network."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "aiohttp", "lmdb", "transformers", "uvloop", "numpy", "structlog", "rich")
LIGHT_MODULES = (
    "prfaas.cli.main",
    "prfaas.clock",
    "prfaas.config.feasibility_file",
    "prfaas.config.load",
    "prfaas.config.plan_file",
    "prfaas.config.render",
    "prfaas.engine.batcher",
    "prfaas.engine.config",
    "prfaas.engine.submission",
    "prfaas.errors",
    "prfaas.scheduler.planner",
    "prfaas.scheduler.router",
    "prfaas.scheduler.view",
    "prfaas.sim.chart_file",
    "prfaas.sim.feasibility_report",
    "prfaas.sim.plan_report",
    "prfaas.types",
)


def loaded_heavies(code: str) -> list[str]:
    """Return the heavy packages that a fresh interpreter has loaded after `code`."""
    report = f"; import sys; print(*sorted(set(sys.modules) & {set(HEAVY)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, check=True
    )
    return done.stdout.split("\n")[-2].split()


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_module_loads_nothing_heavy(module):
    assert loaded_heavies(f"import {module}") == []


def test_rooms_without_torch_do_not_load_it():
    rooms = "prfaas.cache.prefix, prfaas.cache.store, prfaas.text.tokenizer, prfaas.transport.wire, prfaas.models.store"
    assert "torch" not in loaded_heavies(f"import {rooms}")


def test_a_replayed_node_loads_no_torch():
    code = "import prfaas.cli.node_process, prfaas.server.replay_parts, prfaas.server.verify"
    assert "torch" not in loaded_heavies(code)


@pytest.mark.parametrize(
    "command",
    [[], ["serve"], ["model"], ["plan"], ["verify"], ["chat"], ["cache"], ["bench"]],
)
def test_help_loads_nothing_heavy(command):
    arguments = [*command, "--help"]
    code = f"from prfaas.cli.main import main; main({arguments!r}, standalone_mode=False)"
    assert loaded_heavies(code) == []


def test_the_check_sees_a_heavy_package():
    assert loaded_heavies("import numpy") == ["numpy"]
