"""What nodes say becomes the scheduler's fleet and directory; who does not belong is refused by name."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from prfaas.cache.changes import CacheSnapshot, Changes
from prfaas.cache.hashing import block_keys, root_key
from prfaas.errors import IncompatiblePeer, Overloaded
from prfaas.scheduler.fleet import Fleet
from prfaas.scheduler.heartbeat import Heartbeat
from prfaas.scheduler.options import SchedulerOptions
from prfaas.server.fleet_driver import FleetDriver
from prfaas.server.fleet_prefixes import INLINE_KEYS
from prfaas.server.heartbeat_messages import HeartbeatMessage
from prfaas.server.key_thread import INLINE_TOKENS
from tests.server.fleet import IDENTITY, request
from tests.server.scripted_engine import BLOCK_TOKENS, DENSE, HYBRID

A, B = "127.0.0.1:1", "127.0.0.1:2"


class World:
    def __init__(self, *, accept_approximate: bool = False) -> None:
        self.now_s = 100.0
        self.forgotten: list[str] = []
        self.driver = FleetDriver(
            fleet=Fleet(SchedulerOptions()),
            tokenizer_fingerprint="t",
            template_fingerprint="t",
            accept_approximate=accept_approximate,
            clock=lambda: self.now_s,
            on_forgotten=self.forgotten.append,
        )


@contextlib.asynccontextmanager
async def world(*, accept_approximate: bool = False) -> AsyncIterator[World]:
    made = World(accept_approximate=accept_approximate)
    try:
        yield made
    finally:
        made.driver.close()


def message(node: str = A, epoch: int = 1, **said: object) -> HeartbeatMessage:
    beat = Heartbeat(node=node, role="pd", cluster="default", epoch=epoch, max_running=8)
    base = HeartbeatMessage(
        heartbeat=beat, identity=IDENTITY, layout=DENSE, max_context_tokens=2048
    )
    return replace(base, **said)  # type: ignore[arg-type]


def prompt_keys(num_blocks: int, numerics: str = "exact") -> tuple[bytes, ...]:
    tokens = request(num_blocks * BLOCK_TOKENS).prompt_tokens
    root = root_key(
        model_fingerprint=IDENTITY.model_fingerprint,
        numerics_fingerprint=numerics,
        kv_dtype=IDENTITY.kv_dtype,
        layout=DENSE,
        salt=b"",
    )
    return block_keys(root, tokens, BLOCK_TOKENS)


async def hits(made: World, num_tokens: int = 100) -> dict[str, int]:
    return await made.driver.hits(await made.driver.keys(request(num_tokens)))


async def test_the_first_node_decides_what_the_fleet_computes():
    async with world() as made:
        driver = made.driver
        assert driver.is_ready == (False, "no pd node has joined")
        await driver.heard(message(A))
        assert driver.identity == IDENTITY
        assert driver.is_ready == (True, "")
        other = replace(IDENTITY, model_fingerprint="other")
        with pytest.raises(IncompatiblePeer, match=r"model_fingerprint .*'scripted'.*'other'"):
            await driver.heard(message(B, identity=other))
        await driver.left(A, 1)
        await driver.heard(message(B, identity=other))  # nobody is left whom it would not fit
        assert driver.identity == other


@pytest.mark.parametrize("name", ["tokenizer_fingerprint", "template_fingerprint"])
async def test_a_node_must_share_the_schedulers_own_text(name):
    other = replace(IDENTITY, **{name: "x"})  # type: ignore[arg-type]
    async with world() as made:
        with pytest.raises(IncompatiblePeer, match=rf"{name} differs: 't' here, 'x' there"):
            await made.driver.heard(message(identity=other))
        assert made.driver.identity is None


async def test_other_numerics_are_taken_only_where_they_may_be():
    other = replace(IDENTITY, numerics_fingerprint="other")
    async with world() as made:
        await made.driver.heard(message(A))
        with pytest.raises(IncompatiblePeer, match=r"numerics_fingerprint .*'exact'.*'other'"):
            await made.driver.heard(message(B, identity=other))
    async with world(accept_approximate=True) as made:
        await made.driver.heard(message(A))
        keys = prompt_keys(3, "other")
        await made.driver.heard(
            message(B, identity=other, snapshot=CacheSnapshot(epoch=1, sequence=0, keys=keys))
        )
        # Each node's blocks have the names that its numerics give them.
        assert await hits(made) == {B: 3 * BLOCK_TOKENS}


async def test_an_unknown_node_is_asked_for_a_snapshot_until_it_has_said_what_it_has():
    async with world() as made:
        driver = made.driver
        first = await driver.heard(message(A))
        assert (first.is_known, first.wants_snapshot) == (False, True)
        keys = prompt_keys(5)
        snapshot = CacheSnapshot(epoch=1, sequence=7, keys=keys[:3])
        second = await driver.heard(message(A, snapshot=snapshot))
        assert (second.is_known, second.wants_snapshot) == (True, False)
        assert await hits(made) == {A: 3 * BLOCK_TOKENS}
        more = Changes(epoch=1, sequence=8, added=keys[3:])
        assert not (await driver.heard(message(A, changes=more))).wants_snapshot
        assert await hits(made) == {A: 5 * BLOCK_TOKENS}
        gap = Changes(epoch=1, sequence=10, removed=keys[4:])
        assert (await driver.heard(message(A, changes=gap))).wants_snapshot
        assert (await driver.heard(message(A))).wants_snapshot


async def test_the_first_changes_of_all_need_no_snapshot():
    async with world() as made:
        said = message(A, changes=Changes(epoch=1, sequence=1, added=prompt_keys(2)))
        assert not (await made.driver.heard(said)).wants_snapshot
        assert await hits(made) == {A: 2 * BLOCK_TOKENS}


async def test_a_word_that_comes_again_does_not_count_against_what_is_expected():
    async with world() as made:
        asked = request(100)
        said = message(A, changes=Changes(epoch=1, sequence=1))
        await made.driver.heard(said)
        await made.driver.expect([A], asked, await made.driver.keys(asked))
        found = await hits(made)
        assert found[A] > 0
        for _ in range(3):
            await made.driver.heard(said)
            assert await hits(made) == found
        for sequence in (2, 3):  # two new words that do not name it
            assert await hits(made) == found
            changes = Changes(epoch=1, sequence=sequence)
            await made.driver.heard(message(A, changes=changes))
        assert await hits(made) == {}


async def test_windows_are_hits_only_at_places_that_were_named():
    async with world() as made:
        root = root_key(
            model_fingerprint=IDENTITY.model_fingerprint,
            numerics_fingerprint="exact",
            kv_dtype=IDENTITY.kv_dtype,
            layout=HYBRID,
            salt=b"",
        )
        keys = block_keys(root, request(100).prompt_tokens, BLOCK_TOKENS)
        snapshot = CacheSnapshot(epoch=1, sequence=0, keys=keys, places=keys[3:4])
        await made.driver.heard(message(A, layout=HYBRID, snapshot=snapshot))
        assert await hits(made) == {A: 4 * BLOCK_TOKENS}


async def test_a_new_life_of_a_node_has_nothing_of_the_old_one():
    async with world() as made:
        driver = made.driver
        snapshot = CacheSnapshot(epoch=1, sequence=0, keys=prompt_keys(2))
        await driver.heard(message(A, epoch=1, snapshot=snapshot))
        again = await driver.heard(message(A, epoch=2))
        assert (again.is_known, again.wants_snapshot) == (False, True)
        assert await hits(made) == {}
        with pytest.raises(Overloaded, match="not taken"):
            await driver.heard(message(A, epoch=1))
        await driver.left(A, 1)  # a late word of the old one
        assert driver.is_ready == (True, "")


async def test_a_node_that_leaves_or_falls_silent_is_forgotten_with_its_prefixes():
    async with world() as made:
        driver = made.driver
        snapshot = CacheSnapshot(epoch=1, sequence=0, keys=prompt_keys(2))
        for node in (A, B):
            await driver.heard(message(node, snapshot=snapshot))
        assert set(await hits(made)) == {A, B}
        await driver.left(B, 1)
        assert set(await hits(made)) == {A}
        await driver.left(B, 1)
        made.now_s += 3600
        await driver.look()
        assert made.forgotten == [B, A]
        assert driver.is_ready == (False, "no pd node has joined")
        assert (driver.identity, driver.num_keys, await hits(made)) == (None, 0, {})


async def test_requests_are_let_in_while_a_node_may_take_them_or_be_back():
    async with world() as made:
        await made.driver.heard(message(A))
        made.now_s += 6
        assert made.driver.is_ready == (True, ""), "it is dead, and may be back"
        beat = replace(message(A).heartbeat, is_draining=True)
        await made.driver.heard(message(A, heartbeat=beat))
        assert made.driver.is_ready == (False, "all of 1 pd nodes drain")
        await made.driver.heard(message(B))
        assert made.driver.is_ready == (True, "")


async def test_the_context_is_what_every_node_takes():
    async with world() as made:
        await made.driver.heard(message(A, max_context_tokens=4096))
        await made.driver.heard(message(B, max_context_tokens=1024))
        assert made.driver.max_context_tokens == 1024


async def test_what_takes_long_runs_beside_the_loop_and_lookups_wait_for_it():
    async with world() as made:
        tokens = tuple(index % 997 for index in range(INLINE_TOKENS))
        root = root_key(
            model_fingerprint=IDENTITY.model_fingerprint,
            numerics_fingerprint="exact",
            kv_dtype=IDENTITY.kv_dtype,
            layout=DENSE,
            salt=b"",
        )
        keys = block_keys(root, tokens, BLOCK_TOKENS)
        others = tuple(index.to_bytes(32, "big") for index in range(INLINE_KEYS))
        snapshot = CacheSnapshot(epoch=1, sequence=0, keys=keys + others)
        asked = request(prompt_tokens=tokens)
        await made.driver.heard(message(B))
        async with asyncio.TaskGroup() as tasks:
            heard = tasks.create_task(made.driver.heard(message(A, snapshot=snapshot)))
            await asyncio.sleep(0)
            found = tasks.create_task(made.driver.hits(await made.driver.keys(asked)))
        assert not heard.result().wants_snapshot
        assert found.result() == {A: len(tokens)}
