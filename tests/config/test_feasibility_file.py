"""A feasibility file is read whole or refused with the key, the value and the limit."""

from pathlib import Path
from typing import Any

import pytest

from prfaas.config import feasibility_file
from prfaas.config.feasibility_file import read_feasibility, shipped_feasibility
from prfaas.config.workloads import read_workload
from prfaas.errors import ConfigError
from tests.config.knobs import INF, NAN, integer, number
from tests.config.plan_files import UNSET, changed, toml

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL: dict[str, Any] = {
    "name": "m",
    "config": str(CONFIGS / "models" / "qwen3-235b.json"),
    "published_gbits_per_s": [4.0, 20.0],
}
FILE: dict[str, Any] = {
    "tokens": [1024, 32_768],
    "cluster_gpus": 512,
    "hardware": {
        "name": "8 x G",
        "gpus": 8,
        "flops_per_s": 1e15,
        "memory_bytes_per_s": 1e13,
        "bytes_per_weight": 2,
    },
    "models": [MODEL],
    "clusters": [{"model": "m", "gpus": 512, "tokens": 1024, "published_gbits_per_s": 256}],
    "links": [{"name": "l", "bytes_per_s": 1e9}],
}
POINT = {"tokens": 5000, "seconds": 1.0, "published_gbits_per_s": 9, "source": "a figure"}


def model(key: str, value: object) -> list[dict[str, Any]]:
    return [changed(MODEL, key, value)]


def cluster(key: str, value: object) -> list[dict[str, Any]]:
    return [changed(FILE["clusters"][0], key, value)]


CASES = [
    *integer("cluster_gpus", minimum=1, maximum=10_000_000),
    *integer("hardware.gpus", minimum=1, maximum=10_000_000),
    *number("hardware.flops_per_s", above=0, maximum=1e21),
    *number("hardware.memory_bytes_per_s", above=0, maximum=1e21),
    *number("hardware.bytes_per_weight", above=0, maximum=8),
    ("tokens", [], "tokens: expected a list of numbers, not []"),
    ("tokens", [0, 1024], "tokens[0]: 0 is below the minimum of 1"),
    ("tokens", [1024, NAN], "tokens[1]: expected a finite number, not nan"),
    ("tokens", [1024, 1.5], "tokens[1]: expected a whole number, not 1.5"),
    ("tokens", [1024], "models[0].published_gbits_per_s: 2 values for 1 lengths"),
    ("tokens", UNSET, "tokens: is not set"),
    ("models", UNSET, "models: is not set"),
    ("models", model("published_gbits_per_s", [0, 1]), "published_gbits_per_s[0]: 0 must be above"),
    ("models", model("published_gbits_per_s", [1, INF]), "[1]: expected a finite number, not inf"),
    ("models", model("prefill_s", [1.0, 2.0]), "models[0].source: is not set"),
    ("models", model("config", "nowhere.json"), "cannot read"),
    ("models", model("prefill", [POINT]), None),
    ("models", model("prefill", []), "models[0].prefill: expected tables [[models[0].prefill]]"),
    ("models", model("prefill", [changed(POINT, "seconds", 0)]), "prefill[0].seconds: 0 must be"),
    ("models", model("prefill", [changed(POINT, "tokens", 0)]), "prefill[0].tokens: 0 is below"),
    ("models", model("typo", 1), "unknown key models[0].typo"),
    ("clusters", cluster("model", "x"), "clusters[0].model: expected one of m, not 'x'"),
    ("clusters", cluster("tokens", 2048), "clusters[0].tokens: 2048 is none of 1024, 32768"),
    ("clusters", cluster("gpus", 0), "clusters[0].gpus: 0 is below the minimum of 1"),
    ("clusters", cluster("published_gbits_per_s", NAN), "expected a finite number, not nan"),
    ("links", [{"name": "l", "bytes_per_s": 0}], "links[0].bytes_per_s: 0 must be above 0"),
    ("links", [{"name": "", "bytes_per_s": 1}], "links[0].name: expected printable text"),
    ("lnks", 1, "unknown key lnks; did you mean links?"),
]


@pytest.mark.parametrize(("key", "value", "says"), CASES)
def test_a_file_is_read_or_refused_with_key_value_and_limit(tmp_path, key, value, says):
    path = tmp_path / "f.toml"
    path.write_text(toml(changed(FILE, key, value)))
    if says is None:
        read_feasibility(path)
        return
    with pytest.raises(ConfigError) as caught:
        read_feasibility(path)
    assert says in str(caught.value)


def test_a_point_with_its_own_time_is_independent_and_one_without_is_implied(tmp_path):
    path = tmp_path / "f.toml"
    timed = changed(changed(MODEL, "prefill_s", [1.0, 2.0]), "source", "a table")
    path.write_text(toml(changed(FILE, "models", [changed(MODEL, "prefill", [POINT]), timed])))
    plain, own = read_feasibility(path).models
    assert {point.prefill_source for point in plain.table} == {"implied"}
    assert {point.source for point in plain.table} == {"PrfaaS Table 3"}
    assert [point.prefill_source for point in plain.further] == ["independent"]
    assert [point.prefill_s for point in own.table] == [1.0, 2.0]
    assert {point.prefill_source for point in own.table} == {"independent"}


def test_an_installation_without_the_file_says_where_it_was_sought(monkeypatch, tmp_path):
    monkeypatch.setattr(feasibility_file, "__file__", str(tmp_path / "a" / "b" / "f.py"))
    with pytest.raises(ConfigError, match=r"configs/feasibility\.toml is not there; give the file"):
        shipped_feasibility()


@pytest.mark.parametrize(
    "path", sorted((CONFIGS / "workloads").glob("*.toml")), ids=lambda p: p.stem
)
def test_a_shipped_workload_is_one(path):
    workload = read_workload(path)
    workload.lengths.check()
    assert workload.mean_output_tokens > 0
