"""The share of the steps that may prefill is kept, changes no bit, and starves nobody."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.prefill_share import MIN_PREFILL_SHARE, PrefillShare
from prfaas.engine.replay_timing import ReplayTiming
from prfaas.types import SamplingParams
from tests.engine import replaying
from tests.engine.batching import BLOCK, Engine
from tests.engine.replaying import LAYOUTS, ReplayNode
from tests.engine.running import SEEDED, Node, Recorder, plain_answer, prompt_of, tiny, tiny_hybrid

SHARES = st.integers(100, 1000).map(lambda thousandths: thousandths / 1000)


# ---------------------------------------------------------------- the counter


@given(SHARES, st.lists(st.booleans(), max_size=300))
def test_no_run_of_steps_carries_more_than_its_share_and_one(share, wanted):
    """Whenever there is prefill to do, `wanted`."""
    shares, carried = PrefillShare(), [0]
    shares.set(share)
    for is_wanted in wanted:
        has_prefill = shares.begin() and is_wanted
        shares.end(has_prefill=has_prefill)
        carried.append(carried[-1] + has_prefill)
    exact = Fraction(round(share * 1000), 1000)
    for first, last in itertools.combinations(range(len(carried)), 2):
        assert carried[last] - carried[first] <= exact * (last - first) + 1


@given(SHARES, st.integers(0, 50), st.integers(1, 300))
def test_prefill_that_is_always_there_gets_its_whole_share_but_one(share, num_idle, num_steps):
    shares = PrefillShare()
    shares.set(share)
    for _ in range(num_idle):
        shares.begin()
        shares.end(has_prefill=False)
    carried = 0
    for _ in range(num_steps):
        has_prefill = shares.begin()
        shares.end(has_prefill=has_prefill)
        carried += has_prefill
    assert carried > Fraction(round(share * 1000), 1000) * num_steps - 1
    if num_idle:
        assert carried >= 1, "a prompt that comes after a pause begins at once"


@pytest.mark.parametrize("share", [-1.0, 0.0, 0.0999, 1.001, float("nan"), float("inf")])
def test_a_share_that_prefill_cannot_live_on_is_refused(share):
    with pytest.raises(ValueError, match="a prefill share of"):
        Engine().batcher.set_prefill_share(share)


# ---------------------------------------------------------------- the batcher


@settings(deadline=None, max_examples=30)
@given(share=SHARES, num_decoding=st.integers(1, 3), chunk_blocks=st.integers(1, 4))
def test_a_long_prompt_gets_its_share_of_the_steps_of_those_who_decode(
    share, num_decoding, chunk_blocks
):
    engine = Engine(chunk_tokens=chunk_blocks * BLOCK)
    for _ in range(num_decoding):
        engine.add(1, 10_000)
    engine.step()
    engine.add(50_000)
    engine.batcher.set_prefill_share(share)
    steps = [engine.step() for _ in range(60)]
    assert all(len(step.decodes) >= num_decoding - 1 for step in steps[chunk_blocks:])
    num_carrying = sum(bool(step.prefills) for step in steps)
    assert abs(num_carrying - share * len(steps)) <= num_decoding + 1
    assert all(step.is_prefill_held_back != bool(step.prefills) for step in steps)


@settings(deadline=None, max_examples=40)
@given(share=SHARES, num_blocks=st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_where_nothing_decodes_the_share_has_no_effect(share, num_blocks):
    """Prompts are of whole blocks: who lacks a single token, whatever it is, decodes."""
    prompts = [BLOCK * num for num in num_blocks]
    plans = []
    for each in (share, 1.0):
        steps = []
        engine = Engine(max_batch=2)
        engine.batcher.set_prefill_share(each)
        for prompt in prompts:
            engine.add(prompt)  # one token: it ends with its prefill
        while engine.known:
            steps.append(engine.step())
        plans.append(steps)
    assert plans[0] == plans[1]
    assert not any(plan.is_prefill_held_back for plan in plans[0])


def test_a_prompt_that_lacks_no_token_begins_in_a_step_that_may_not_prefill():
    engine = Engine()
    engine.add(1, 1000)
    engine.add(10_000)
    engine.step()
    engine.batcher.set_prefill_share(MIN_PREFILL_SHARE)
    while not engine.step().is_prefill_held_back:
        pass
    came = engine.add(40, 100, ready=40)
    plan = engine.step()
    assert plan.is_prefill_held_back
    assert [reservation.key for reservation in plan.admitted] == [came]


@settings(deadline=None, max_examples=15)
@given(
    share=SHARES,
    long=st.integers(50, 400),
    short=st.integers(1, 40),
    completion=st.integers(2, 20),
    chunk_blocks=st.integers(1, 8),
)
def test_the_least_share_starves_no_prompt(share, long, short, completion, chunk_blocks):
    """Among endless short ones, beside an endless answer."""
    chunk, max_batch = chunk_blocks * BLOCK, 3
    engine = Engine(chunk_tokens=chunk, max_batch=max_batch)
    engine.batcher.set_prefill_share(share)
    engine.add(1, 10**6)
    key = engine.add(long)
    rate = chunk / 4  # of the oldest, in a step that prefills
    bound = ((long + 2 * BLOCK * (max_batch + 1)) / rate + 4) / share + max_batch * completion + 8
    while key not in engine.first_token_step:
        while engine.batcher.num_waiting < 6:
            engine.add(short, completion)
        engine.step()
        assert engine.num_steps <= bound


# ---------------------------------------------------------------- bits


@settings(max_examples=15, deadline=None)
@given(
    share=SHARES,
    later=SHARES,
    num_tokens=st.integers(1, 150),
    num_choices=st.integers(1, 2),
    name=st.sampled_from(list(LAYOUTS)),
)
def test_no_share_changes_a_token_or_a_page_of_a_replayed_engine(
    share, later, num_tokens, num_choices, name
):
    layout, prompt, pages = LAYOUTS[name], replaying.prompt_of(num_tokens), []
    for shares in ((1.0, 1.0), (share, later)):
        node = ReplayNode(layout, chunk_tokens=32)
        node.runner.set_prefill_share(shares[0])
        node.submit(
            "decoding", replaying.prompt_of(40, seed=1), SamplingParams(max_tokens=40, seed=0)
        )
        for _ in range(3):
            node.step()
        table = node.lookup(prompt)
        assert table.try_reserve(num_tokens)
        sink = Recorder(node.cache, table)
        node.submit("asked", prompt, SEEDED, table=table, sink=sink, prefill_only=True)
        node.submit("other", prompt[: num_tokens // 2 + 1], SEEDED, num_choices=num_choices)
        node.step()
        node.runner.set_prefill_share(shares[1])
        results = node.run()
        answers = {
            name: {choice: answer.tokens for choice, answer in result.choices.items()}
            for name, result in results.items()
        }
        pages.append((sink.pages, answers))
    assert pages[0] == pages[1]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@pytest.mark.parametrize("share", [0.1, 0.35])
def test_no_share_changes_an_answer_of_a_model(family, share):
    model = tiny("gemma3", "float32") if family == "gemma3" else tiny_hybrid(family)
    node = Node(model)
    node.runner.set_prefill_share(share)
    asked = {f"r{n}": prompt_of(length, seed=n) for n, length in enumerate((9, 150, 40))}
    sampling = SamplingParams(max_tokens=9, seed=11, temperature=1.0)
    for name, prompt in asked.items():
        node.submit(name, prompt, sampling)
        node.step()
    results = node.run()
    for name, prompt in asked.items():
        assert results[name].tokens() == plain_answer(model, prompt, sampling)


# ---------------------------------------------------------------- what is told


def test_the_load_tells_what_steps_take_and_what_a_prompt_may_expect():
    """A chunk of 64 takes 0.064 s and a decode step 0.02."""
    timing = ReplayTiming(prefill_s=lambda n: 0.001 * n, decode_s=lambda n: 0.02)
    node = ReplayNode(timing=timing, ram_bytes=1 << 20)
    idle = node.runner.load()
    assert (idle.decode_step_s, idle.prefill_chunk_s, idle.num_decoding) == (None, None, 0)
    node.submit("decoding", replaying.prompt_of(128), SamplingParams(max_tokens=1000, seed=0))
    while not node.results["decoding"].choices:
        node.step()
    begun = node.runner.load()
    assert begun.prefill_chunk_s == pytest.approx(0.064)
    assert begun.prefill_tokens_per_s == pytest.approx(1000)
    assert begun.num_decoding == 1
    node.runner.set_prefill_share(0.1)
    node.submit("asked", replaying.prompt_of(600, seed=1), SamplingParams(max_tokens=1, seed=0))
    while node.results["asked"].ended is None:
        node.step()
    load = node.runner.load()
    assert load.decode_step_s == pytest.approx(0.02)
    assert load.prefill_chunk_s is not None
    assert load.prefill_chunk_s < 0.064 + 0.022
    # A chunk every ten steps, 48 tokens in 0.25 s, counts as 600 of some 4,000 tokens.
    assert 800 < load.prefill_tokens_per_s < 950
    node.runner.abort("decoding")
    node.run()
