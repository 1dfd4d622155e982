"""A measured profile as a file gives back what was measured, to whoever reads it."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.bench.machine import Machine, processor_name
from prfaas.bench.profile_file import MeasuredProfile, to_json, to_lines, to_toml
from prfaas.bench.profiling import EngineFigures, Timing
from prfaas.config.profiles import read_kv_layout, read_profile
from prfaas.scheduler.profile import Link
from tests.engine.replaying import HYBRID

MACHINE = Machine(device="CPU X", threads=2, cores=4, torch_version="2.0", system="Linux x86_64")
FIGURES = EngineFigures(
    prefill=(
        Timing(size=64, seconds=(0.3, 0.1, 0.2)),
        Timing(size=128, seconds=(0.5, 0.4, 0.9)),
    ),
    decode=(Timing(size=1, seconds=(0.03,) * 3), Timing(size=2, seconds=(0.02, 0.01, 0.07))),
    decode_context_tokens=64,
    kv_bytes=(HYBRID.bytes_needed(64), HYBRID.bytes_needed(128)),
)
PROFILE = MeasuredProfile(
    name="tiny",
    machine=MACHINE,
    weight_dtype="float16",
    kv_dtype="float32",
    chunk_tokens=576,
    layout=HYBRID,
    figures=FIGURES,
    link=Link(bytes_per_s=1.25e7, rtt_s=0.04),
    peer="10.0.0.1:8100",
    streams=4,
    date="2026-01-31",
    cpu_fraction=0.99,
)


def written(tmp_path: Path, profile: MeasuredProfile = PROFILE) -> Path:
    path = tmp_path / "p.toml"
    path.write_text(to_toml(profile))
    return path


def test_a_profile_is_read_as_it_was_measured(tmp_path):
    path = written(tmp_path)
    found = read_profile(path)
    assert (found.name, found.hardware, found.gpus_per_instance) == ("tiny", "CPU X, 2 threads", 1)
    assert (found.prefill_s(64), found.prefill_s(128)) == (0.2, 0.5)
    assert found.decode is not None
    assert (found.decode.max_batch, found.decode.step_s(1)) == (2, 0.025)  # the pooled mean
    assert {found.prefill_provenance, found.decode.provenance} == {"measured"}
    assert found.link == PROFILE.link
    layout = read_kv_layout(path, HYBRID.block_tokens)
    assert layout is not None
    for num_tokens in (1, 19, 20, 64, 1000):
        assert layout.bytes_needed(num_tokens) == HYBRID.bytes_needed(num_tokens)


def test_what_was_not_measured_is_not_in_the_file(tmp_path):
    bare = replace(PROFILE, link=None, peer=None, figures=replace(FIGURES, decode=()))
    found = read_profile(written(tmp_path, bare))
    assert (found.decode, found.link) == (None, None)


def test_the_file_says_that_it_was_measured_when_and_where():
    text = to_toml(PROFILE)
    head = text[: text.index("name =")]
    for what in ("Measured", "2026-01-31", "CPU X, 2 threads of 4 cores", "torch 2.0", "float16"):
        assert what in head
    assert all(line.startswith("# ") for line in head.splitlines())
    source = tomllib.loads(text)["prefill"]["source"]
    assert source == "prfaas profile, 2026-01-31: medians of 3 runs"


@pytest.mark.parametrize("name", ['a "quoted" \\ name', "two\nlines", "ünïcode", "tab\t\x7f"])
def test_any_name_of_a_model_makes_a_file_that_can_be_read(tmp_path, name):
    odd = replace(PROFILE, name=name, peer=name, machine=replace(MACHINE, device=name))
    found = read_profile(written(tmp_path, odd))
    assert found.name == "".join(char if char.isprintable() else "?" for char in name)


def test_every_run_is_told_to_programs_and_the_spread_to_people():
    report = to_json(PROFILE)
    assert report["prefill"][0]["runs_s"] == [0.3, 0.1, 0.2]
    assert [row["step_s"] for row in report["decode"]] == [0.025, 0.025]
    assert report["prefill"][1]["transfer_bytes"] >= report["prefill"][1]["kv_bytes"]
    text = "\n".join(to_lines(report))
    assert "0.100 to 0.300 s of 3" in text
    assert "100.0 Mbit/s over 4 connections, round trip 40 ms" in text
    assert "link" not in "\n".join(to_lines(to_json(replace(PROFILE, link=None))))


def test_a_machine_that_others_used_is_told(tmp_path):
    shared = replace(PROFILE, cpu_fraction=0.5)
    said = "The engine had a processor for 50% of the time"
    assert f"# {said}" in to_toml(shared)
    assert said in "\n".join(to_lines(to_json(shared)))
    for quiet in (PROFILE, replace(PROFILE, cpu_fraction=None)):
        assert "of the time" not in to_toml(quiet) + "\n".join(to_lines(to_json(quiet)))
    assert read_profile(written(tmp_path, shared)) == read_profile(written(tmp_path))


def test_the_processor_is_named_as_the_kernel_does():
    assert processor_name("processor\t: 0\nmodel name\t: AMD EPYC 7B13\nmodel\t: 1\n") == (
        "AMD EPYC 7B13"
    )
    assert processor_name("")
