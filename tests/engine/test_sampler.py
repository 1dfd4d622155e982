"""The sampler against plain Python, statistics and its own promises of purity."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from prfaas.engine.sampler import MIN_LOGPROB, Sampler, TokenHistory, noise_key
from prfaas.engine.splitmix import mix64
from prfaas.errors import EngineError
from prfaas.types import SamplingParams

WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15
BIG_VOCAB = 262_144


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, "seed": 7, **changes})


def draw_id(
    logits: Sequence[float] | NDArray[np.float32],
    sampling: SamplingParams,
    *,
    choice_index: int = 0,
    position: int = 5,
    history: TokenHistory | None = None,
    sampler: Sampler | None = None,
) -> int:
    row = np.asarray(logits, dtype=np.float32)
    sampler = sampler or Sampler(len(row))
    draw = sampler.draw(
        row, sampling, choice_index=choice_index, position=position, history=history
    )
    return draw.token_id


def f32(value: float) -> float:
    return float(np.float32(value))


# ---------------------------------------------------------------- the obvious sampler


def plain_noise(seed: int, choice_index: int, position: int, token_id: int) -> float:
    key = 0
    for word in (seed, choice_index, position):
        key = mix64(((key + GOLDEN) % WORD) ^ word)
    word = mix64((key + (token_id + 1) * GOLDEN) % WORD)
    return -math.log(-math.log(((word >> 12) + 0.5) / 2**52))


def plain_adjusted(logits, p, prompt, completion) -> dict[int, float]:
    z = {i: f32(x) for i, x in enumerate(logits)}
    counts = Counter(completion)
    for i in set(prompt) | set(completion):
        z[i] = f32(z[i] / p.repetition_penalty if z[i] > 0 else z[i] * p.repetition_penalty)
    for i, count in counts.items():
        z[i] = f32(z[i] - (count * p.frequency_penalty + p.presence_penalty))
    for i, bias in p.logit_bias:
        z[i] = f32(z[i] + f32(bias))
    return z


def plain_draw(logits, p, *, choice_index, position, prompt, completion) -> int:
    z = plain_adjusted(logits, p, prompt, completion)
    by_size = sorted(z, key=lambda i: (-z[i], i))
    peak = z[by_size[0]]
    if p.temperature == 0:
        return by_size[0]
    kept = list(by_size)
    if p.min_p > 0:
        floor = peak + p.temperature * math.log(p.min_p)
        kept = [i for i in kept if z[i] >= floor]
    if p.top_k is not None:
        kept = kept[: p.top_k]
    if p.top_p < 1:
        weights = [math.exp((z[i] - peak) / p.temperature) for i in kept]
        target, mass, nucleus = p.top_p * math.fsum(weights), 0.0, []
        for i, weight in zip(kept, weights, strict=True):
            nucleus.append(i)
            mass += weight
            assume(abs(mass - target) > 1e-6 * mass)  # an edge that rounding decides
            if mass > target:
                break
        kept = nucleus
    scores = {
        i: (z[i] - peak) / p.temperature + plain_noise(p.seed, choice_index, position, i)
        for i in kept
    }
    return max(kept, key=lambda i: (scores[i], -i))


SIZE = 12
finite = st.floats(-30, 30, width=32)
ids = st.integers(0, SIZE - 1)


@given(
    logits=st.lists(finite | st.sampled_from([0.0, 1.0]), min_size=SIZE, max_size=SIZE),
    seed=st.integers(0, WORD - 1),
    choice_index=st.integers(0, 127),
    position=st.integers(0, 1 << 40),
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]) | st.floats(0, 1),
    top_k=st.none() | st.integers(1, SIZE + 2),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    repetition=st.sampled_from([1.0, 1.3, 0.5]),
    presence=st.sampled_from([0.0, 1.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.5, -0.25]),
    bias=st.lists(st.tuples(ids, st.floats(-100, 100)), max_size=3),
    prompt=st.lists(ids, max_size=6),
    completion=st.lists(ids, max_size=8),
)
@pytest.mark.slow
def test_every_draw_is_the_one_of_the_plain_sampler(
    logits, seed, choice_index, position, temperature, top_p, top_k, min_p,
    repetition, presence, frequency, bias, prompt, completion,
):  # fmt: skip
    sampling = params(
        seed=seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency,
        logit_bias=tuple(bias),
    )  # fmt: skip
    history = TokenHistory(prompt)
    for token in completion:
        history.append(token)
    place = {"choice_index": choice_index, "position": position}
    expected = plain_draw(logits, sampling, **place, prompt=prompt, completion=completion)
    assert draw_id(logits, sampling, **place, history=history) == expected


# ---------------------------------------------------------------- noise


def test_the_hash_is_splitmix64():
    # The first outputs of the reference C code (Vigna) for the seed 1234567.
    outputs = [mix64((1234567 + step * GOLDEN) % WORD) for step in range(1, 6)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def unmix64(word: int) -> int:
    """The inverse of mix64."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, None)):
        value = word
        for _ in range(64 // shift + 1):
            value = word ^ (value >> shift)
        word = value if factor is None else value * pow(factor, -1, WORD) % WORD
    return word


@given(word=st.integers(0, WORD - 1))
def test_the_hash_loses_nothing(word):
    assert unmix64(mix64(word)) == word


@pytest.mark.parametrize("word", [0, 1, (1 << 12) - 1, 1 << 63, WORD - 1, WORD - (1 << 12)])
def test_the_noise_of_the_most_extreme_words_is_finite(word):
    sampler = Sampler(3)
    key = (unmix64(word) - 2 * GOLDEN) % WORD  # token 1 hashes to exactly this word
    noise = float(sampler.gumbel(key, np.array([1]))[0])
    assert -3.7 < noise < 36.8
    assert noise == pytest.approx(-math.log(-math.log(((word >> 12) + 0.5) / 2**52)), rel=1e-12)


def test_seed_choice_and_position_each_change_the_noise():
    places = [(s, c, p) for s in (0, 1, WORD - 1) for c in (0, 1, 2) for p in (0, 1, 2**40)]
    assert len({noise_key(*place) for place in places}) == len(places)


def chi_square(counts: list[int], expected: list[float]) -> float:
    return sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True))


@pytest.mark.slow
def test_draws_follow_the_softmax_over_seeds_positions_and_choices():
    logits = np.linspace(-1.5, 1.5, 16).astype(np.float32)
    weights = [math.exp(float(x) / 0.8) for x in logits]
    expected = [w / math.fsum(weights) for w in weights]
    sampler = Sampler(16)
    for axis in ("seed", "position", "choice"):
        counts = [0] * 16
        for i in range(4000):
            sampling = params(seed=i if axis == "seed" else 3, temperature=0.8)
            token = draw_id(
                logits,
                sampling,
                position=i if axis == "position" else 9,
                choice_index=i if axis == "choice" else 0,
                sampler=sampler,
            )
            counts[token] += 1
        # 15 degrees of freedom: 37.7 is exceeded with probability 0.001; the draws are fixed.
        assert chi_square(counts, [4000 * e for e in expected]) < 37.7


def test_neighbouring_positions_are_independent():
    logits = [0.0, 0.5, 1.0, -0.5]
    weights = [math.exp(x) for x in logits]
    share = [w / math.fsum(weights) for w in weights]
    sampler = Sampler(4)
    tokens = [draw_id(logits, params(temperature=1.0), position=i, sampler=sampler)
              for i in range(6001)]  # fmt: skip
    pairs = Counter(itertools.pairwise(tokens))
    cells = [(a, b) for a in range(4) for b in range(4)]
    statistic = chi_square(
        [pairs[c] for c in cells], [6000 * share[a] * share[b] for a, b in cells]
    )
    assert statistic < 37.7  # 15 degrees of freedom, p = 0.001


# ---------------------------------------------------------------- a large vocabulary


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 12.0])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_the_shortcut_for_a_large_vocabulary_never_misses_the_winner(scale, temperature):
    rng = np.random.default_rng(5)
    sampler = Sampler(BIG_VOCAB)
    row = (rng.standard_normal(BIG_VOCAB) * scale).astype(np.float32)
    for position in range(6):
        key = noise_key(7, 0, position)
        scores = (row.astype(np.float64) - float(row.max())) / temperature
        scores += sampler.gumbel(key, np.arange(BIG_VOCAB))
        token = draw_id(row, params(temperature=temperature), position=position, sampler=sampler)
        assert token == scores.argmax()


@pytest.mark.parametrize("vocab_size", [2048, 2049, 3000, 4095, 4096, 9001])
@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_the_shortcut_serves_vocabularies_of_any_size(vocab_size, scale):
    row = (np.random.default_rng(1).standard_normal(vocab_size) * scale).astype(np.float32)
    sampler = Sampler(vocab_size)
    for position in range(6):
        noise = sampler.gumbel(noise_key(7, 0, position), np.arange(vocab_size))
        scores = row.astype(np.float64) - float(row.max()) + noise
        token = draw_id(row, params(temperature=1.0), position=position, sampler=sampler)
        assert token == scores.argmax()


@pytest.mark.slow
def test_far_tokens_win_their_share():
    """Half the mass lies in a quarter million tokens that are 12 nats below the one on top."""
    row = np.full(BIG_VOCAB, -math.log(BIG_VOCAB - 1), dtype=np.float32)
    row[1000] = 0.0
    sampler = Sampler(BIG_VOCAB)
    wins = [draw_id(row, params(temperature=1.0, seed=s), sampler=sampler) for s in range(80)]
    assert 25 < sum(token == 1000 for token in wins) < 55
    assert len(set(wins)) > 25


def test_top_p_on_a_large_vocabulary_keeps_the_nucleus():
    rng = np.random.default_rng(11)
    row = (rng.standard_normal(BIG_VOCAB) * 2.5).astype(np.float32)
    order = np.argsort(-row, kind="stable")
    weights = np.exp(row[order].astype(np.float64))
    size = int((weights.cumsum() < 0.4 * weights.sum()).sum()) + 1
    nucleus = set(order[:size].tolist())
    sampler = Sampler(BIG_VOCAB)
    drawn = {draw_id(row, params(temperature=1.0, top_p=0.4, seed=s), sampler=sampler)
             for s in range(60)}  # fmt: skip
    assert drawn <= nucleus
    assert len(drawn) > 40  # the nucleus has thousands


# ---------------------------------------------------------------- purity and edges


def test_a_draw_depends_on_its_arguments_alone():
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((4, 5000)).astype(np.float32) * 4
    sampling = params(temperature=1.0, top_p=0.95)
    alone = [draw_id(row, sampling, position=i) for i, row in enumerate(rows)]
    shared = Sampler(5000)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 3, 0, 1]):
        for i in order:
            assert draw_id(rows[i], sampling, position=i, sampler=shared) == alone[i]


def test_a_draw_leaves_the_logits_as_they_are():
    row = np.linspace(-3, 3, 50, dtype=np.float32)
    before = row.copy()
    history = TokenHistory([1, 2, 3])
    history.append(4)
    sampling = params(repetition_penalty=1.5, presence_penalty=1.0, logit_bias=((7, 5.0),))
    draw_id(row, sampling, history=history)
    assert np.array_equal(row, before)


def test_ties_go_to_the_smallest_id():
    assert draw_id([1.0, 5.0, 5.0, 5.0], params(temperature=0.0)) == 1
    assert draw_id([1.0, 5.0, 5.0, 5.0], params(top_k=1)) == 1
    assert draw_id([1.0, 5.0, 5.0, 5.0], params(top_p=0.0)) == 1


@given(logits=st.lists(finite, min_size=2, max_size=9), seed=st.integers(0, WORD - 1))
def test_top_k_1_is_greedy(logits, seed):
    greedy = draw_id(logits, params(temperature=0.0))
    assert draw_id(logits, params(top_k=1, seed=seed)) == greedy


@pytest.mark.parametrize("temperature", [1e-9, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature):
    row = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    assert draw_id(row, params(temperature=temperature)) == row.argmax()


def test_a_bias_of_minus_100_bans_and_of_100_forces():
    logits = [3.0, 2.0, 1.0, 0.0]
    for seed in range(50):
        assert draw_id(logits, params(seed=seed, logit_bias=((0, -100.0),))) != 0
        assert draw_id(logits, params(seed=seed, logit_bias=((3, 100.0),))) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(bad):
    with pytest.raises(EngineError, match="finite"):
        draw_id([0.0, bad, 1.0], params())


# ---------------------------------------------------------------- logprobs


@given(logits=st.lists(finite, min_size=3, max_size=20), num_top=st.integers(0, 25))
def test_logprobs_are_those_of_the_raw_softmax(logits, num_top):
    row = np.asarray(logits, dtype=np.float32)
    exact = [float(x) for x in row]
    log_total = max(exact) + math.log(math.fsum(math.exp(x - max(exact)) for x in exact))
    order = sorted(range(len(exact)), key=lambda i: (-exact[i], i))[:num_top]
    logprobs = Sampler(len(row)).logprobs(row, 2, num_top)
    assert logprobs.logprob == pytest.approx(exact[2] - log_total, abs=1e-6)
    assert [token for token, _ in logprobs.top] == order
    for token, logprob in logprobs.top:
        assert logprob == pytest.approx(exact[token] - log_total, abs=1e-6)


def test_the_logprob_of_the_impossible_is_finite():
    row = np.array([0.0, -math.inf, -1e30], dtype=np.float32)
    logprobs = Sampler(3).logprobs(row, 1, 3)
    assert logprobs.logprob == MIN_LOGPROB
    assert [logprob for _, logprob in logprobs.top] == [0.0, MIN_LOGPROB, MIN_LOGPROB]


def test_logprobs_ignore_temperature_penalties_and_bias():
    row = np.array([0.0, 1.0, 2.0], dtype=np.float32)
    sampling = params(num_logprobs=2, temperature=0.3, logit_bias=((0, 100.0),))
    draw = Sampler(3).draw(row, sampling, choice_index=0, position=0, history=None)
    assert draw.token_id == 0
    assert draw.logprobs == Sampler(3).logprobs(row, 0, 2)


def test_no_logprobs_unless_asked_for():
    row = np.array([0.0, 1.0], dtype=np.float32)
    assert Sampler(2).draw(row, params(), choice_index=0, position=0, history=None).logprobs is None


# ---------------------------------------------------------------- unlike libraries


def slightly_wrong(function: Callable[..., Any], by: float) -> Callable[..., Any]:
    """What another library's function may give: right to `by`, another way for each number."""

    def wrong(x: NDArray[Any], *args: Any, **more: Any) -> Any:
        right = function(x, *args, **more)
        bits = np.asarray(x, np.float64).view(np.uint64) * np.uint64(GOLDEN) >> np.uint64(62)
        error = by if right.dtype == np.float64 else 1e-6
        wrong = (right * (1.0 + error * (bits.astype(np.float64) - 1.0))).astype(right.dtype)
        if "out" in more:
            np.copyto(more["out"], wrong)
        return wrong

    return wrong


def test_scores_that_only_a_librarys_rounding_parts_are_drawn_alike(monkeypatch):
    sampler, row, ties = Sampler(2), np.array([0.0, -1.0], np.float32), []
    for seed in range(100):
        first, second = sampler.gumbel(noise_key(seed, 0, 0), np.arange(2))
        if second > first + 0.5:  # at this temperature the scores are equal but for rounding
            ties.append(params(temperature=1.0 / (second - first), seed=seed))
    wanted = [draw_id(row, tie, position=0) for tie in ties]
    monkeypatch.setattr(np, "log", slightly_wrong(np.log, 1e-13))
    assert [draw_id(row, tie, position=0) for tie in ties] == wanted
    assert len(ties) > 20


def test_a_nucleus_that_ends_within_a_librarys_rounding_is_cut_alike(monkeypatch):
    row = [1.0] * 8  # the first 4 have a half, in exact arithmetic
    sampling = [params(temperature=1.0, top_p=0.5, seed=seed) for seed in range(200)]
    wanted = [draw_id(row, some) for some in sampling]
    assert set(wanted) == {0, 1, 2, 3}
    monkeypatch.setattr(np, "exp", slightly_wrong(np.exp, 1e-13))
    assert [draw_id(row, some) for some in sampling] == wanted


def test_draws_of_many_kinds_are_the_same_whichever_way_last_digits_fall(monkeypatch):
    rows = [
        np.linspace(0.0, 1e-7, BIG_VOCAB).astype(np.float32),
        np.random.default_rng(5).standard_normal(BIG_VOCAB).astype(np.float32),
    ]
    kinds = [{}, {"top_p": 0.4}, {"top_p": 0.95, "top_k": 3000}, {"min_p": 0.2}]

    def drawn() -> list[int]:
        return [
            draw_id(row, params(temperature=1.0, seed=seed, **kind))
            for row, kind, seed in itertools.product(rows, kinds, range(3))
        ]

    wanted = drawn()
    monkeypatch.setattr(np, "log", slightly_wrong(np.log, 1e-13))
    monkeypatch.setattr(np, "exp", slightly_wrong(np.exp, 1e-13))
    assert drawn() == wanted
