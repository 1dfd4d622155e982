"""Nodes with a cache on disk, killed as the kernel kills: what they answer is what a cold node answers."""

import http.client
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.dying_nodes import EARLY, LATE, answer, bits_of
from tests.cli.node_processes import (
    NodeProcess,
    environment,
    free_port,
    run_to_its_end,
    running_node,
)
from tests.processes import started
from tests.server.cached_nodes import FAMILIES, node_on, store_of
from tests.tiny_configs import Family
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

BLOCK = 64
CONTEXT = ("--max-context-tokens", "900")
NAME = ("--served-model-name", "tiny")
HELD_SAMPLES = (
    'prfaas_cache_pages{state="referenced"}',
    'prfaas_cache_pages{state="transfer"}',
    "prfaas_transfers_in_flight",
    "prfaas_requests_running",
)


@dataclass(frozen=True)
class Answer:
    """The choice with its tokens' logprobs, and where the prompt's KV came from."""

    choice: dict[str, Any]
    cached_tokens: int
    story: dict[str, Any]


def prompt_of(num_tokens: int) -> list[int]:
    """Token ids that differ from those of another length from the start."""
    return [4 + (num_tokens * 7919 + i * i * 31 + i * 17) % 500 for i in range(num_tokens)]


def boundary(num_tokens: int) -> int:
    return (num_tokens - 1) // BLOCK * BLOCK


def ask(node: NodeProcess, tokens: Sequence[int], salt: str | None = None) -> Answer:
    """Return the answer: greedy for even lengths, else seeded."""
    body = {
        "model": "tiny",
        "prompt": list(tokens),
        "max_tokens": 5,
        "temperature": len(tokens) % 2,
        "seed": 7,
        "logprobs": 5,
    }
    if salt is not None:
        body["cache_salt"] = salt
    status, answer = node.post("/v1/completions", body)
    assert status == 200, answer
    usage = answer["usage"]
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached_tokens == usage["prfaas"]["tokens_reused"]
    return Answer(answer["choices"][0], cached_tokens, usage["prfaas"])


def ask_or_lose(node: NodeProcess, tokens: Sequence[int]) -> Answer | None:
    """Return the answer, or None if the node died over it."""
    try:
        return ask(node, tokens)
    except (OSError, http.client.HTTPException):
        return None


def kill(node: NodeProcess) -> None:
    node.process.kill()
    node.process.wait()


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A directory with a tiny model of each family."""
    path: Path = tmp_path_factory.mktemp("cache-nodes")
    for family in FAMILIES:
        write_tiny_model(path / family, family)
    return path


@pytest.fixture(scope="module")
def killed(directory) -> dict[Family, list[list[object]]]:
    """What nodes of each family had answered when they were killed over other prompts."""
    rng = random.Random(20_260_415)
    with started(
        [sys.executable, "-m", "tests.cli.dying_nodes", str(directory)],
        stdout=subprocess.PIPE,
        env=environment(directory / "models"),
        cwd=Path(__file__).parents[2],
    ) as child:
        assert child.stdout is not None
        lines = (line for line in child.stdout if line.startswith(b"{"))  # others are its log
        answered: dict[Family, list[list[object]]] = json.loads(next(lines, b"null"))
        time.sleep(rng.uniform(0.0, 1.0))
        assert child.poll() is None
    return answered


@pytest.mark.parametrize("family", FAMILIES)
async def test_after_kill_9_what_was_stored_is_hit_and_every_answer_is_the_cold_one(
    family, killed, directory
):
    async with node_on(directory / family, directory / f"{family}.kv") as node:
        for n, before in zip(EARLY, killed[family], strict=True):
            again = await answer(node, n)
            assert bits_of(again) == before
            assert again.reused == boundary(n)
        lookups = node._cache.counts().lookups
        assert lookups.num_disk_tokens == sum(boundary(n) for n in EARLY)
        assert lookups.num_ram_tokens == 0
        for n in LATE:
            interrupted = await answer(node, n)
            cold = await answer(node, n, salt=b"cold")
            resent = await answer(node, n)
            assert bits_of(interrupted) == bits_of(cold) == bits_of(resent)
            assert (cold.reused, resent.reused) == (0, boundary(n))
        assert store_of(node).stats().records.counts.num_damaged == 0


@pytest.fixture(scope="module")
def alone(directory) -> Iterator[NodeProcess]:
    """A node without a cache on disk and without a peer."""
    flags = ("--model", str(directory / "kimi_linear"))
    with running_node(directory, *flags, *NAME, *CONTEXT) as node:
        yield node


def at_rest(node: NodeProcess) -> None:
    """Return once the node holds nothing for anybody."""
    node.wait(lambda: not any(node.metric(sample) for sample in HELD_SAMPLES))


class Pair:
    """A prefill node and a pd node that come back on the same port over the same cache."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        key = directory / "cluster-key"
        key.write_text("0123456789abcdef" * 2)
        key.chmod(0o600)
        self.common = ("--model", str(directory / "kimi_linear"), "--cluster-key-file", str(key))
        self._ports = {"prefill": free_port(), "pd": free_port()}
        self.peer = f"127.0.0.1:{self._ports['prefill']}"
        roles = {
            "prefill": ("--role", "prefill", "--lease-s", "1"),
            "pd": (*NAME, "--peer", self.peer, "--threshold-tokens", "100", "--kv-codec", "zstd"),
        }
        self._flags = {
            role: (*flags, *self.common, *CONTEXT, "--cache-dir", str(self.cache_of(role)))
            for role, flags in roles.items()
        }
        self.nodes = {role: self._start(role) for role in roles}
        for node in self.nodes.values():
            node.wait_ready()
        self.wait_for_peer()
        free = 'prfaas_cache_pages{state="free"}'
        self.num_pages = {role: node.metric(free) for role, node in self.nodes.items()}

    def cache_of(self, role: str) -> Path:
        return self._directory / f"pair-{role}.kv"

    def _start(self, role: str) -> NodeProcess:
        port = self._ports[role]
        return self._stack.enter_context(
            running_node(self._directory, *self._flags[role], port=port)
        )

    def restart(self, roles: Sequence[str]) -> None:
        self.nodes |= {role: self._start(role) for role in roles}
        for node in self.nodes.values():
            node.wait_ready()
        self.wait_for_peer()

    def wait_for_peer(self) -> None:
        sample = f'prfaas_peer_usable{{peer="{self.peer}"}}'
        self.nodes["pd"].wait(lambda: self.nodes["pd"].metric(sample) == 1)


@pytest.fixture(scope="module")
def pair(directory) -> Iterator[Pair]:
    """A pair whose caches are whole when its nodes have ended."""
    with ExitStack() as stack:
        pair = Pair(directory, stack)
        yield pair
        for role, node in pair.nodes.items():
            assert node.stop() == 0
            verify = ("cache", "verify", "--json", "--cache-dir", str(pair.cache_of(role)))
            done = subprocess.run(
                [sys.executable, "-m", "prfaas", *verify], capture_output=True, check=True
            )
            assert json.loads(done.stdout)["num_damaged"] == 0


def test_a_pair_killed_at_random_answers_as_a_cold_node_alone_and_holds_nothing(alone, pair):
    alone.wait_ready()
    rng = random.Random(7)
    lengths = [rng.randrange(120, 700) for _ in range(9)]
    expected = {n: ask(alone, prompt_of(n), salt=f"pair {n}").choice for n in lengths}
    answers: list[tuple[int, Answer]] = []
    with ThreadPoolExecutor(4) as clients:
        for number, victims in enumerate((["prefill"], ["pd"], ["prefill", "pd"])):
            asked = lengths[: number * 3 + 3][-4:]
            waiting = [
                (n, clients.submit(ask_or_lose, pair.nodes["pd"], prompt_of(n))) for n in asked
            ]
            time.sleep(rng.uniform(0.0, 1.0))
            for role in victims:
                kill(pair.nodes[role])
            for n, future in waiting:
                answer = future.result()
                assert answer is not None or "pd" in victims, "an answer was lost with the peer"
                if answer is not None:
                    answers.append((n, answer))
            if len(victims) == 2:
                shutil.rmtree(pair.cache_of("pd"))  # all that is left is the peer's
            pair.restart(victims)
            answers += [(n, ask(pair.nodes["pd"], prompt_of(n))) for n in asked]
    answers += [(n, ask(pair.nodes["pd"], prompt_of(n))) for n in lengths]
    assert all(answer.choice == expected[n] for n, answer in answers)
    assert {answer.story["route"] for _, answer in answers} == {"local", "remote"}
    assert pair.nodes["prefill"].metric('prfaas_cache_hit_tokens_total{tier="disk"}') > 0
    resent = [ask(pair.nodes["pd"], prompt_of(n)) for n in lengths]
    assert [answer.choice for answer in resent] == [expected[n] for n in lengths]
    assert [answer.cached_tokens for answer in resent] == [boundary(n) for n in lengths]
    for role, node in pair.nodes.items():
        at_rest(node)
        assert node.metric('prfaas_store_records_total{event="damaged"}') == 0
        assert node.metric("prfaas_store_records_held") > 0
        pages = [node.metric(f'prfaas_cache_pages{{state="{s}"}}') for s in ("free", "cached")]
        assert sum(pages) == pair.num_pages[role]


def test_verify_with_a_cache_on_both_sides_finds_every_bit_equal_cold_and_warm(pair, directory):
    flags = (*pair.common, "--peer", pair.peer, "--max-context-tokens", "200", "--json")
    for _ in ("cold", "warm"):
        done = run_to_its_end(
            directory, "verify", *flags, "--cache-dir", str(directory / "verify.kv")
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["tokens_equal"] is report["bits_equal"] is True
        cached = [case for case in report["cases"] if case["row"] == "remote_cached"]
        assert any(case["tokens_reused"] for case in cached)
    for node in pair.nodes.values():
        at_rest(node)
