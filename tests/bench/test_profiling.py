"""What is measured of an engine is what it takes: a replayed one, on a virtual clock, takes what it says."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prfaas.bench.profiling import (
    MAX_STEPS,
    MIN_RUNS,
    EngineBench,
    EngineFigures,
    lengths_up_to,
    measure_engine,
    not_falling,
)
from prfaas.cache.spec import CacheLayout
from prfaas.engine.replay_timing import ReplayTiming
from prfaas.engine.submission import PageSink, Submission
from prfaas.errors import ConfigError, EngineError
from prfaas.types import RequestEnded
from tests.engine.replaying import ATTENTION, HYBRID, TIMING, ReplayNode
from tests.engine.running import Node, tiny, tiny_hybrid

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ReplayTiming(
    prefill_s=lambda n: 1e-3 + 1e-5 * n, decode_s=lambda batch: 2e-3 + 1e-4 * batch
)
VOCAB = 256


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def measure(
    node: ReplayNode,
    *,
    seconds: float = 1.0,
    max_prompt_tokens: int = 1000,
    max_batch: int = 4,
    decodes: bool = True,
) -> EngineFigures:
    bench = EngineBench(node.runner, node.cache, vocab_size=VOCAB, clock=node.clock)
    return measure_engine(
        bench,
        max_prompt_tokens=max_prompt_tokens,
        max_batch=max_batch,
        decodes=decodes,
        seconds=seconds,
        clock=node.clock,
        progress=lambda _stage, _done, _total: None,
    )


def node_of(
    timing: ReplayTiming = QUICK, layout: CacheLayout = HYBRID, **options: int
) -> ReplayNode:
    return ReplayNode(layout, timing=timing, ram_bytes=1 << 20, **options)


@pytest.mark.parametrize("layout", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
def test_an_engine_is_measured_to_take_what_it_takes(layout):
    node = node_of(layout=layout)
    figures = measure(node)
    assert [timing.size for timing in figures.prefill] == [64, 128, 256, 512, 1000]
    assert [timing.size for timing in figures.decode] == [1, 2, 4]
    for timing in figures.prefill:
        assert timing.median_s == pytest.approx(QUICK.prefill_s(timing.size))
        assert len(timing.seconds) >= MIN_RUNS
    for timing in figures.decode:
        assert timing.median_s == pytest.approx(QUICK.step_s(timing.size))
        assert len(timing.seconds) <= MAX_STEPS


def test_the_pages_of_each_length_are_counted():
    figures = measure(node_of(), max_prompt_tokens=300)
    sizes = [timing.size for timing in figures.prefill]
    assert list(figures.kv_bytes) == [HYBRID.bytes_needed(size) for size in sizes]


def test_nothing_is_held_afterwards():
    node = node_of()
    measure(node)
    assert not node.runner.has_work
    assert node.cache.counts().num_tables == 0
    node.runner.check()
    node.cache.check()


def test_more_time_gives_longer_prompts_and_is_kept_to():
    longest = 0
    for seconds in (2.0, 8.0, 30.0):
        node = node_of(TIMING)
        began_s = node.now_s
        figures = measure(node, seconds=seconds, max_prompt_tokens=4000, decodes=False)
        assert figures.decode == ()
        assert figures.prefill[-1].size > longest
        longest = figures.prefill[-1].size
        least_s = 2 * MIN_RUNS * TIMING.prefill_s(128) + TIMING.prefill_s(128)
        assert node.now_s - began_s <= max(seconds, least_s) + TIMING.prefill_s(128)


def test_prompts_get_no_longer_than_the_cache_holds():
    node = ReplayNode(ATTENTION, timing=QUICK, ram_bytes=8 << 10)
    figures = measure(node, decodes=False)
    assert 64 < figures.prefill[-1].size < 1000
    node.cache.check()


class Forgetful:
    """An engine whose sink does not hear of the first page."""

    def __init__(self, node: Node) -> None:
        self._runner = node.runner
        self.max_context_tokens = node.runner.max_context_tokens
        self.step, self.abort = node.runner.step, node.runner.abort
        self.load = node.runner.load

    def submit(self, submission: Submission) -> None:
        assert submission.sink is not None
        self._runner.submit(replace(submission, sink=_Deaf(submission.sink)))


class _Deaf:
    def __init__(self, sink: PageSink) -> None:
        self._sink = sink
        self._has_skipped = False

    def page_ready(self, group: int, index: int, block: int, num_tokens: int, page: int) -> None:
        if self._has_skipped:
            self._sink.page_ready(group, index, block, num_tokens, page)
        self._has_skipped = True

    def progress(self, num_tokens: int) -> None:
        self._sink.progress(num_tokens)


def test_pages_that_are_not_those_of_the_layout_are_an_error():
    node = node_of()
    bench = EngineBench(Forgetful(node), node.cache, vocab_size=VOCAB, clock=node.clock)
    with pytest.raises(EngineError, match=r"made pages of \d+ bytes; its layout says \d+$"):
        bench.prefill(100)


def test_an_engine_that_fails_is_an_error(monkeypatch):
    node = node_of()
    bench = EngineBench(node.runner, node.cache, vocab_size=VOCAB, clock=node.clock)
    broken = RequestEnded(request_id="profile-0", error="broken")
    monkeypatch.setattr(node.runner, "step", lambda: [broken])
    with pytest.raises(EngineError, match="broken"):
        bench.prefill(100)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_prompt_tokens": 1}, "a context of 2 tokens and this cache are too small"),
        ({"max_prompt_tokens": 20}, "a context of 21 tokens is too small to measure decoding"),
        ({"max_batch": 16}, "--kv-ram-bytes does not hold 16 sequences at once"),
    ],
)
def test_what_is_too_small_to_measure_is_refused(changes, says):
    context = changes.get("max_prompt_tokens", 1000) + 1
    node = node_of(max_context_tokens=context, max_batch_sequences=8)
    with pytest.raises(ConfigError, match=f"^{says}"):
        measure(node, **changes)


@pytest.mark.parametrize("family", ["gemma3", "kimi_linear"])
def test_a_model_s_pages_are_those_of_its_layout(family):
    model = tiny("gemma3", "float32") if family == "gemma3" else tiny_hybrid(family)
    node = Node(model)
    bench = EngineBench(
        node.runner, node.cache, vocab_size=model.config.vocab_size, clock=node.clock
    )
    for num_tokens in (1, 63, 64, 130):
        measured = bench.prefill(num_tokens)
        assert measured is not None
        assert measured[1] == node.cache.layout.bytes_needed(num_tokens)
    assert [timing.size for timing in bench.decode([1, 2], 16, 0.0)] == [1, 2]
    assert not node.runner.has_work


@given(st.integers(2, 1 << 20))
def test_lengths_double_up_to_the_longest(max_tokens):
    lengths = lengths_up_to(max_tokens)
    assert len(lengths) >= 2
    assert max_tokens / 1.25 <= lengths[-1] <= max_tokens
    assert lengths[0] <= 64
    assert all(low < high <= 2 * low + 1 for low, high in pairwise(lengths))


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=9))
def test_values_that_may_not_fall_are_the_nearest_ones(values):
    # The min-max formula of isotonic regression, Barlow et al. 1972.
    num = len(values)
    expected = [
        max(
            min(sum(values[low : high + 1]) / (high + 1 - low) for high in range(at, num))
            for low in range(at + 1)
        )
        for at in range(num)
    ]
    assert not_falling(values) == pytest.approx(expected)
