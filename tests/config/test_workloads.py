"""Workloads are read whole or refused with the key, the value and the limit."""

from pathlib import Path
from typing import Any

import pytest

from prfaas.config.workloads import read_workload
from prfaas.errors import ConfigError
from tests.config.knobs import number
from tests.config.plan_files import UNSET, WORKLOAD, changed, toml

DATA = Path(__file__).parents[1] / "data"
MAX = 100_000_000
PARTS = [
    {"weight": 3.0, **WORKLOAD, "output_tokens": 100},
    {"weight": 1.0, **WORKLOAD, "mu": 7.0, "output_tokens": 500},
]


def read(directory: Path, tables):
    path = directory / "workload.toml"
    path.write_text(toml(tables))
    return read_workload(path)


CASES = [
    *number("output_tokens", above=0, maximum=MAX),
    *number("sigma", above=0, maximum=100),
    *(c for c in number("min_tokens", minimum=1, maximum=MAX) if c[:2] != ("min_tokens", MAX)),
    ("min_tokens", 131_072, "max_tokens: 131072 must be above 131072"),
    *number("max_tokens", above=128, maximum=MAX),
    *(c for c in number("mu", minimum=-100, maximum=100) if c[2] is not None),
    ("mu", 0, "a share of 6e-07 of the log-normal (mu 0, sigma 1) lies between 128 and 131072"),
    ("mu", 100, "a share of 0 of the log-normal"),
    ("kind", "normal", "kind: expected one of lognormal, trace, mixture, not 'normal'"),
    ("kind", UNSET, "kind: is not set"),
    ("simga", 1.0, "unknown key simga; did you mean sigma?"),
]


@pytest.mark.parametrize(("key", "value", "says"), CASES)
def test_a_lognormal_is_read_or_refused_with_key_value_and_limit(tmp_path, key, value, says):
    tables = changed(WORKLOAD, key, value)
    if says is None:
        read(tmp_path, tables).lengths.check()
        return
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, tables)
    assert says in str(caught.value)


def test_a_mixture_weighs_prompts_and_answers(tmp_path):
    mixed = read(tmp_path, {"kind": "mixture", "parts": PARTS})
    assert mixed.mean_output_tokens == pytest.approx(0.75 * 100 + 0.25 * 500)
    long = read(tmp_path, WORKLOAD).lengths.mean_tokens
    short = read(tmp_path, changed(WORKLOAD, "mu", 7.0)).lengths.mean_tokens
    assert mixed.lengths.mean_tokens == pytest.approx(0.75 * long + 0.25 * short)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (UNSET, "parts: is not set"),
        ([], "parts: expected tables [[parts]], not []"),
        ([3], "parts: expected tables [[parts]], not [3]"),
        ([changed(PARTS[0], "weight", 0)], "parts[0].weight: 0 must be above 0"),
        ([changed(PARTS[0], "weight", UNSET)], "parts[0].weight: is not set"),
        ([PARTS[1], changed(PARTS[0], "mu", "x")], "parts[1].mu: expected a number, not 'x'"),
        ([changed(PARTS[0], "kind", "mixture")], "expected one of lognormal, trace, not 'mixture'"),
        ([changed(PARTS[0], "wieght", 1.0)], "unknown key parts[0].wieght"),
    ],
)
def test_a_mixture_of_what_is_none_is_refused(tmp_path, parts, says):
    tables = changed({"kind": "mixture", "parts": PARTS}, "parts", parts)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, tables)
    assert says in str(caught.value)


def trace(**changes: str) -> dict[str, Any]:
    fields = {"kind": "trace", "file": str(DATA / "mooncake.jsonl"), "format": "mooncake"}
    return fields | changes


def test_a_trace_gives_its_lengths_and_its_mean_answer(tmp_path):
    workload = read(tmp_path, trace())
    workload.lengths.check()
    assert workload.lengths.tokens == (700, 1100, 1500, 2048)
    assert workload.mean_output_tokens == pytest.approx((10 + 20 + 30 + 0 + 40) / 5)


def test_an_unbounded_cache_leaves_what_no_earlier_prompt_had(tmp_path):
    lengths = read(tmp_path, trace(cache="unbounded")).lengths
    # 1100; 1500 - 2 * 512; 700; 2048 of blocks all seen: one token at least; 700 again: 188.
    assert lengths.tokens == (1, 188, 476, 700, 1100)


def test_an_azure_trace_has_lengths_and_no_blocks(tmp_path):
    azure = trace(file=str(DATA / "azure.csv"), format="azure")
    assert read(tmp_path, azure).lengths.tokens == (91, 374, 396)
    with pytest.raises(ConfigError, match="'unbounded' needs block ids; an azure trace has none"):
        read(tmp_path, azure | {"cache": "unbounded"})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"file": "nowhere"}, "cannot read"),
        ({"format": "vidur"}, "expected one of mooncake, azure, not 'vidur'"),
        ({"cache": "some"}, "expected one of none, unbounded, not 'some'"),
        ({"format": "azure"}, "has no column TIMESTAMP, ContextTokens, GeneratedTokens"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path, changes, says):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, trace(**changes))
    assert says in str(caught.value)


def test_a_relative_file_starts_at_the_workload(tmp_path):
    (tmp_path / "t.jsonl").write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": []}\n'
    )
    assert read(tmp_path, trace(file="t.jsonl")).lengths.tokens == (5,)


def test_a_trace_without_an_answer_is_refused(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 0}\n')
    with pytest.raises(ConfigError, match=r"no request of .* has an output token"):
        read(tmp_path, trace(file="t.jsonl"))
