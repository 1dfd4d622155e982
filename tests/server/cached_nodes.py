"""pd nodes with real engines over tiny models and a cache on disk, asked without HTTP."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import FullSpec
from prfaas.cache.store import Store
from prfaas.server.pd import PdNode, load_pd_node
from prfaas.types import Request, RequestRecord, SamplingParams
from tests.server.fleet import CountedTransfers, until
from tests.server.real_nodes import config, no_progress
from tests.tiny_configs import Family
from tests.tiny_models import write_tiny_model

BLOCK = 64
FAMILIES: tuple[Family, ...] = ("kimi_linear", "lfm2", "gemma3")
"""States with latent KV, states of a convolution alone, and windows; every family is the engine's tests'."""
GREEDY = SamplingParams(max_tokens=6, seed=3, temperature=0.0)
SEEDED = replace(GREEDY, temperature=1.0)

ModelOf = Callable[..., Path]
_numbers = itertools.count()


@pytest.fixture
def model_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelOf:
    """A function that writes a tiny model of a family and returns where."""
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    return lambda family, **fields: write_tiny_model(tmp_path / family, family, **fields)


@dataclass(frozen=True)
class Answer:
    """What a cache must not change, and the story of how it came about."""

    tokens: list[int]
    first_logits: bytes
    record: RequestRecord

    @property
    def bits(self) -> tuple[list[int], bytes]:
        return self.tokens, self.first_logits

    @property
    def reused(self) -> int:
        return self.record.tokens_reused


@contextlib.asynccontextmanager
async def node_on(
    model: Path,
    directory: Path | None,
    *,
    ram_bytes: int = 64 << 20,
    block_tokens: int = BLOCK,
    engine: dict[str, Any] | None = None,
    **cache: Any,
) -> AsyncIterator[PdNode]:
    """A pd node that keeps its cache in `directory`; nothing is held by anyone at its end."""
    settings = config(model, dtype="float32", block_tokens=block_tokens, max_context_tokens=900)
    settings = replace(
        settings,
        engine=replace(settings.engine, **(engine or {})),
        cache=replace(
            settings.cache,
            ram_bytes=ram_bytes,
            dir=None if directory is None else str(directory),
            **cache,
        ),
    )
    node = load_pd_node(settings, CountedTransfers(), no_progress)
    async with asyncio.TaskGroup() as tasks:
        await node.start(tasks)
        try:
            async with asyncio.timeout(240):
                yield node
                await at_rest(node)
        finally:
            await node.close()


async def at_rest(node: PdNode) -> None:
    """Return when nobody holds a page and nothing waits to be written; every count is right."""
    flush(node)
    await until(lambda: is_idle(node))
    node._cache.check()


def is_idle(node: PdNode) -> bool:
    counts, load = node._cache.counts(), node.load()
    return not any(
        (
            counts.num_tables,
            counts.num_referenced,
            counts.num_transfer,
            load.num_running,
            load.num_waiting,
            load.num_transfers,
        )
    )


def store_of(node: PdNode) -> Store:
    assert node._cache.tier is not None
    store = node._cache.tier.store
    assert isinstance(store, Store)
    return store


def flush(node: PdNode) -> None:
    """Return when all that is published is on disk."""
    if node._cache.tier is not None:
        store_of(node).flush()


async def ask(
    node: PdNode,
    tokens: Sequence[int],
    sampling: SamplingParams = SEEDED,
    *,
    salt: bytes = b"",
    **changes: Any,
) -> Answer:
    """Return the answer once it is complete and lets all pages go."""
    request = Request(
        request_id=f"r{next(_numbers)}",
        prompt_tokens=tuple(tokens),
        sampling=replace(sampling, **changes),
        cache_salt=salt,
    )
    async with node.generate(request, return_logits=True) as generation:
        drawn = [event.token_id async for event in generation]
    assert generation.first_logits is not None
    record = generation.record
    assert record.tokens_reused + record.tokens_local + record.tokens_remote == len(tokens)
    return Answer(drawn, generation.first_logits, record)


async def ask_cold(
    node: PdNode, tokens: Sequence[int], sampling: SamplingParams = SEEDED, **changes: Any
) -> Answer:
    """Return the answer under a salt that nobody has used: it can hit nothing."""
    salt = b"cold %d" % next(_numbers)
    answer = await ask(node, tokens, sampling, salt=salt, **changes)
    assert answer.reused == 0
    return answer


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids without a pattern that repeats; those of another seed differ from the start."""
    return [4 + (seed * 7919 + i * i * 31 + i * 17) % 500 for i in range(num_tokens)]


def boundary(num_tokens: int, block_tokens: int = BLOCK) -> int:
    """The longest hit that a prompt can have."""
    return (num_tokens - 1) // block_tokens * block_tokens


def has_states(cache: PrefixCache) -> bool:
    return cache.layout.has_states


def supported_groups(cache: PrefixCache) -> list[int]:
    """The groups of states and windows, which serve no hit without full attention's."""
    groups = cache.layout.groups
    return [group for group, spec in enumerate(groups) if not isinstance(spec, FullSpec)]


def drop_from_ram(cache: PrefixCache, group: int, key: bytes) -> None:
    """Evict one published block, as a lack of pages would; others that nobody can use may go, too."""
    pool, taken = cache.pool, []
    with pool.lock:
        assert key in pool.published(group)
        pool.chill((group, key))
        while key in pool.published(group):
            entries = pool.try_take([1] * (pool.num_free + 1), is_transfer=False)
            assert entries is not None
            taken += entries
        for entry in taken:
            pool.let_go(entry)


class LossyStore:
    """A store that has lost records: `absent` ones are not known, `damaged` ones cannot be read."""

    def __init__(self, store: Store, lost: set[tuple[int, bytes]], *, is_known: bool) -> None:
        self._store = store
        self._lost = lost
        self._is_known = is_known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def known(self, key: tuple[int, bytes]) -> bool:
        if key in self._lost:
            return self._is_known
        return self._store.known(key)

    def num_known(self, group: int, keys: Sequence[bytes]) -> int:
        return sum(1 for _ in itertools.takewhile(lambda key: self.known((group, key)), keys))

    def get_many(self, wanted: Sequence[tuple[tuple[int, bytes], Any]]) -> list[bool]:
        found = self._store.get_many(wanted)
        for index, (key, _) in enumerate(wanted):
            if key in self._lost:
                self._is_known, found[index] = False, False  # what was found damaged is gone
        return found
