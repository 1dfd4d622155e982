"""A replayed engine on a virtual clock, with a real cache; checked after every step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prfaas.cache.block_table import BlockTable
from prfaas.cache.hashing import root_key
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec, WindowSpec
from prfaas.engine.options import EngineOptions
from prfaas.engine.replay import ReplayEngine
from prfaas.engine.replay_kv import ReplayConfig, ReplayModel
from prfaas.engine.replay_timing import ReplayTiming
from prfaas.engine.sampler import Sampler, TokenHistory
from prfaas.types import SamplingParams
from tests.engine.running import GREEDY, Node, Recorder, Result

BLOCK = 16
VOCAB = 257
HYBRID = CacheLayout(
    block_tokens=BLOCK,
    groups=(
        FullSpec(name="full", layers=(1, 3), page_bytes=BLOCK * 6),
        WindowSpec(name="window", layers=(0,), page_bytes=BLOCK * 3, window_tokens=20),
        StateSpec(name="state", layers=(2, 4), page_bytes=50, state_bytes=130),
    ),
)
ATTENTION = replace(HYBRID, groups=HYBRID.groups[:2])
LAYOUTS = {"hybrid": HYBRID, "attention": ATTENTION}
TIMING = ReplayTiming(prefill_s=lambda n: 0.5 + 0.001 * n, decode_s=lambda n: 0.02 + 0.001 * n)
"""Half a second and some: forwards of many slices."""
INSTANT = ReplayTiming(prefill_s=lambda n: 0.0 * n, decode_s=lambda n: 0.0 * n)


def model_of(layout: CacheLayout, seed: bytes = b"a") -> ReplayModel:
    return ReplayModel(layout, ReplayConfig(vocab_size=VOCAB, max_context_tokens=4096), seed=seed)


class ReplayNode(Node):
    """One replayed engine; time passes only when it sleeps."""

    def __init__(
        self,
        layout: CacheLayout = HYBRID,
        *,
        timing: ReplayTiming = INSTANT,
        ram_bytes: int = 64 << 10,
        snapshot_tokens: int = 0,
        **options: Any,
    ) -> None:
        self.now_s = 100.0
        self.results: dict[str, Result] = {}
        self.cache = PrefixCache(
            layout=layout,
            ram_bytes=ram_bytes,
            root=lambda salt: root_key(
                model_fingerprint="m",
                numerics_fingerprint="n",
                kv_dtype="bfloat16",
                layout=layout,
                salt=salt,
            ),
        )
        self.runner = ReplayEngine(
            model=model_of(layout),
            cache=self.cache,
            options=EngineOptions(**{"chunk_tokens": 64, **options}),
            timing=timing,
            clock=self.clock,
            sleep=self.sleep,
            snapshot_tokens=snapshot_tokens,
        )

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s >= 0
        self.now_s += duration_s


class TimedRecorder(Recorder):
    """Also notes when each page came."""

    def __init__(self, node: ReplayNode, table: BlockTable) -> None:
        super().__init__(node.cache, table)
        self.node = node
        self.times: list[tuple[int, int, float]] = []
        """(group, page number in the block, seconds)."""

    def page_ready(self, group: int, index: int, block: int, num_tokens: int, page: int) -> None:
        super().page_ready(group, index, block, num_tokens, page)
        self.times.append((group, index, self.node.now_s))


def prompt_of(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(
        (seed * 7919 + place * place * 31 + place * 17) % 256 for place in range(num_tokens)
    )


def plain_answer(
    layout: CacheLayout, prompt: Sequence[int], sampling: SamplingParams = GREEDY, choice: int = 0
) -> list[int]:
    """Return the tokens of one choice, drawn one by one without any engine or cache."""
    model, sampler, history = model_of(layout), Sampler(VOCAB), TokenHistory(prompt)
    tokens = list(prompt)
    kv = model.new_kv(capacity_tokens=0, block_tokens=BLOCK)
    kv.tell(tokens)
    while len(tokens) < len(prompt) + sampling.max_tokens:
        draw = sampler.draw(
            model.logits(kv, len(tokens)),
            sampling,
            choice_index=choice,
            position=len(tokens),
            history=history,
        )
        tokens.append(draw.token_id)
        history.append(draw.token_id)
        if draw.token_id in sampling.stop_token_ids:
            break
    return tokens[len(prompt) :]


def ship(
    prompt: Sequence[int], layout: CacheLayout, sampling: SamplingParams = GREEDY, **how: Any
) -> tuple[Result, Recorder, ReplayNode, BlockTable]:
    """Prefill on one node; copy its pages, byte by byte, into another's table."""
    sender = ReplayNode(layout)
    table = sender.lookup(prompt)
    assert table.try_reserve(len(prompt))
    sink = Recorder(sender.cache, table)
    first = sender.answer(
        prompt, sampling, table=table, sink=sink, prefill_only=True, return_logits=True, **how
    )
    receiver = ReplayNode(layout)
    landed = receiver.lookup(prompt)
    assert landed.try_reserve(len(prompt))
    for (group, index, block), (_, data) in sink.pages.items():
        pages = landed.pages(group, block)
        assert pages is not None
        landed.view(pages[index])[: len(data)] = data
    landed.set_num_tokens(len(prompt))
    return first, sink, receiver, landed
