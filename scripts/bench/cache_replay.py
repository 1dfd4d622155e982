"""Replays prompts of a trace against the real prefix cache, and against plain LRU and infinity.

A prompt is the ids of its blocks, each of which names everything up to its end, as in Mooncake's
traces. Pages hold nothing: only who is found and who leaves counts.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prfaas.cache.policy import EvictionOrder, Rank
from prfaas.cache.pool import Entry
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec

BLOCK_TOKENS = 512
PAGE_BYTES = 512
STATE_PAGES = 8
"""A snapshot takes the bytes of eight blocks: about Kimi Linear's 40 MB beside 10 KB a token."""

Prompt = tuple[int, ...]

ATTENTION = CacheLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(FullSpec(name="full", layers=(0,), page_bytes=PAGE_BYTES),),
)
HYBRID = CacheLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(
        FullSpec(name="full", layers=(0,), page_bytes=PAGE_BYTES),
        StateSpec(
            name="state",
            layers=(1,),
            page_bytes=PAGE_BYTES,
            state_bytes=STATE_PAGES * PAGE_BYTES,
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class HitRates:
    """Fractions of the prompts' whole blocks that were found, of one layout and size."""

    layout: str
    num_pages: int
    ours: float
    lru: float
    infinite: float


class PlainLru(EvictionOrder[Entry]):
    """Whoever was not used for longest leaves, whatever it saves."""

    def rank(self, worth: float, *, is_cold: bool = False) -> Rank:
        """Return a rank by use alone."""
        return super().rank(0.0 * worth, is_cold=False)


def hit_fraction(
    prompts: Sequence[Prompt], layout: CacheLayout, num_pages: int, *, is_lru: bool = False
) -> float:
    """Return the fraction of the prompts' blocks that a cache of so many pages serves."""
    cache = PrefixCache(
        layout=layout, ram_bytes=num_pages * layout.page_bytes, root=lambda _salt: bytes(32)
    )
    if is_lru:
        cache.pool._idle = PlainLru()  # noqa: SLF001
        cache.pool._supported = ()  # noqa: SLF001
    num_hits = num_blocks = 0
    for prompt in prompts:
        keys = [block.to_bytes(32, "big") for block in prompt]
        num_tokens = len(keys) * BLOCK_TOKENS + 1  # the next token is to be computed
        table = cache.lookup(keys, num_tokens)
        hit = table.hit_tokens // BLOCK_TOKENS
        junction = table.junction_tokens // BLOCK_TOKENS
        for block in range(hit, len(keys)):
            for group, spec in enumerate(layout.groups):
                is_wanted = isinstance(spec, FullSpec) or block + 1 in (junction, len(keys))
                if is_wanted and table.try_allocate(group, block) is not None:
                    table.commit(group, block)
            table.slide((block + 1) * BLOCK_TOKENS)
        table.release()
        num_hits += hit
        num_blocks += len(keys)
    cache.close()
    return num_hits / num_blocks


def replay(prompts: Sequence[Prompt], sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the hit rates of both layouts at each size in pages."""
    num_blocks = sum(len(prompt) for prompt in prompts)
    for name, layout in (("attention", ATTENTION), ("hybrid", HYBRID)):
        most = num_blocks + 2 * STATE_PAGES * len(prompts)
        infinite = hit_fraction(prompts, layout, most)
        for num_pages in sizes:
            rates = HitRates(
                layout=name,
                num_pages=num_pages,
                ours=round(hit_fraction(prompts, layout, num_pages), 4),
                lru=round(hit_fraction(prompts, layout, num_pages, is_lru=True), 4),
                infinite=round(infinite, 4),
            )
            yield asdict(rates)


def sample(num_prompts: int, seed: int = 0) -> list[Prompt]:
    """Return prompts with the statistics of Mooncake's conversation trace.

    There 61 percent of the prompts share nothing but the first block, the others go on from an
    earlier one; the median has 14 blocks, the mean 24, a tenth more than 54.
    """
    draw = random.Random(seed)
    fresh = iter(range(1, 1 << 40))
    prompts: list[Prompt] = []
    for _ in range(num_prompts):
        length = max(1, round(draw.lognormvariate(2.3, 1.0)))
        start: Prompt = (0,)
        if prompts and draw.random() < 0.39:  # the later, the likelier
            back = min(len(prompts), 1 + int(draw.paretovariate(0.6)))
            start = prompts[-back]
        prompts.append((*start, *(next(fresh) for _ in range(length))))
    return prompts
