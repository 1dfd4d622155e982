"""scripts/bench/sharing.py: what it recommends from which figures, and the JSON that it writes."""

import json
from pathlib import Path

import pytest
import torch

from prfaas.models.directory import ENVIRONMENT_VARIABLE
from scripts.bench import sharing
from scripts.bench.engine_peers import Setup
from scripts.bench.sharing import Pair, recommended
from scripts.bench.sharing_node import Chunking, Lag
from tests.tiny_models import write_tiny_model


def pair(threads: int, share: float) -> Pair:
    return Pair(works=("prefill", "decode"), threads_each=threads, shares=(share, share))


def size(chunk_tokens: int, tokens_per_s: float, itl_p50_ms: float) -> Chunking:
    return Chunking(
        chunk_tokens=chunk_tokens,
        num_decoding=4,
        prompt_tokens=2048,
        num_rounds=1,
        prefill_alone_tokens_per_s=tokens_per_s,
        itl_alone_ms=1.0,
        ttft_s=1.0,
        itl_p50_ms=itl_p50_ms,
        itl_max_ms=1.0,
        decode_tokens_per_s=1.0,
    )


def test_two_nodes_get_the_threads_at_which_less_is_lost():
    figures = [pair(2, 0.3), pair(1, 0.5)]
    assert recommended(figures, [], []) == {"threads_of_each_of_two_nodes": 1}


def test_the_smallest_chunk_that_is_nearly_as_fast_and_the_one_that_decodes_wait_least_for_are_recommended():
    sizes = [size(64, 300.0, 60.0), size(128, 400.0, 50.0), size(256, 476.0, 90.0)]
    sizes += [size(512, 500.0, 200.0), size(1024, 490.0, 400.0)]
    assert recommended([], sizes, []) == {"chunk_tokens": 256, "mixed_chunk_tokens": 128}


def test_the_loop_is_judged_at_all_threads():
    late = [
        Lag(beside=beside, threads=threads, p50_ms=0.1, p99_ms=p99_ms, max_ms=9.0)
        for beside, threads, p99_ms in [
            ("nothing", 0, 0.2),
            ("prefill", 2, 3.0),
            ("prefill", 1, 1.0),
        ]
    ]
    assert recommended([], [], late) == {"loop_p99_ms_at_all_threads": 3.0}


class Busy:
    """An engine that takes a second a call for each of its threads; half as long if it is alone."""

    def __init__(self, name, command, log, num_threads):
        self._num_threads = num_threads
        self._taken = 0.0

    def start(self, run, *arguments, repeat=1):
        self._taken = repeat * self._num_threads

    def wait(self):
        return self._taken

    def run(self, run, *arguments, repeat=1):
        return 0.5 * repeat * self._num_threads

    def close(self):
        pass


def test_shares_are_of_the_speed_of_one_alone_with_all_threads(monkeypatch):
    monkeypatch.setattr(sharing, "EngineProcess", Busy)
    monkeypatch.setattr(sharing, "ours_command", lambda setup: [])
    args = sharing.parse(["--rounds", "2", "--repeat", "3", "--prompt-tokens", "8"])
    setup = Setup(
        model="", dtype="", chunk_tokens=64, num_threads=2, max_tokens=0, peers_dir=Path()
    )
    found = list(sharing.pairs(setup, args))
    assert [pair.threads_each for pair in found[::3]] == [2, 1]
    assert [pair.works for pair in found] == list(sharing.PAIRS) * 2
    assert {pair.shares for pair in found if pair.threads_each == 2} == {(0.5, 0.5)}
    assert {pair.shares for pair in found if pair.threads_each == 1} == {(1.0, 1.0)}


@pytest.mark.slow
def test_chunks_and_the_loop_are_measured_and_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "models"))
    model = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    before = torch.get_num_threads()
    sharing.main(
        [
            *(
                "--model",
                str(model),
                "--parts",
                "chunks",
                "loop",
                "--threads",
                "1",
                "--rounds",
                "1",
            ),
            *("--chunk-tokens", "64", "128", "--prompt-tokens", "64", "--long-tokens", "192"),
            *("--decoding", "2", "--seconds", "0.05", "--json"),
        ]
    )
    assert torch.get_num_threads() == before
    report = json.loads(capsys.readouterr().out)
    assert report["nodes"] == []
    assert [row["chunk_tokens"] for row in report["chunks"]] == [64, 128]
    for row in report["chunks"]:
        assert row["itl_max_ms"] >= row["itl_p50_ms"] > 0
        assert row["ttft_s"] * 1e3 >= row["itl_max_ms"] - 1
    assert [row["beside"] for row in report["loop"]] == ["nothing", "prefill"]
    assert report["recommended"]["chunk_tokens"] in (64, 128)
