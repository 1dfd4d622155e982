"""A runner on a tiny model with a real cache, and the plain loop that says what it must answer."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from prfaas.cache.block_table import BlockTable
from prfaas.cache.hashing import root_key
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import bytes_of_page
from prfaas.engine.loader import load_model
from prfaas.engine.model import Model, Segment
from prfaas.engine.options import EngineOptions
from prfaas.engine.runner import Runner
from prfaas.engine.sampler import Sampler, TokenHistory
from prfaas.engine.submission import FirstLogits, PageSink, Submission
from prfaas.types import FinishReason, Request, RequestEnded, SamplingParams, TokenEvent
from tests.tiny_models import VOCAB_SIZE, Family, write_tiny_model

BLOCK = 16
STATE_BLOCK = 64
"""Of models with states, which are kept at its multiples."""
GREEDY = SamplingParams(max_tokens=12, seed=0, temperature=0.0)
SEEDED = SamplingParams(max_tokens=12, seed=11, temperature=1.0, top_p=0.95)
MODELS = [("gemma3", "float32"), ("gemma3", "float16"), ("llama", "float16"), ("qwen3", "float32")]
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 150]


@cache
def tiny(family: Family, dtype: Literal["float16", "float32"]) -> Model:
    """A loaded model of few layers: of gemma3 one full layer behind two of 16 tokens' window."""
    layers: dict[str, object] = {"num_hidden_layers": 2}
    if family == "gemma3":
        types = ["sliding_attention", "sliding_attention", "full_attention"]
        layers = {"num_hidden_layers": 3, "layer_types": types}
    with TemporaryDirectory() as directory:
        path = write_tiny_model(Path(directory), family, 0, **layers)
        return load_model(path, dtype=dtype)


@cache
def tiny_hybrid(family: Family, **overrides: object) -> Model:
    """A loaded model of any family, as its tiny config describes it."""
    with TemporaryDirectory() as directory:
        path = write_tiny_model(Path(directory), family, 0, **overrides)
        return load_model(path, dtype="float32")


def block_of(model: Model) -> int:
    """Return the block size that tests of the model use."""
    return STATE_BLOCK if any(layer.states for layer in model.config.layers) else BLOCK


def prompt_of(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(int(t) for t in rng.integers(4, VOCAB_SIZE, num_tokens))


@dataclass
class Answer:
    """What came of one choice."""

    tokens: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.events[-1].finish_reason if self.events else None


@dataclass
class Result:
    choices: dict[int, Answer] = field(default_factory=dict)
    logits: bytes | None = None
    ended: RequestEnded | None = None

    @property
    def num_computed(self) -> int:
        assert self.ended is not None
        return self.ended.num_tokens_computed

    @property
    def error(self) -> str | None:
        assert self.ended is not None
        return self.ended.error

    def tokens(self, choice: int = 0) -> list[int]:
        return self.choices[choice].tokens if choice in self.choices else []


class Node:
    """One runner with its cache; every step is followed by both checks."""

    def __init__(
        self,
        model: Model,
        *,
        ram_bytes: int = 32 << 20,
        block_tokens: int | None = None,
        snapshot_tokens: int = 0,
        **options: Any,
    ) -> None:
        layout = model.layout(block_tokens or block_of(model))
        self.model = model
        self.cache = PrefixCache(
            layout=layout,
            ram_bytes=ram_bytes,
            root=lambda salt: root_key(
                model_fingerprint=model.model_fingerprint,
                numerics_fingerprint=model.numerics_fingerprint,
                kv_dtype=model.kv_dtype,
                layout=layout,
                salt=salt,
            ),
        )
        options = {"chunk_tokens": 64, **options}
        self.now_s = 0.0
        self.runner = Runner(
            model=model,
            cache=self.cache,
            options=EngineOptions(**options),
            clock=self.clock,
            snapshot_tokens=snapshot_tokens,
        )
        self.results: dict[str, Result] = {}

    def clock(self) -> float:
        self.now_s += 0.5
        return self.now_s

    def lookup(self, prompt: Sequence[int], salt: bytes = b"") -> BlockTable:
        return self.cache.lookup(self.cache.block_keys(prompt, salt), len(prompt))

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        num_choices: int = 1,
        table: BlockTable | None = None,
        forced: tuple[tuple[int, ...], ...] = (),
        sink: PageSink | None = None,
        prefill_only: bool = False,
        return_logits: bool = False,
        snapshot_tokens: int = 0,
        salt: bytes = b"",
    ) -> BlockTable:
        request = Request(
            request_id=name,
            prompt_tokens=tuple(prompt),
            sampling=sampling,
            num_choices=num_choices,
            cache_salt=salt,
        )
        table = table or self.lookup(prompt, salt)
        submission = Submission(
            request=request,
            table=table,
            forced_tokens=forced,
            sink=sink,
            prefill_only=prefill_only,
            return_logits=return_logits,
            snapshot_tokens=snapshot_tokens,
        )
        try:
            self.runner.submit(submission)
        except Exception:
            table.release()
            raise
        self.results[name] = Result()
        return table

    def step(self) -> None:
        events = self.runner.step()
        self.runner.check()
        self.cache.check()
        for event in events:
            result = self.results[event.request_id]
            assert result.ended is None, "an event after the end"
            match event:
                case TokenEvent():
                    answer = result.choices.setdefault(event.choice_index, Answer())
                    assert answer.finish_reason is None, "a token after the last"
                    answer.tokens.append(event.token_id)
                    answer.events.append(event)
                case FirstLogits():
                    assert result.logits is None
                    result.logits = event.logits
                case RequestEnded():
                    result.ended = event

    def run(self) -> dict[str, Result]:
        while self.runner.has_work:
            self.step()
        self.assert_idle()
        return self.results

    def assert_idle(self) -> None:
        """Everything ended and nothing is held."""
        assert all(result.ended is not None for result in self.results.values())
        load = self.runner.load()
        assert (load.num_running, load.num_waiting) == (0, 0)
        assert (load.num_waiting_tokens, load.kv_used_bytes) == (0, 0)
        counts = self.cache.counts()
        assert (counts.num_referenced, counts.num_transfer, counts.num_tables) == (0, 0, 0)
        assert counts.num_free + counts.num_cached == counts.num_pages

    def answer(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY, **how) -> Result:
        """Submit, run everything to its end, return this one's result."""
        name = f"request-{len(self.results)}"
        self.submit(name, prompt, sampling, **how)
        return self.run()[name]


Row = NDArray[np.float32]


def plain_rows(model: Model, prompt: Sequence[int]) -> Generator[Row, int, None]:
    """Yield logits after the prompt, then after each token sent in: no batch, cut or cache."""
    kv = model.new_kv(capacity_tokens=4096, block_tokens=block_of(model))
    tokens: Sequence[int] = prompt
    while True:
        segment = Segment(kv=kv, tokens=tokens, num_logits=1)
        logits_1V = model.forward([segment])
        tokens = [(yield logits_1V.numpy()[0])]


def plain_answer(
    model: Model, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY, choice: int = 0
) -> list[int]:
    return list(_plain_answer(model, prompt, sampling, choice))


@cache
def _plain_answer(
    model: Model, prompt: tuple[int, ...], sampling: SamplingParams, choice: int
) -> tuple[int, ...]:
    sampler, history = Sampler(model.config.vocab_size), TokenHistory(prompt)
    rows = plain_rows(model, prompt)
    row, tokens = next(rows), list[int]()
    while True:
        token = sampler.draw(
            row,
            sampling,
            choice_index=choice,
            position=len(prompt) + len(tokens),
            history=history,
        ).token_id
        tokens.append(token)
        history.append(token)
        if token in sampling.stop_token_ids or len(tokens) == sampling.max_tokens:
            return tuple(tokens)
        row = rows.send(token)


class Recorder:
    """A sink that copies each page when it is told of it."""

    def __init__(self, cache: PrefixCache, table: BlockTable, *, may_repeat: bool = False) -> None:
        self.layout, self.table, self.may_repeat = cache.layout, table, may_repeat
        self.pages: dict[tuple[int, int, int], tuple[int, bytes]] = {}
        """(group, index, block) -> (tokens, bytes), in the order of arrival."""
        self.progressed: list[int] = []

    def page_ready(self, group: int, index: int, block: int, num_tokens: int, page: int) -> None:
        assert self.may_repeat or (group, index, block) not in self.pages, "announced twice"
        spec, block_tokens = self.layout.groups[group], self.layout.block_tokens
        size = bytes_of_page(spec, index, num_tokens, block_tokens)
        self.pages[group, index, block] = (num_tokens, bytes(self.table.view(page)[:size]))

    def progress(self, num_tokens: int) -> None:
        self.progressed.append(num_tokens)


def prefill_and_ship(
    model: Model,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    num_choices: int = 1,
    chunk_tokens: int = 64,
    max_batch: int = 8,
) -> tuple[Result, Recorder, Node, BlockTable]:
    """Prefill on one node; copy its pages, byte by byte, into another's table."""
    sender = Node(model, chunk_tokens=chunk_tokens)
    table = sender.lookup(prompt)
    assert table.try_reserve(len(prompt))
    sink = Recorder(sender.cache, table)
    first = sender.answer(
        prompt,
        sampling,
        num_choices=num_choices,
        table=table,
        sink=sink,
        prefill_only=True,
        return_logits=True,
    )
    receiver = Node(model, max_batch_sequences=max_batch)
    landed = receiver.lookup(prompt)
    assert landed.try_reserve(len(prompt))
    layout = receiver.cache.layout
    for (group, index, block), (num_tokens, data) in sink.pages.items():
        pages = landed.pages(group, block)
        assert pages is not None
        landed.view(pages[index])[: len(data)] = data
        is_last_page = index == layout.groups[group].pages_per_block - 1
        if is_last_page and num_tokens == layout.block_tokens:
            landed.commit(group, block)
    landed.set_num_tokens(len(prompt))
    return first, sink, receiver, landed


def preempting_node(model: Model, *, num_sequences: float, num_tokens: int, **options) -> Node:
    """A node whose working memory takes `num_sequences` sequences of `num_tokens` tokens."""
    budget = int(model.kv_capacity_bytes(num_tokens) * num_sequences)
    return Node(model, kv_ram_bytes=budget, **options)
