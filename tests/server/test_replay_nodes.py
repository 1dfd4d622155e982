"""Replayed nodes: one answer, whichever way its KV came; another one if a byte of it was wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.server.load_parts import load_parts
from prfaas.server.verify import verify_node, verify_tokens
from prfaas.types import Request, RequestRecord, RouteName, SamplingParams
from tests.relay import Fault
from tests.server.fleet import until
from tests.server.real_nodes import RealNodes, no_progress
from tests.server.replay_nodes import LOCAL, REMOTE, replay_config, replay_nodes

pytestmark = pytest.mark.slow


async def ask(
    nodes: RealNodes,
    name: str,
    route: RouteName | None,
    *,
    num_tokens: int = 1_000,
    salt: str = "",
    num_events: int | None = None,
) -> tuple[list[tuple[int, int]], RequestRecord]:
    """Return (choice, token) pairs and the record; leave after `num_events` of them."""
    asked = Request(
        request_id=name,
        prompt_tokens=verify_tokens(nodes.pd.tokenizer.encode, num_tokens),
        sampling=SamplingParams(max_tokens=8, seed=5, temperature=0.9),
        num_choices=2,
        cache_salt=salt.encode(),
    )
    drawn: list[tuple[int, int]] = []
    async with nodes.pd.generate(asked, force_route=route) as generation:
        if num_events != 0:
            async for event in generation:
                drawn.append((event.choice_index, event.token_id))
                if len(drawn) == num_events:
                    break
    return sorted(drawn, key=lambda pair: pair[0]), generation.record


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 1_000])
async def test_alone_in_a_pair_and_from_the_cache_the_answer_is_the_same(num_tokens):
    async with replay_nodes() as nodes:
        local, record = await ask(nodes, "a", "local", num_tokens=num_tokens, salt="a")
        assert record.tokens_local == num_tokens
        remote, record = await ask(nodes, "b", "remote", num_tokens=num_tokens, salt="b")
        assert (record.route, record.tokens_remote) == ("remote", num_tokens)
        again, record = await ask(nodes, "c", "local", num_tokens=num_tokens, salt="b")
        assert record.tokens_reused == (num_tokens - 1) // 64 * 64
        assert local == remote == again


async def test_a_cut_transfer_gives_the_same_answer():
    async with replay_nodes() as nodes:
        local, _ = await ask(nodes, "a", "local", salt="a")
        await ask(nodes, "b", "remote", salt="b")
        length = nodes.relay.stream_bytes
        for percent in (10, 50, 90):
            nodes.relay.fault = Fault(length * percent // 100, "cut")
            drawn, _ = await ask(nodes, f"cut-{percent}", None, salt=f"cut-{percent}")
            assert drawn == local
            nodes.relay.fault = None
            await until(lambda: nodes.pd.peer is not None and nodes.pd.peer.is_usable)


async def test_a_restarted_node_answers_the_same_from_its_disk(tmp_path):
    answers, reused = [], []
    for start in range(2):
        async with replay_nodes(cache_dir=tmp_path / "cache") as nodes:
            for _ in range(2):  # what is wanted twice is worth the disk
                drawn, record = await ask(nodes, f"r{start}", "local")
                answers.append(drawn)
                reused.append(record.tokens_reused)
    assert reused == [0, 960, 960, 960]
    assert answers == [answers[0]] * 4


async def test_one_wrong_byte_in_the_peers_memory_changes_the_answer():
    async with replay_nodes() as nodes:
        local, _ = await ask(nodes, "a", "local", salt="a")
        await ask(nodes, "b", "remote", salt="b")
        cache = nodes.prefill._cache
        tokens = verify_tokens(nodes.pd.tokenizer.encode, 1_000)
        for group in range(len(cache.layout.groups)):
            table = cache.lookup(cache.block_keys(tokens, b"b"), len(tokens), salt=b"b")
            pages = table.pages(group, table.hit_tokens // 64 - 1)
            assert pages is not None
            table.view(pages[-1])[3] ^= 1
            drawn, record = await _from_a_cold_cache(nodes, group)
            assert record.route == "remote"
            assert drawn != local
            table.view(pages[-1])[3] ^= 1
            table.release()
        drawn, record = await _from_a_cold_cache(nodes, len(cache.layout.groups))
        assert (drawn, record.route) == (local, "remote")


async def _from_a_cold_cache(
    nodes: RealNodes, attempt: int
) -> tuple[list[tuple[int, int]], RequestRecord]:
    """Ask once more for the KV that the peer has and we have forgotten."""
    cache = nodes.pd._cache
    filler, block = cache.lookup((), 1), 0
    while filler.try_allocate(0, block) is not None:  # takes every page: what was cached goes
        block += 1
    filler.release()
    return await ask(nodes, f"cold-{attempt}", "remote", salt="b")


async def test_verify_finds_replayed_nodes_equal():
    async with replay_nodes() as nodes:
        report = await verify_node(nodes.pd, clock=nodes.pd._clock)
        assert report.tokens_equal
        assert report.bits_equal


async def test_clients_that_leave_leave_nothing_held():
    async with replay_nodes(speed=60.0) as nodes:
        for index in range(8):
            await ask(nodes, f"left-{index}", "remote", salt=f"{index}", num_events=index % 4)
        await nodes.at_rest()
        local, _ = await ask(nodes, "local", "local", salt="x")
        assert (await ask(nodes, "whole", "remote", salt="y"))[0] == local


def test_a_profile_without_decode_cannot_be_a_pd_node():
    with pytest.raises(ConfigError, match=r"h200.*without \[decode\].*prefill only"):
        load_parts(replay_config("pd", REMOTE), no_progress)


def test_a_profile_that_is_not_there_is_named():
    missing = Path("nowhere.toml")
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.toml"):
        load_parts(replay_config("prefill", missing), no_progress)


def test_profiles_of_one_model_make_nodes_that_fit_and_other_scales_do_not(tmp_path):
    parts = [
        load_parts(replay_config("prefill", profile, bytes_scale=scale), no_progress)
        for profile, scale in ((LOCAL, 0.002), (REMOTE, 0.002), (REMOTE, 0.004))
    ]
    try:
        local, remote, other = (part.identity for part in parts)
        assert local == remote
        assert other.layout != remote.layout
        assert other.model_fingerprint != remote.model_fingerprint
    finally:
        for part in parts:
            part.cache.close()


def test_a_profile_with_a_table_of_bytes_can_be_replayed(tmp_path):
    profile = tmp_path / "table.toml"
    profile.write_text(
        'name = "table"\nhardware = "x"\ngpus_per_instance = 1\n'
        '[prefill]\ncurve = "polynomial"\ncoefficients = [0.1, 1e-4]\n'
        'provenance = "fitted"\nsource = "test"\n'
        "[kv]\ntokens = [1000, 2000]\nbytes = [30e6, 40e6]\n"
    )
    config = replay_config("prefill", profile, bytes_scale=0.1)
    parts = load_parts(config, no_progress)
    try:
        layout = parts.cache.layout
        assert layout.has_states
        assert layout.streamed_bytes(64_000) == pytest.approx(64e7 * 0.1, rel=0.01)
        assert layout.bytes_needed(64_000) - layout.streamed_bytes(64_000) == pytest.approx(
            2 * 20e6 * 0.1, rel=0.01
        )
    finally:
        parts.cache.close()


def test_the_profiles_table_without_a_constant_has_no_state(tmp_path):
    profile = tmp_path / "dense.toml"
    text = LOCAL.read_text()
    kv = text[text.index("[kv]") : text.index("[decode]")]
    profile.write_text(text.replace(kv, "[kv]\ntokens = [1000, 2000]\nbytes = [64e6, 128e6]\n\n"))
    parts = load_parts(
        replace(replay_config("pd", profile, bytes_scale=0.1), role="pd"), no_progress
    )
    try:
        assert not parts.cache.layout.has_states
        assert parts.cache.layout.bytes_needed(6_400) == pytest.approx(6_400 * 64e3 * 0.1, rel=0.01)
    finally:
        parts.cache.close()
