#!/usr/bin/env python
"""Replays prompts of a trace against the real prefix cache, and against LRU and infinity.

    scripts/bench/cache_replay.py --trace mooncake_conversation.jsonl --json

A prompt is its length and the ids of its blocks, each of which names everything up to its end, as in
Mooncake's traces. Pages hold nothing: only who is found and who leaves counts.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.cache.policy import COLD, EvictionOrder
from prfaas.cache.pool import Entry
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec, WindowSpec
from prfaas.config.traces import MOONCAKE_BLOCK_TOKENS, read_trace

BLOCK_TOKENS = MOONCAKE_BLOCK_TOKENS
PAGE_BYTES = 512
STATE_PAGES = 8
"""A snapshot takes the bytes of eight blocks: about Kimi Linear's 40 MB beside 10 KB a token."""
WINDOW_LAYERS = 5
"""Gemma 3's, for each of full attention; their windows are of one block."""

_FULL = FullSpec(name="full", layers=(0,), page_bytes=PAGE_BYTES)
ATTENTION = CacheLayout(block_tokens=BLOCK_TOKENS, groups=(_FULL,))
HYBRID = CacheLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(
        _FULL,
        StateSpec(
            name="state",
            layers=(1,),
            page_bytes=PAGE_BYTES,
            state_bytes=STATE_PAGES * PAGE_BYTES,
        ),
    ),
)
WINDOWED = CacheLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(
        _FULL,
        WindowSpec(
            name="window",
            layers=tuple(range(1, 1 + WINDOW_LAYERS)),
            page_bytes=PAGE_BYTES,
            window_tokens=BLOCK_TOKENS,
        ),
    ),
)
LAYOUTS = {"attention": ATTENTION, "hybrid": HYBRID, "windowed": WINDOWED}

Policy = Literal["ours", "lru", "plain_lru"]


class Prompt(NamedTuple):
    """A prompt of a trace."""

    num_tokens: int
    block_ids: tuple[int, ...]
    """Of its whole blocks."""


@dataclass(frozen=True, kw_only=True)
class HitRates:
    """Fractions of the prompts' tokens that were found, of one layout and size."""

    layout: str
    num_pages: int
    prompt_tokens: int
    ours: float
    lru: float
    """Of all that was used, the oldest leaves; windows and states that were slid past before that."""
    plain_lru: float
    """Of all pages, the oldest leaves."""
    infinite: float


class Lru(EvictionOrder[Entry]):
    """Whoever was not used for longest leaves, whatever it saves."""

    def use(self, items: Sequence[Entry], level: int) -> None:
        """Let items wait by use alone."""
        super().use(items, COLD if level == COLD else 0)


class PlainLru(EvictionOrder[Entry]):
    """Whoever was not used for longest leaves, even if nobody can use the others."""

    def use(self, items: Sequence[Entry], level: int) -> None:
        """Let items wait by use alone."""
        super().use(items, 0 * level)


def hit_fraction(
    prompts: Sequence[Prompt], layout: CacheLayout, num_pages: int, *, policy: Policy = "ours"
) -> float:
    """Return the fraction of the prompts' tokens that a cache of so many pages serves."""
    cache = PrefixCache(
        layout=layout, ram_bytes=num_pages * layout.page_bytes, root=lambda _salt: bytes(32)
    )
    if policy != "ours":
        cache.pool._order = Lru() if policy == "lru" else PlainLru()  # noqa: SLF001
        cache.pool._supported = ()  # noqa: SLF001
    num_hit_tokens = sum(serve(cache, prompt) for prompt in prompts)
    cache.close()
    return num_hit_tokens / sum(prompt.num_tokens for prompt in prompts)


def serve(cache: PrefixCache, prompt: Prompt) -> int:
    """Keep of a prompt what the engine does; return the tokens that were found."""
    layout = cache.layout
    keys = [block.to_bytes(32, "big") for block in prompt.block_ids]
    table = cache.lookup(keys, prompt.num_tokens)
    replay_blocks = (prompt.num_tokens - 1) // BLOCK_TOKENS
    snapshots = (table.junction_tokens // BLOCK_TOKENS, replay_blocks)
    for block in range(table.hit_tokens // BLOCK_TOKENS, len(keys)):
        for group, spec in enumerate(layout.groups):
            is_wanted = not isinstance(spec, StateSpec) or block + 1 in snapshots
            if is_wanted and table.try_allocate(group, block) is not None:
                table.commit(group, block)
        table.slide((block + 1) * BLOCK_TOKENS)
    table.release()
    return table.hit_tokens


def replay(prompts: Sequence[Prompt], sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the hit rates of each layout at each size in pages."""
    num_blocks = sum(len(prompt.block_ids) for prompt in prompts)
    for name, layout in LAYOUTS.items():
        most = num_blocks * layout.pages_per_block
        if layout.has_states:
            most = num_blocks + 2 * STATE_PAGES * len(prompts)
        infinite = hit_fraction(prompts, layout, most)
        for num_pages in sizes:
            policies: tuple[Policy, ...] = ("ours", "lru", "plain_lru")
            found = {
                policy: round(hit_fraction(prompts, layout, num_pages, policy=policy), 4)
                for policy in policies
            }
            yield asdict(
                HitRates(
                    layout=name,
                    num_pages=num_pages,
                    prompt_tokens=sum(prompt.num_tokens for prompt in prompts),
                    infinite=round(infinite, 4),
                    **found,
                )
            )


def prompts_of(trace: Path, num_prompts: int | None = None) -> list[Prompt]:
    """Return the first prompts of a trace in Mooncake's format."""
    return [
        Prompt(request.input_tokens, request.block_ids[: request.input_tokens // BLOCK_TOKENS])
        for request in read_trace(trace, "mooncake")[:num_prompts]
    ]


def sample(num_prompts: int, seed: int = 0) -> list[Prompt]:
    """Return prompts with the statistics of Mooncake's conversation trace.

    There 61 percent of the prompts share nothing but the first block, the others go on from an
    earlier one; the median has 14 blocks, the mean 24, a tenth more than 54. A chat that has gone
    on once goes on again in six of ten cases.
    """
    draw = random.Random(seed)
    fresh = iter(range(1, 1 << 40))
    prompts: list[Prompt] = []
    chats: list[tuple[int, ...]] = []
    """What may go on: latest last, and twice what has gone on."""
    for _ in range(num_prompts):
        length = max(1, round(draw.lognormvariate(2.3, 1.0)))
        start: tuple[int, ...] = (0,)
        goes_on = bool(chats) and draw.random() < 0.39
        if goes_on:  # the later, the likelier
            start = chats.pop(-min(len(chats), 1 + int(draw.paretovariate(0.6))))
            chats = [chat for chat in chats if chat is not start]
            length = max(1, length // 4)
        blocks = (*start, *(next(fresh) for _ in range(length)))
        chats += [blocks] * (3 if goes_on else 1)
        prompts.append(Prompt(len(blocks) * BLOCK_TOKENS + draw.randrange(BLOCK_TOKENS), blocks))
    return prompts


def main() -> None:
    """Print hit rates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON array")
    parser.add_argument("--trace", type=Path, action="append", help="Mooncake's JSON lines")
    parser.add_argument("--prompts", type=int, help="of each trace; all if not given")
    parser.add_argument("--pages", type=int, nargs="+", default=[2000, 8000, 32_000])
    options = parser.parse_args()
    rows = (
        {"trace": trace.stem if trace else "sample", **rates}
        for trace in options.trace or [None]
        for rates in replay(
            prompts_of(trace, options.prompts) if trace else sample(options.prompts or 2000),
            options.pages,
        )
    )
    if options.json:
        print(json.dumps(list(rows), indent=2))
        return
    for number, row in enumerate(rows):
        if not number:
            print(*(f"{name:>22}" for name in row))
        print(*(f"{value:>22}" for value in row.values()), flush=True)


if __name__ == "__main__":
    main()
