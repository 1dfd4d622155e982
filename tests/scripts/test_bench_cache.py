"""scripts/bench/cache.py: what it measures, and the JSON that it writes."""

import json

import pytest
import torch

from prfaas.cache.spec import bytes_of_page, held_blocks
from prfaas.models.store import resolve
from prfaas.text.tokenizer import Tokenizer
from scripts.bench import cache
from scripts.bench.hit_tail import TailEngine
from scripts.bench.hit_times import Prompt, Times, prompt_of, report
from tests.tiny_models import write_tiny_model


@pytest.fixture
def model_dir(request, tmp_path, monkeypatch):
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    return resolve(str(write_tiny_model(tmp_path / "tiny", request.param)))


@pytest.fixture
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("model_dir", ["gemma3"], indirect=True)
def test_prompts_are_as_long_as_asked_and_always_the_same(model_dir):
    tokenizer = Tokenizer.load(model_dir)
    prompts = [prompt_of(tokenizer, seed, 512) for seed in (0, 0, 1)]
    assert prompts[0] == prompts[1]
    assert prompts[0].tokens[:64] != prompts[2].tokens[:64]
    for prompt in prompts:
        assert 500 <= len(prompt.tokens) <= 512
        assert prompt.tokens == tokenizer.encode(prompt.text, add_bos=True)
        assert prompt.prefix_tokens == 448


@pytest.mark.usefixtures("same_threads")
@pytest.mark.parametrize("model_dir", ["gemma3", "kimi_linear"], indirect=True)
def test_the_tail_is_computed_from_a_working_copy_that_is_full_already(model_dir):
    engine = TailEngine(model_dir, 448, 64, 1)
    kv, fill_s = engine.working_copy(460)
    assert kv.num_tokens == 448
    assert fill_s > 0
    held = [held_blocks(spec, 448, 64) for spec in engine.layout.groups]
    assert engine.num_bytes == sum(
        len(blocks) * bytes_of_page(spec, index, 64, 64)
        for spec, blocks in zip(engine.layout.groups, held, strict=True)
        for index in range(spec.pages_per_block)
    )
    tail_s, fill_s = engine.compute_s(list(range(5, 17)))
    assert min(tail_s, fill_s) > 0
    assert engine.working_copy_bytes(460) >= kv.nbytes


def test_a_ratio_is_of_what_ran_side_by_side():
    times = Times(
        cold=[5.0],
        ram=[1.2, 3.3, 1.1],
        tail=[1.0, 3.0, 1.0],
        fill=[0.1] * 3,
        tokenise=[0.05, 0.1, 0.01],
        http=[0.05, 0.1, 0.04],
        cached_disk=[1.5],
        cached_plain=[0.3],
        disk=[1.8],
        plain=[0.6],
    )
    figures = report(times, Prompt(text="", tokens=[0] * 512))
    assert figures["ram_over_tail"] == 1.1
    assert figures["ram_without_http_and_tokenising_over_tail"] == 1.05
    assert figures["disk_cached_over_ram_and_plain"] == 1.0
    assert figures["disk_over_ram_and_plain"] == 1.0
    assert figures["ram_ttft_ms"] == 1200
    assert (figures["tail_tokens"], figures["num_hits"]) == (64, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("same_threads")
def test_a_node_is_measured_over_http_and_after_restarts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    cache.main(["--quick", "--json", "--threads", "1", "--only", "ttft", "store"])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"threads", "ttft", "store"}
    [row] = found["ttft"]
    assert row["model"] == "tiny gemma3"
    assert 1000 <= row["prompt_tokens"] <= 1024
    assert (row["num_prompts"], row["num_hits"]) == (1, 2)
    assert row["hit_bytes"] > 0
    for name, value in row.items():
        if name.endswith(("_ms", "_over_tail", "_over_ram_and_plain")):
            assert value > 0, name
    assert [each["name"] for each in found["store"]] == ["store", "load cached", "load disk"]


@pytest.mark.slow
def test_lookups_and_hit_rates_are_printed_line_by_line(capsys):
    cache.main(["--quick", "--only", "lookup", "hit_rates", "--prompts", "20"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["lookup"] + ["hit_rates"] * (len(lines) - 1)
    assert lines[0].split()[1] == "indexed_blocks=4000"
