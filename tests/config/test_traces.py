"""Traces are read by arrival, and a bad line is named."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.traces import TraceRequest, read_trace, uncached_lengths
from prfaas.errors import ConfigError

DATA = Path(__file__).parents[1] / "data"


def test_a_mooncake_line_is_a_request():
    requests = read_trace(DATA / "mooncake.jsonl", "mooncake")
    assert requests[1] == TraceRequest(1.5, 1500, 20, (0, 1, 3))
    assert [request.arrival_s for request in requests] == [0, 1.5, 2, 2, 9]


def test_an_azure_line_is_a_request_since_the_first():
    requests = read_trace(DATA / "azure.csv", "azure")
    assert requests[0] == TraceRequest(0.0, 374, 44)
    assert requests[1].arrival_s == pytest.approx(4.314579)
    assert requests[2].arrival_s == pytest.approx(64.710427)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "t:2 is not JSON"),
        ("[" * 100_000, "t:2 is not JSON"),
        ("3", "t:2 holds no object"),
        ('{"timestamp": -1}', "t:2: timestamp -1 is no number from 0 to 1e15"),
        ('{"timestamp": NaN}', "t:2: timestamp nan is no number"),
        ('{"timestamp": 1}', "t:2: input_length None is no count from 1 to 100,000,000"),
        ('{"timestamp": 1, "input_length": 0}', "t:2: input_length 0 is no count from 1"),
        ('{"timestamp": 1, "input_length": 1e3}', "t:2: input_length 1000.0 is no count"),
        ('{"timestamp": 1, "input_length": true}', "t:2: input_length True is no count"),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": -1}',
            "t:2: output_length -1 is no count from 0",
        ),
        ('{"timestamp": 1, "hash_ids": 3}', "t:2: hash_ids is no list of numbers"),
        ('{"timestamp": 1, "hash_ids": ["a"]}', "t:2: hash_ids is no list of numbers"),
    ],
)
def test_a_bad_mooncake_line_is_named(tmp_path, line, says):
    good = '{"timestamp": 1, "input_length": 1, "output_length": 1}'
    (tmp_path / "t").write_text(f"{good}\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(tmp_path / "t", "mooncake")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("yesterday,1,1", "t:2: TIMESTAMP 'yesterday' is no date and time"),
        ("2023-11-16 18:15:46,0,1", "t:2: ContextTokens 0 is no count from 1"),
        ("2023-11-16 18:15:46,1,x", "t:2: GeneratedTokens 'x' is no count from 0"),
        ("2023-11-16 18:15:46,1", "t:2: GeneratedTokens None is no count"),
        ("2023-11-16 18:15:46,99999999999,1", "ContextTokens 99999999999 is no count"),
    ],
)
def test_a_bad_azure_line_is_named(tmp_path, line, says):
    (tmp_path / "t").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(tmp_path / "t", "azure")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("trace_format", "text"),
    [("mooncake", "\n"), ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n")],
)
def test_a_trace_without_requests_is_refused(tmp_path, trace_format, text):
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match="has no request"):
        read_trace(tmp_path / "t", trace_format)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "t").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="is not text"):
        read_trace(tmp_path / "t", "mooncake")


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=20))
def test_a_cache_never_leaves_nothing_to_compute_nor_more_than_the_prompt(prompts):
    requests = [TraceRequest(0.0, 512 * max(1, len(ids)), 1, tuple(ids)) for ids in prompts]
    for request, length in zip(requests, uncached_lengths(requests), strict=True):
        assert 1 <= length <= request.input_tokens
