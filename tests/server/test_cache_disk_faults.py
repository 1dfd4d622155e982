"""A disk that fails under a serving node costs what was to be kept, and no answer."""

import errno
import os
import threading

import pytest

from tests.server.cached_nodes import (
    ask,
    ask_cold,
    boundary,
    flush,
    model_of,
    node_on,
    prompt,
    store_of,
)
from tests.server.fleet import until

__all__ = ["model_of"]
pytestmark = pytest.mark.slow
TOKENS = prompt(200)


@pytest.mark.parametrize(
    ("call", "number"),
    [("pwritev", errno.ENOSPC), ("pwritev", errno.EIO), ("fdatasync", errno.EIO)],
    ids=["full", "broken", "unsynced"],
)
async def test_what_could_not_be_written_is_never_found_and_every_answer_is_right(
    call, number, model_of, tmp_path, monkeypatch
):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    model = model_of("kimi_linear")
    async with node_on(model, tmp_path / "cache") as node:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            first = await ask(node, TOKENS)
            at_once = await ask(node, TOKENS)
            assert (at_once.bits, at_once.reused) == (first.bits, boundary(200))
            flush(node)
            stats = store_of(node).stats()
            assert stats.num_dropped_failing > 0
            assert stats.records.num_records == 0
            assert node._cache.counts().lookups.num_disk_tokens == 0
        assert node.is_ready[0]
    async with node_on(model, tmp_path / "cache") as node:
        restarted = await ask(node, TOKENS)
        assert (restarted.bits, restarted.reused) == (first.bits, 0)
        flush(node)
        assert store_of(node).stats().records.num_records > 0
    async with node_on(model, tmp_path / "cache") as node:
        kept = await ask(node, TOKENS)
        assert (kept.bits, kept.reused) == (first.bits, boundary(200))


async def test_a_node_whose_disk_recovers_keeps_pages_again(model_of, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with node_on(model_of("lfm2"), tmp_path / "cache") as node:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail)
            await ask(node, TOKENS)
            flush(node)
        seed = 0
        while not store_of(node).stats().records.num_records:  # the store rests after a failure
            seed += 1
            await ask(node, prompt(70, seed=seed), max_tokens=1)
            flush(node)


async def test_a_prompt_resent_while_its_pages_are_being_written_is_answered_from_ram(
    model_of, tmp_path, monkeypatch
):
    write, may_write = os.pwritev, threading.Event()
    is_writing = threading.Event()

    def wait_and_write(*arguments) -> int:
        is_writing.set()
        may_write.wait()
        return write(*arguments)

    model = model_of("kimi_linear")
    async with node_on(model, tmp_path / "cache") as node:
        cold = await ask_cold(node, TOKENS)
        flush(node)
        monkeypatch.setattr(os, "pwritev", wait_and_write)
        try:
            await ask(node, TOKENS)
            await until(is_writing.is_set)
            keys = node._cache.block_keys(TOKENS, b"")
            assert not any(store_of(node).known((0, key)) for key in keys)
            resent = await ask(node, TOKENS)
            assert (resent.bits, resent.reused) == (cold.bits, boundary(200))
            assert node._cache.counts().lookups.num_disk_tokens == 0
        finally:
            may_write.set()
    async with node_on(model, tmp_path / "cache") as node:
        kept = await ask(node, TOKENS)
        assert (kept.bits, kept.reused) == (cold.bits, boundary(200))
