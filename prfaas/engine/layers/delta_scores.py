"""How the tokens of a chunk see each other under the delta rule.

Every exponential here is of a sum of decays g <= 0, so that none overflows however strong a decay
is; and such a sum is never a difference of two large ones.

Shapes: N chunks, H heads, h key heads (each serves H / h heads), C = CHUNK_TOKENS, K key dim,
G decays of a head: 1, or K.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Products of the tokens of chunks, each decayed by the tokens between."""

    keys: Tensor
    """[N, H, C, C]: k_i . k_j for j < i, else 0."""
    queries: Tensor
    """[N, H, C, C]: q_i . k_j for j <= i, else 0."""
    from_start: Tensor
    """[N, H, C, G]: exp of the sum of g up to and with token i."""
    to_end: Tensor
    """[N, H, C, G]: exp of the sum of g after token i."""


def head_scores(q_NhCK: Tensor, k_NhCK: Tensor, g_NHC1: Tensor) -> Scores:
    """Return the scores where a head has one decay."""
    num_chunks, length = len(k_NhCK), k_NhCK.shape[2]
    # In float64 a difference of two sums is as good as a sum of its own.
    sum_NHC1 = g_NHC1.double().cumsum(2)
    between_NHCC = (sum_NHC1 - sum_NHC1.transpose(2, 3)).float()
    # Later tokens would overflow; what they get does not matter, tril_ clears it.
    decay_NHCC = between_NHCC.clamp_(max=0.0).exp_()
    by_key_head = decay_NHCC.view(num_chunks, k_NhCK.shape[1], -1, length, length)
    k_NhKC = k_NhCK.transpose(2, 3)
    keys = by_key_head * torch.matmul(k_NhCK, k_NhKC).unsqueeze(2)
    queries = by_key_head.mul_(torch.matmul(q_NhCK, k_NhKC).unsqueeze(2))
    return Scores(
        keys=keys.view_as(decay_NHCC).tril_(-1),
        queries=queries.view_as(decay_NHCC).tril_(),
        from_start=sum_NHC1.float().exp_(),
        to_end=(sum_NHC1[:, :, -1:] - sum_NHC1).float().exp_(),
    )


def channel_scores(q_NHCK: Tensor, k_NHCK: Tensor, g_NHCK: Tensor) -> Scores:
    """Return the scores where every key channel has its own decay.

    Chunks are put together from halves, from single tokens up. A token of a second half sees one of
    the first through the decays up to it in its half and those after the other in that one's half:
    two factors, so that the scores between halves are one product of matrices.
    """
    num_chunks, num_heads, length, dim = k_NHCK.shape
    both_2NHCC = k_NHCK.new_zeros(2, num_chunks, num_heads, length, length)
    both_2NHCC[1].diagonal(dim1=2, dim2=3).copy_((q_NHCK * k_NHCK).sum(3))
    up_to_NHCK = g_NHCK.clone()  # sums within the half, the token's own with them
    after_NHCK = torch.zeros_like(g_NHCK)
    half = 1
    while half < length:
        halves = (num_chunks, num_heads, -1, 2, half, dim)
        k, q = k_NHCK.view(halves), q_NHCK.view(halves)
        up_to, after = up_to_NHCK.view(halves), after_NHCK.view(halves)
        decay = up_to[:, :, :, 1].exp()
        left = torch.empty_like(k)
        torch.mul(k[:, :, :, 1], decay, out=left[:, :, :, 0])
        torch.mul(q[:, :, :, 1], decay, out=left[:, :, :, 1])
        right = after[:, :, :, 0].exp().mul_(k[:, :, :, 0])
        scores = torch.matmul(left.flatten(3, 4), right.transpose(3, 4))
        scores = scores.view(num_chunks * num_heads, -1, 2, half, half)
        between = _between_halves(both_2NHCC, half).view(2, -1, length // (2 * half), half, half)
        between.copy_(scores.permute(2, 0, 1, 3, 4))
        after[:, :, :, 0] += up_to[:, :, :, 1, -1:]
        up_to[:, :, :, 1] += up_to[:, :, :, 0, -1:]
        half *= 2
    return Scores(
        keys=both_2NHCC[0],
        queries=both_2NHCC[1],
        from_start=up_to_NHCK.exp_(),
        to_end=after_NHCK.exp_(),
    )


def inverse_unit_lower(below_NHCC: Tensor) -> Tensor:
    """Return (I + below)^-1 of strictly lower triangular matrices; C is a power of 2.

    Put together from the inverses of halves: row i of the result depends on rows up to i alone, and
    nothing is squared, which for like keys would overflow (models of equal keys have powers that
    grow as binomials).
    """
    length = below_NHCC.shape[-1]
    inverse = below_NHCC.new_ones(below_NHCC.numel() // length, 1, 1)
    half = 1
    while half < length:
        first, second = inverse.view(-1, 2, half, half).unbind(1)
        between = _between_halves(below_NHCC, half).reshape(-1, half, half)
        inverse = below_NHCC.new_zeros(len(first), 2 * half, 2 * half)
        inverse[:, :half, :half] = first
        inverse[:, half:, half:] = second
        torch.neg(torch.bmm(torch.bmm(second, between), first), out=inverse[:, half:, :half])
        half *= 2
    return inverse.view_as(below_NHCC)


def _between_halves(matrices: Tensor, half: int) -> Tensor:
    """Return a view [..., C / (2 half), half, half]: where a second half meets its first one."""
    length = matrices.shape[-1]
    blocks = matrices.view(-1, length // (2 * half), 2, half, length // (2 * half), 2, half)
    return blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)
