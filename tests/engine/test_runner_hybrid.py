"""Models with states behind the runner: every way to the same tokens gives the same bits.

The plain loop computes the prompt in one forward and then one token at a time. Each answer carries
the log probabilities of its tokens, which are compared to the last bit.
"""

import itertools
from dataclasses import replace
from functools import cache

import pytest

from prfaas.cache.spec import StateSpec, needed_blocks, replay_boundary
from prfaas.engine.model import Model, Segment
from prfaas.engine.sampler import Sampler
from prfaas.types import SamplingParams, TokenEvent, TokenLogprobs
from tests.engine.running import (
    STATE_BLOCK,
    Node,
    Recorder,
    plain_rows,
    prefill_and_ship,
    prompt_of,
    tiny_hybrid,
)
from tests.tiny_configs import FAMILIES

GREEDY = SamplingParams(max_tokens=6, seed=0, temperature=0.0, num_logprobs=3)
SEEDED = SamplingParams(max_tokens=6, seed=11, temperature=1.0, num_logprobs=3)
LENGTHS = [1, 63, 64, 65, 128, 129, 200]
"""Around blocks and chunks."""
Line = list[tuple[int, TokenLogprobs | None]]


@pytest.fixture(
    scope="module",
    params=[
        ("bamba", {"mamba_d_state": 64}),  # three slices a layer
        ("falcon_h1", {}),
        ("kimi_linear", {}),
        ("minimax", {}),
    ],
    ids=lambda param: param[0],
)
def model(request: pytest.FixtureRequest) -> Model:
    family, overrides = request.param
    return tiny_hybrid(family, **overrides)


@pytest.fixture(scope="module")
def bamba() -> Model:
    return tiny_hybrid("bamba", mamba_d_state=64)


@cache
def plain(
    model: Model, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY, choice: int = 0
) -> Line:
    """Tokens and log probabilities of the plain loop; not to be changed."""
    sampler, rows = Sampler(model.config.vocab_size), plain_rows(model, prompt)
    row, line = next(rows), Line()
    while True:
        position = len(prompt) + len(line)
        draw = sampler.draw(row, sampling, choice_index=choice, position=position, history=None)
        line.append((draw.token_id, draw.logprobs))
        if len(line) == sampling.max_tokens:
            return line
        row = rows.send(draw.token_id)


def told(events: list[TokenEvent]) -> Line:
    return [(event.token_id, event.logprobs) for event in events]


def tokens_of(line: Line) -> tuple[int, ...]:
    return tuple(token for token, _ in line)


# ---------------------------------------------------------------- cuts, neighbours, hits


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [64, 192])
def test_neither_cuts_nor_neighbours_change_an_answer(model, chunk_tokens):
    node = Node(model, chunk_tokens=chunk_tokens)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    for index, prompt in enumerate(prompts):
        node.submit(f"r{index}", prompt, SEEDED)
    results = node.run()
    for index, prompt in enumerate(prompts):
        assert told(results[f"r{index}"].choices[0].events) == plain(model, prompt, SEEDED)


@pytest.mark.slow
def test_a_prompt_sent_again_is_computed_from_its_replay_boundary(model):
    """At whole blocks, too, where the state at the end alone would be of no use."""
    for length in LENGTHS:
        node, prompt = Node(model), prompt_of(length, seed=length)
        expected = plain(model, prompt)
        for hit_tokens in (0, *[replay_boundary(length, STATE_BLOCK)] * 2):
            result = node.answer(prompt, GREEDY)
            assert result.num_computed == length - hit_tokens
            assert told(result.choices[0].events) == expected


def test_kv_without_its_state_is_no_hit_and_the_third_prompt_finds_one(bamba):
    """Where prompts part nobody kept a state at first; the second one does."""
    node = Node(bamba)
    shared = prompt_of(150)
    prompts = [(*shared, *prompt_of(100, seed=seed)) for seed in (1, 2, 3)]
    computed = []
    for prompt in prompts:
        result = node.answer(prompt, GREEDY)
        assert told(result.choices[0].events) == plain(bamba, prompt)
        computed.append(result.num_computed)
    assert computed == [250, 250, 250 - 128]


def test_a_longer_prompt_goes_on_from_the_boundary_of_a_shorter_one(model):
    node = Node(model)
    prompt = prompt_of(330)
    node.answer(prompt[:200], GREEDY)
    result = node.answer(prompt, GREEDY)
    assert result.num_computed == 330 - 192
    assert told(result.choices[0].events) == plain(model, prompt)


def test_the_state_of_a_cut_prompt_holds_its_tokens_and_no_padding(model):
    """As computed in pieces, to the bit."""
    prompt = prompt_of(100)
    whole, steps = (model.new_kv(capacity_tokens=128) for _ in range(2))
    model.forward([Segment(kv=whole, tokens=prompt, num_logits=0)])
    for tokens in (prompt[:STATE_BLOCK], prompt[STATE_BLOCK:-1], prompt[-1:]):
        model.forward([Segment(kv=steps, tokens=tokens, num_logits=0)])
    for left, right in zip(whole.states, steps.states, strict=True):
        if left is None or right is None:
            continue
        for a, b in zip(left.at(100), right.at(100), strict=True):
            assert a.equal(b)
            assert a.abs().max() > 1e-3


# ---------------------------------------------------------------- what is published


def test_an_answer_goes_on_from_what_a_longer_prompt_computed(bamba):
    """A failover finds what was sent in the cache, which has the bits of a decode."""
    prompt = prompt_of(100)
    sampling = replace(GREEDY, max_tokens=150)
    expected = plain(bamba, prompt, sampling)
    sent = tokens_of(expected)[:120]
    node = Node(bamba)
    node.answer((*prompt, *sent, *prompt_of(30, seed=1)), GREEDY)
    result = node.answer(prompt, sampling, forced=(sent,))
    assert told(result.choices[0].events) == expected[120:]


def test_a_published_state_is_that_of_its_tokens_alone(model):
    """It is captured inside the forward, and equals that of a prompt which ends there."""
    prompt = prompt_of(200)
    node = Node(model, chunk_tokens=576)
    node.answer(prompt, GREEDY)
    table = node.lookup(prompt)
    assert table.hit_tokens == 192
    kv = model.new_kv(capacity_tokens=192)
    model.forward([Segment(kv=kv, tokens=prompt[:192], num_logits=0)])
    for group, spec in enumerate(node.cache.layout.groups):
        if not isinstance(spec, StateSpec):
            continue
        pages = table.pages(group, 2)
        assert pages is not None
        for index, layer in enumerate(spec.layers):
            first = index * spec.slices_per_layer
            own = pages[first : first + spec.slices_per_layer]
            data = b"".join(bytes(table.view(page)[: spec.page_bytes]) for page in own)
            expected = bytearray(spec.state_bytes)
            kv.state_of(layer).write_to(192, memoryview(expected), 0)
            assert data[: spec.state_bytes] == expected
    table.release()


def test_a_prompt_that_ends_keeps_two_states_at_most(bamba):
    """A long decode leaves no states behind, preempted or not."""
    node = Node(bamba)
    node.submit("r", prompt_of(500), replace(GREEDY, max_tokens=200))
    (spec,) = (s for s in node.cache.layout.groups if isinstance(s, StateSpec))
    group = node.cache.layout.groups.index(spec)
    while node.runner.has_work:
        node.step()
        with node.cache.pool.lock:
            kept = [e for e in node.cache.pool.entries() if e.key and e.key[0] == group]
        is_over = node.results["r"].ended is not None
        assert len(kept) <= 1 + is_over  # at the prompt's end, and at the answer's
    node.assert_idle()


# ---------------------------------------------------------------- preemption, forks, failover


@pytest.mark.slow
@pytest.mark.parametrize("has_pages", [True, False], ids=["pages", "few-pages"])
def test_a_preempted_answer_goes_on_with_the_same_bits(model, has_pages):
    """From its state in private pages, or computed again with what was drawn taken one by one."""
    sampling = replace(SEEDED, max_tokens=70)
    prompts = [prompt_of(length, seed=length) for length in (150, 190)]
    layout = model.layout(STATE_BLOCK)
    # Two blocks and a state for each prompt; then less than as much again for the preempted one.
    few_pages = sum(
        spec.pages_per_block * (3 if isinstance(spec, StateSpec) else 6) for spec in layout.groups
    )
    node = Node(
        model,
        kv_ram_bytes=model.kv_capacity_bytes(259) + model.kv_capacity_bytes(219) - 1,
        ram_bytes=layout.page_bytes * (2000 if has_pages else few_pages - 1),
    )
    for index, prompt in enumerate(prompts):
        node.submit(f"r{index}", prompt, sampling)
    lost_tokens = []
    while node.runner.has_work:
        before = node.runner.load()
        node.step()
        load = node.runner.load()
        if load.num_running < before.num_running and load.num_waiting > before.num_waiting:
            lost_tokens.append(load.num_waiting_tokens - load.num_running - load.num_waiting)
    assert lost_tokens
    assert not has_pages or max(lost_tokens) == 0
    node.assert_idle()
    for index, prompt in enumerate(prompts):
        events = node.results[f"r{index}"].choices[0].events
        assert told(events) == plain(model, prompt, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("max_batch", [4, 1], ids=["together", "one-by-one"])
@pytest.mark.parametrize("length", [64, 150])
def test_choices_fork_the_state_and_leave_each_other_alone(model, max_batch, length):
    prompt = prompt_of(length)
    node = Node(model, max_batch_sequences=max_batch)
    result = node.answer(prompt, SEEDED, num_choices=3)
    for choice in range(3):
        assert told(result.choices[choice].events) == plain(model, prompt, SEEDED, choice)


@pytest.mark.parametrize("num_sent", [1, 5, 70])
def test_tokens_that_were_sent_are_replayed_and_never_drawn_again(model, num_sent):
    prompt = prompt_of(100)
    sampling = replace(SEEDED, max_tokens=num_sent + 5)
    expected = plain(model, prompt, sampling)
    sent = tokens_of(expected)[:num_sent]
    result = Node(model).answer(prompt, sampling, forced=(sent,))
    assert told(result.choices[0].events) == expected[num_sent:]


# ---------------------------------------------------------------- transfers


@pytest.mark.slow
def test_a_shipped_prompt_decodes_at_once_with_the_bits_of_a_local_one(model):
    """At exactly the prompt's end: its last token is in the state, and is not computed again."""
    for length in LENGTHS:
        prompt = prompt_of(length, seed=length)
        first, _, receiver, table = prefill_and_ship(model, prompt, SEEDED)
        expected = plain(model, prompt, SEEDED)
        assert told(first.choices[0].events) == expected[:1]
        forced = (tokens_of(expected)[:1],)
        result = receiver.answer(prompt, SEEDED, table=table, forced=forced)
        assert told(result.choices[0].events) == expected[1:]
        assert result.num_computed == 0


@pytest.mark.slow
def test_shipped_pages_without_a_first_token_cost_what_follows_the_boundary(model):
    for length in LENGTHS:
        prompt = prompt_of(length, seed=length)
        _, _, receiver, table = prefill_and_ship(model, prompt, SEEDED)
        result = receiver.answer(prompt, SEEDED, table=table)
        assert told(result.choices[0].events) == plain(model, prompt, SEEDED)
        assert result.num_computed == length - replay_boundary(length, STATE_BLOCK)


@pytest.mark.slow
def test_a_receiver_keeps_what_it_was_sent_for_the_next_prompt(model):
    for length in (64, 65, 200):
        prompt = prompt_of(length, seed=length)
        first, _, receiver, table = prefill_and_ship(model, prompt, GREEDY)
        receiver.answer(prompt, GREEDY, table=table, forced=(tuple(first.tokens()),))
        result = receiver.answer(prompt, GREEDY)
        assert told(result.choices[0].events) == plain(model, prompt)
        assert result.num_computed == length - replay_boundary(length, STATE_BLOCK)


@pytest.mark.slow
def test_a_sink_gets_every_page_once_and_a_state_with_its_layers_last_chunk(model):
    for length, chunk_tokens in itertools.product((1, 64, 65, 200), (64, 576)):
        prompt = prompt_of(length)
        _, sink, receiver, table = prefill_and_ship(
            model, prompt, GREEDY, chunk_tokens=chunk_tokens
        )
        table.release()
        layout = receiver.cache.layout
        needed = {
            (group, index, block)
            for group, spec in enumerate(layout.groups)
            for index in range(spec.pages_per_block)
            for block in needed_blocks(spec, length, STATE_BLOCK)
        }
        assert set(sink.pages) == needed
        num_bytes = sum(len(data) for _, data in sink.pages.values())
        assert num_bytes == layout.bytes_needed(length)
        layers = [
            spec.layers[index // (spec.pages_per_block // len(spec.layers))]
            for spec, index in ((layout.groups[g], i) for g, i, _ in sink.pages)
        ]
        num_falls = sum(b < a for a, b in itertools.pairwise(layers))
        assert num_falls < len(sink.progressed)  # within a forward the layers only rise


def test_a_sink_with_a_hit_gets_the_states_that_the_hit_lacks(bamba):
    node = Node(bamba)
    prompt = prompt_of(200)
    node.answer(prompt, GREEDY)
    table = node.lookup(prompt)
    assert table.hit_tokens == 192
    assert table.try_reserve(200)
    sink = Recorder(node.cache, table)
    node.answer(prompt, GREEDY, table=table, sink=sink, prefill_only=True)
    assert {block for _, _, block in sink.pages} == {3}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_hit_forked_shipped_and_replayed_exactly(family):
    model = tiny_hybrid(family)
    prompt = prompt_of(128)
    expected = [plain(model, prompt, SEEDED, choice) for choice in range(2)]
    node = Node(model)
    for _ in range(2):
        result = node.answer(prompt, SEEDED, num_choices=2)
        assert [told(result.choices[choice].events) for choice in range(2)] == expected
    first, _, receiver, table = prefill_and_ship(model, prompt, SEEDED)
    forced = (tuple(first.tokens()),)
    result = receiver.answer(prompt, SEEDED, table=table, forced=forced)
    assert told(first.choices[0].events) + told(result.choices[0].events) == expected[0]
    sent = tokens_of(expected[0])[:4]
    result = Node(model).answer(prompt, SEEDED, forced=(sent,))
    assert told(result.choices[0].events) == expected[0][4:]


def test_a_preempted_prefill_ships_the_same_pages(bamba):
    prompt = prompt_of(400)
    _, expected, _, landed = prefill_and_ship(bamba, prompt, GREEDY)
    landed.release()
    # An older answer outgrows its room while the prefill is half-way.
    budget = bamba.kv_capacity_bytes(464) + bamba.kv_capacity_bytes(94)
    node = Node(bamba, kv_ram_bytes=budget)
    old = prompt_of(30, seed=1)
    node.submit("old", old, replace(GREEDY, max_tokens=120))
    for _ in range(60):
        node.step()
    table = node.lookup(prompt)
    assert table.try_reserve(len(prompt))
    sink = Recorder(node.cache, table, may_repeat=True)
    node.submit("r", prompt, GREEDY, table=table, sink=sink, prefill_only=True)
    was_preempted = False
    while node.results["r"].ended is None:
        node.step()
        was_preempted |= node.runner.load().num_waiting > 0 and len(sink.progressed) > 0
    assert was_preempted
    assert sink.pages == expected.pages
    results = node.run()
    assert told(results["r"].choices[0].events) == plain(bamba, prompt)[:1]
    expected_old = plain(bamba, old, replace(GREEDY, max_tokens=120))
    assert told(results["old"].choices[0].events) == expected_old


# ---------------------------------------------------------------- sizes


def test_a_working_copy_is_as_large_as_accounted(model):
    for num_tokens in (1, 64, 300):
        kv = model.new_kv(capacity_tokens=num_tokens)
        assert kv.nbytes == model.kv_capacity_bytes(num_tokens)
        states = sum(state.nbytes for state in kv.states if state is not None)
        assert model.kv_capacity_bytes(num_tokens) >= 2 * states > 0


@pytest.mark.parametrize("block_tokens", [16, 24])
def test_blocks_of_any_size_change_no_answer(bamba, block_tokens):
    node, prompt = Node(bamba, block_tokens=block_tokens, chunk_tokens=48), prompt_of(100)
    for hit_tokens in (0, replay_boundary(100, block_tokens)):
        result = node.answer(prompt, GREEDY)
        assert result.num_computed == 100 - hit_tokens
        assert told(result.choices[0].events) == plain(bamba, prompt)


def test_the_layout_names_how_bytes_lie(bamba):
    assert bamba.layout(STATE_BLOCK).layout_version.split()[1:] == [
        "kv-htd",
        "conv-xbc-tc,state-hnp",
    ]
