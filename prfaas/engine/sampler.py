"""Draws tokens: a pure function of one row of logits, the request's parameters and its place.

Random draws are Gumbel-max. The noise is a counter-based hash of (seed, choice index, absolute
position, token id), so the same token comes out wherever the same logits are: on a peer, here, after
a failover, with any neighbours in the batch. Nothing here depends on the number of threads either.

A library's exp and log are as fast as they are not the same everywhere. So they only decide what is
clear by more than they can be wrong; what is not is decided by `portable`'s.

The order of the filters is vLLM's: penalties, bias, temperature, min_p, top_k, top_p.

V vocabulary entries, N of them that are still candidates.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prfaas.engine import portable
from prfaas.engine.splitmix import GOLDEN, MASK, mix64, mix_in_place
from prfaas.errors import EngineError
from prfaas.types import SamplingParams, TokenLogprobs

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

MIN_LOGPROB = -9999.0
"""Stands for the logprob of the impossible: JSON has no infinity."""

_NUM_SCORED_FIRST = 1024
"""Of the whole vocabulary; few of the others can then still win."""
_NUM_SAMPLED = 4096
_CLOSE_SCORE = 1e-9
"""Scores that are nearer to each other are compared once more; float64's log is right to 1e-14."""
_CLOSE_SHARE, _CLOSE_WIDE_SHARE = 1e-5, 1e-10
"""So shares of the probability: sums of float32's exp, of differences rounded to float32, are right to
4e-6, and those of float64's to 1e-11."""
_SUMMED_AT_ONCE = 1 << 13


def noise_key(seed: int, choice_index: int, position: int) -> int:
    """Return the 64-bit state from which the noise of every token id at one draw follows."""
    key = 0
    for word in (seed, choice_index, position):
        key = mix64((key + GOLDEN & MASK) ^ word)
    return key


class TokenHistory:
    """The prompt and the completion so far of one choice, as the penalties need them."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self._prompt_ids: Ids = np.unique(np.asarray(prompt_tokens, dtype=np.int64))
        self._counts: Counter[int] = Counter()

    def append(self, token_id: int) -> None:
        """Count one drawn token."""
        self._counts[token_id] += 1

    def penalize(self, logits_V: Float32s, params: SamplingParams) -> None:
        """Change the logits of tokens seen before, in place.

        Repetition looks at prompt and completion, and divides positive logits and multiplies
        others; presence and frequency look at the completion and subtract (OpenAI's meaning).
        """
        drawn: Ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        if params.repetition_penalty != 1.0:
            seen = np.concatenate((self._prompt_ids, drawn))  # twice the same id is harmless
            old = logits_V[seen].astype(np.float64)
            penalty = params.repetition_penalty
            logits_V[seen] = np.where(old > 0, old / penalty, old * penalty)
        if drawn.size and (params.presence_penalty or params.frequency_penalty):
            counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
            loss = counts * params.frequency_penalty + params.presence_penalty
            logits_V[drawn] = logits_V[drawn].astype(np.float64) - loss


def uses_history(params: SamplingParams) -> bool:
    """Return whether a draw with these parameters depends on the tokens before."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def takes_largest(params: SamplingParams) -> bool:
    """Return whether a draw is the id of the largest logit of the model's own, and nothing else."""
    return (
        params.temperature == 0.0
        and params.num_logprobs is None
        and not params.logit_bias
        and not uses_history(params)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A drawn token, with logprobs if they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None


class Sampler:
    """Draws from rows of one vocabulary; keeps the hash's per-token constants and scratch space.

    One thread at a time may use it; its results depend on the arguments alone. Arrays as long as
    the vocabulary are written into the scratch space: fresh memory costs more than the arithmetic.
    """

    def __init__(self, vocab_size: int) -> None:
        # SplitMix64 visits key + GOLDEN, key + 2 * GOLDEN, ...: token i takes the (i + 1)th output.
        self._steps_V: Words = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        self._floats_V: Float32s = np.empty(vocab_size, dtype=np.float32)

    def draw(
        self,
        logits_V: Float32s,
        params: SamplingParams,
        *,
        choice_index: int,
        position: int,
        history: TokenHistory | None,
    ) -> Draw:
        """Return the token of `choice_index` at absolute `position`, drawn after `history`.

        `history` may be None if the parameters do not use it. Raises EngineError for logits that
        are not numbers.
        """
        if not math.isfinite(logits_V.max()):
            raise EngineError("the model's logits are not finite")
        adjusted_V = _adjusted(logits_V, params, history)
        if params.temperature == 0.0:
            token_id = int(adjusted_V.argmax())  # the first of equals: ties by the smallest id
        else:
            key = noise_key(params.seed, choice_index, position)
            token_id = self._draw_random(adjusted_V, params, key)
        logprobs = None
        if params.num_logprobs is not None:
            logprobs = self.logprobs(logits_V, token_id, params.num_logprobs)
        return Draw(token_id=token_id, logprobs=logprobs)

    def logprobs(self, logits_V: Float32s, token_id: int, num_top: int) -> TokenLogprobs:
        """Return natural-log probabilities of the model's own distribution, finite always."""
        peak = float(logits_V.max())
        log_total = math.log(self._mass(logits_V, peak, 1.0))

        def logprob(token: int) -> float:
            return max(MIN_LOGPROB, float(logits_V[token]) - peak - log_total)

        top = self._largest(logits_V, num_top) if num_top else ()
        return TokenLogprobs(
            logprob=logprob(token_id), top=tuple((int(t), logprob(int(t))) for t in top)
        )

    def gumbel(self, key: int, ids_N: Ids) -> Float64s:
        """Return standard Gumbel noise of the given token ids; finite, within -3.7 .. 36.8."""
        return -np.log(-np.log(self._uniform(key, ids_N)))

    def _uniform(self, key: int, ids_N: Ids) -> Float64s:
        words_N = self._steps_V[ids_N]
        words_N += np.uint64(key)
        mix_in_place(words_N, np.empty_like(words_N))
        # 52 bits and a half fill a float64 exactly; with one more bit the largest would round to 1.
        return ((words_N >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def _draw_random(self, logits_V: Float32s, params: SamplingParams, key: int) -> int:
        peak = float(logits_V.max())
        ids_N = self._kept_ids(logits_V, peak, params)
        if ids_N is None:
            ids_N = self._contenders(logits_V, peak, params.temperature, key)
        scores_N = _scaled(logits_V[ids_N], peak, params.temperature) + self.gumbel(key, ids_N)
        ids_N = _close_to_largest(ids_N, scores_N)
        if ids_N.size > 1:
            noise_N = -portable.log(-portable.log(self._uniform(key, ids_N)))
            scores_N = _scaled(logits_V[ids_N], peak, params.temperature) + noise_N
            ids_N = ids_N[scores_N.argmax() :]  # ids ascend, so ties go to the smallest
        return int(ids_N[0])

    def _contenders(self, logits_V: Float32s, peak: float, temperature: float, key: int) -> Ids:
        """Return ascending ids that include the winner of the whole vocabulary.

        The most likely tokens are scored first. Any other can beat the best of them only with noise
        above a bound that is one number for all, so their hashes alone decide.
        """
        if logits_V.size <= 2 * _NUM_SCORED_FIRST:
            return np.arange(logits_V.size)
        from prfaas.engine.native.noise import loud_ids  # imports torch, which a replay never needs

        edge = _edge(logits_V)
        first_N = np.flatnonzero(logits_V > edge)
        if not first_N.size:  # the sample saw the largest
            first_N = np.flatnonzero(logits_V == logits_V.max())[:_NUM_SCORED_FIRST]
        best_N = _scaled(logits_V[first_N], peak, temperature) + self.gumbel(key, first_N)
        others_at_most = _scaled(edge.reshape(1), peak, temperature)
        needed_noise = float(best_N.max() - others_at_most[0])
        # A hair below the bound, so that rounding cannot leave the winner out.
        needed_uniform = math.exp(-math.exp(-needed_noise)) * (1 - 1e-9)
        others_N = loud_ids(key, int(needed_uniform * 2.0**52) << 12, logits_V.size)
        return np.union1d(others_N, _close_to_largest(first_N, best_N))

    def _kept_ids(self, logits_V: Float32s, peak: float, params: SamplingParams) -> Ids | None:
        """Return the ascending ids that min_p, top_k and top_p leave; None is the vocabulary."""
        ids_N: Ids | None = None
        if params.min_p > 0.0:
            floor = peak + params.temperature * portable.log_of(params.min_p)
            ids_N = np.flatnonzero(logits_V >= np.float64(floor))
        if params.top_k is not None:
            num_left = logits_V.size if ids_N is None else ids_N.size
            if params.top_k < num_left:  # the largest of all are the largest of min_p's, too
                ids_N = np.sort(self._largest(logits_V, params.top_k))
        if params.top_p < 1.0:
            candidates_N = logits_V if ids_N is None else logits_V[ids_N]
            nucleus = self._nucleus(candidates_N, peak, params.temperature, params.top_p)
            ids_N = np.sort(nucleus if ids_N is None else ids_N[nucleus])
        return ids_N

    def _nucleus(self, logits_N: Float32s, peak: float, temperature: float, top_p: float) -> Ids:
        """Return the indices of the fewest most likely candidates whose mass reaches `top_p`.

        At least one is returned; ties go to the smallest index.
        """
        place = (logits_N, peak, temperature)
        ways = (
            (self._mass, np.exp, _CLOSE_SHARE),
            (partial(_wide_mass, np.exp), np.exp, _CLOSE_WIDE_SHARE),
            (partial(_wide_mass, portable.exp), portable.exp, 0.0),
        )
        ranked: _Ranked | None = None
        for mass_of, exponential, close in ways:
            mass = mass_of(*place)
            low, high = mass * (top_p - close), mass * (top_p + close)
            if ranked is None or ranked.exponential is not exponential or not ranked.reaches(high):
                ranked = _ranked(*place, exponential, high)
            first, last = np.searchsorted(ranked.sums, (low, high))
            if first == last:
                count = min(int(first) + 1, ranked.logits.size)
                return _of_largest(logits_N, count, ranked.logits[count - 1])
        raise AssertionError("the last way leaves nothing open")

    def _mass(self, logits_N: Float32s, peak: float, temperature: float) -> float:
        """Return the sum of exp((logit - peak) / temperature): terms in float32, sum in float64."""
        scratch_N = self._floats_V[: logits_N.size]
        np.subtract(logits_N, np.float32(peak), out=scratch_N)
        with np.errstate(over="ignore", under="ignore"):
            np.divide(scratch_N, np.float32(max(temperature, 1e-30)), out=scratch_N)
            np.exp(scratch_N, out=scratch_N)
        return float(scratch_N.sum(dtype=np.float64))

    def _largest(self, logits_V: Float32s, count: int) -> Ids:
        """Return the ids of the `count` largest logits, largest first, ties by the smallest id."""
        if count < logits_V.size:
            ids_N = np.flatnonzero(logits_V >= self._kth_largest(logits_V, count))
        else:
            ids_N = np.arange(logits_V.size)
        order = np.argsort(-logits_V[ids_N], kind="stable")
        return ids_N[order[:count]]

    def _kth_largest(self, logits_V: Float32s, k: int) -> np.float32:
        """Return the value that at least `k` logits reach and fewer than `k` exceed."""
        np.copyto(self._floats_V, logits_V)
        rank = logits_V.size - k
        self._floats_V.partition(rank)
        return np.float32(self._floats_V[rank])


def _close_to_largest(ids_N: Ids, scores_N: Float64s) -> Ids:
    """Return the ids whose scores may be the largest."""
    return ids_N[scores_N >= scores_N.max() - _CLOSE_SCORE]


def _wide_mass(
    exponential: Callable[[Float64s], Float64s],
    logits_N: Float32s,
    peak: float,
    temperature: float,
) -> float:
    """Return the sum of exp((logit - peak) / temperature) in float64, in ascending order."""
    mass = 0.0
    for start in range(0, logits_N.size, _SUMMED_AT_ONCE):
        part_N = _scaled(logits_N[start : start + _SUMMED_AT_ONCE], peak, temperature)
        mass += float(exponential(part_N).cumsum()[-1])
    return mass


class _Ranked(NamedTuple):
    """The logits of the most likely candidates.

    Attributes:
        logits: from the largest on.
        sums: running sums of their weights.
        exponential: that gave the weights.
        is_all: there are no others.
    """

    logits: Float32s
    sums: Float64s
    exponential: Callable[[Float64s], Float64s]
    is_all: bool

    def reaches(self, target: float) -> bool:
        """Return whether the sums pass the target, or nothing could add to them."""
        return self.is_all or bool(self.sums[-1] > target)


def _ranked(
    logits_N: Float32s,
    peak: float,
    temperature: float,
    exponential: Callable[[Float64s], Float64s],
    target: float,
) -> _Ranked:
    """Return as many of the most likely candidates as it takes to pass the target, or all.

    Only those near the peak get sorted, however deep that has to be: running sums over a sorted list
    do not depend on what follows.
    """
    depth_nats = 2.0
    while True:
        top = logits_N[logits_N >= np.float64(peak - depth_nats * temperature)]
        top.sort()
        top = top[::-1]
        sums = exponential(_scaled(top, peak, temperature)).cumsum()
        ranked = _Ranked(top, sums, exponential, is_all=top.size == logits_N.size)
        if ranked.reaches(target):
            return ranked
        depth_nats *= 1.5


def _of_largest(logits_N: Float32s, count: int, smallest: np.float32) -> Ids:
    """Return the indices of the `count` largest, the last of which is `smallest`, ties by the smallest index."""
    above = np.flatnonzero(logits_N > smallest)
    return np.concatenate((above, np.flatnonzero(logits_N == smallest)[: count - above.size]))


def _edge(logits_V: Float32s) -> np.float32:
    """Return a logit that about _NUM_SCORED_FIRST of the vocabulary exceed, as a sample tells."""
    sample = logits_V[:: max(1, logits_V.size // _NUM_SAMPLED)]
    rank = sample.size - 1 - sample.size * _NUM_SCORED_FIRST // logits_V.size
    return np.float32(np.partition(sample, rank)[rank])


def _adjusted(logits_V: Float32s, params: SamplingParams, history: TokenHistory | None) -> Float32s:
    """Return the logits after penalties and bias; a copy if there are any."""
    has_history = history is not None and uses_history(params)
    if not (has_history or params.logit_bias):
        return logits_V
    adjusted_V = logits_V.copy()
    if history is not None and has_history:
        history.penalize(adjusted_V, params)
    for token_id, bias in params.logit_bias:
        adjusted_V[token_id] += bias
    return adjusted_V


def _scaled(logits_N: Float32s, peak: float, temperature: float) -> Float64s:
    """Return (logits - peak) / temperature in float64; the peak becomes 0."""
    with np.errstate(over="ignore"):  # a tiny temperature: -inf is right
        return (logits_N.astype(np.float64) - peak) / temperature
