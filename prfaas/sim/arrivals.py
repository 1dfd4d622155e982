"""Requests to simulate: at random from a workload, or as a trace has them."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random

from prfaas.config.traces import TraceRequest
from prfaas.scheduler.profile import Workload


def poisson_arrivals(
    workload: Workload, *, rate_rps: float, random: Random
) -> Iterator[TraceRequest]:
    """Yield requests for ever: exponential gaps, lengths of the workload, answers of its mean.

    Nothing is drawn but by `random`, three numbers a request: the same seed gives the same requests.

    Raises:
        ValueError: a rate that is not above 0.
    """
    if not rate_rps > 0:
        raise ValueError(f"an arrival rate of {rate_rps} req/s")
    tokens, sums = workload.lengths.tokens, list(accumulate(workload.lengths.shares))
    now_s = 0.0
    whole, part = divmod(workload.mean_output_tokens, 1)
    while True:
        now_s += random.expovariate(rate_rps)
        index = min(bisect_left(sums, random.uniform(0, 1)), len(tokens) - 1)
        output_tokens = int(whole) + (random.uniform(0, 1) < part)
        yield TraceRequest(now_s, max(1, round(tokens[index])), output_tokens)


def scaled(requests: Sequence[TraceRequest], *, rate_factor: float) -> Iterator[TraceRequest]:
    """Yield a trace's requests `rate_factor` times as fast.

    Raises:
        ValueError: a factor that is not above 0.
    """
    if not rate_factor > 0:
        raise ValueError(f"a rate factor of {rate_factor}")
    for request in requests:
        yield TraceRequest(
            request.arrival_s / rate_factor,
            request.input_tokens,
            request.output_tokens,
            request.block_ids,
        )
