"""Softmax attention whose rows do not depend on how a sequence was cut.

A query's result is the same bits in a whole prefill, in any chunk, as a single decode step, beside
any neighbours and on imported keys. Three rules make it so:

- keys lie on an absolute grid of KEY_BLOCK tokens. A query visits whole blocks; keys that it must
  not see get a score of -inf, hence a weight of exactly zero, so one block more changes nothing;
- the softmax is taken over whole grid blocks with the row's own maximum. torch sums a contiguous
  row in lanes of fixed stride, to which leading and trailing zeros in multiples of the block add
  nothing;
- weights meet values block by block, each a product of one fixed inner size, and the products are
  added in ascending order. One product over all keys would be cut by the library at places that
  depend on the number of keys.

Every product has at least 4 rows: below that the library takes another kernel.

A sink is a score without a value: it takes its share of a row's softmax and adds nothing. The share
left to the keys is found from the largest score and the largest weight, which no order of blocks
changes, and multiplies the row's result.

Shapes: T query tokens, G query heads of one KV head, H KV heads, R = T * G rows, C keys, K key dim,
V value dim, S sequences, N key blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

KEY_BLOCK = 128
TILE_TOKENS = 64
"""Query tokens computed at once: the scores of a tile against 8,192 keys are 8 MiB with 4 heads."""
TILE_ROWS = 1024
"""With many heads a tile has fewer tokens: its scores against 8,192 keys are at most 32 MiB."""
TILE_ROW_MULTIPLE = 8
STEP_ROW_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class KeySpan:
    """The keys and values of one sequence in one layer, from `first_key` on.

    `first_key` is a multiple of KEY_BLOCK, and the buffers reach to the end of the last query's block.
    What lies past a query is masked, but must be finite.
    """

    keys: Tensor
    """[H, C, K]"""
    values: Tensor
    """[H, C, V]; may be columns of the keys."""
    first_key: int

    def blocks(self, first_query: int, end: int, window_tokens: int | None) -> "KeySpan":
        """Return the blocks that queries first_query, ..., end - 1 look at; views."""
        low = 0 if window_tokens is None else max(0, first_query - window_tokens + 1)
        low = low // KEY_BLOCK * KEY_BLOCK
        length = -(-end // KEY_BLOCK) * KEY_BLOCK - low
        return KeySpan(
            self.keys.narrow(1, low - self.first_key, length),
            self.values.narrow(1, low - self.first_key, length),
            low,
        )


def attend(
    q_THGK: Tensor,
    span: KeySpan,
    *,
    first_position: int,
    scale: float,
    window_tokens: int | None,
    out_THGV: Tensor,
    sinks_HG: Tensor | None = None,
) -> None:
    """Write softmax(scale * q k) v of consecutive query positions to `out_THGV`.

    Args:
        q_THGK: queries of positions first_position + 0, 1, ...
        span: keys and values.
        first_position: position of the first query.
        scale: multiplies q.k.
        window_tokens: how many keys a query sees, itself included; None: all before it.
        out_THGV: where the results go.
        sinks_HG: scores that join the softmax without a value.
    """
    num_heads, num_groups = q_THGK.shape[1:3]
    tile_tokens = min(TILE_TOKENS, max(TILE_ROW_MULTIPLE, TILE_ROWS // (num_heads * num_groups)))
    for start in range(0, len(q_THGK), tile_tokens):
        tile = slice(start, start + tile_tokens)
        q = q_THGK[tile]
        position = first_position + start
        seen = span.blocks(position, position + len(q), window_tokens)
        out_HRV = _attend_tile(q, seen, position - seen.first_key, scale, window_tokens, sinks_HG)
        out_HTGV = out_HRV.view(num_heads, len(q), num_groups, -1)
        out_THGV[tile] = out_HTGV.transpose(0, 1)


def _attend_tile(
    q_THGK: Tensor,
    seen: KeySpan,
    offset: int,
    scale: float,
    window_tokens: int | None,
    sinks_HG: Tensor | None,
) -> Tensor:
    """Return [H, R, V]; the first query lies `offset` tokens after the first key."""
    num_tokens, num_heads, _, head_dim = q_THGK.shape
    q_HRK = q_THGK.transpose(0, 1).reshape(num_heads, -1, head_dim)
    num_rows, num_keys = q_HRK.shape[1], seen.keys.shape[1]
    if padding := -num_rows % TILE_ROW_MULTIPLE:
        q_HRK = torch.cat([q_HRK, q_HRK[:, :1].expand(-1, padding, -1)], dim=1)
    scores_HRC = q_HRK.new_empty(num_heads, num_rows + padding, num_keys)
    torch.baddbmm(scores_HRC, q_HRK, seen.keys.transpose(1, 2), beta=0, alpha=scale, out=scores_HRC)
    scores_HTGC = scores_HRC[:, :num_rows].view(num_heads, num_tokens, -1, num_keys)
    for start in range(0, num_keys, KEY_BLOCK):
        if (unseen := _unseen(num_tokens, offset - start, window_tokens)) is not None:
            scores_HTGC[..., start : start + KEY_BLOCK].masked_fill_(unseen, float("-inf"))
    weights_HRC = torch.softmax(scores_HRC, dim=-1)
    out_HRV = torch.bmm(weights_HRC[..., :KEY_BLOCK], seen.values[:, :KEY_BLOCK])
    for start in range(KEY_BLOCK, num_keys, KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        out_HRV.baddbmm_(weights_HRC[..., block], seen.values[:, block])
    out_HRV = out_HRV[:, :num_rows]
    if sinks_HG is not None:
        sinks_HR = sinks_HG.repeat(1, num_tokens)
        out_HRV *= _keys_share(scores_HRC[:, :num_rows], weights_HRC[:, :num_rows], sinks_HR)
    return out_HRV


def _keys_share(scores_HRC: Tensor, weights_HRC: Tensor, sinks_HR: Tensor) -> Tensor:
    """Return what a sink leaves of each row's weights, [H, R, 1].

    A row's largest weight w is 1 / sum(exp(score - m)), m its largest score, so the share of the
    keys, sum / (sum + exp(sink - m)), is 1 / (1 + w exp(sink - m)).
    """
    excess_HR = (sinks_HR - scores_HRC.amax(dim=-1)).exp_()
    return excess_HR.mul_(weights_HRC.amax(dim=-1)).add_(1.0).reciprocal_().unsqueeze(-1)


@lru_cache(maxsize=512)
def _unseen(num_tokens: int, offset: int, window_tokens: int | None) -> Tensor | None:
    """Return which keys of a block queries must not see, [T, 1, KEY_BLOCK]; None if they see all.

    The first query lies `offset` tokens after the block's first key.
    """
    is_all_before = offset >= KEY_BLOCK - 1
    is_all_in_window = window_tokens is None or offset + num_tokens - 1 < window_tokens
    if is_all_before and is_all_in_window:
        return None
    queries_T11 = torch.arange(offset, offset + num_tokens)[:, None, None]
    keys_C = torch.arange(KEY_BLOCK)
    unseen = keys_C > queries_T11
    return unseen if window_tokens is None else unseen | (keys_C <= queries_T11 - window_tokens)


def attend_steps(
    q_SHGK: Tensor,
    spans: Sequence[KeySpan],
    positions: Sequence[int],
    *,
    scale: float,
    window_tokens: int | None,
    sinks_HG: Tensor | None = None,
) -> Tensor:
    """Return [S, H, G, V]: one query each of several sequences, with the bits of `attend`.

    Fewer and smaller calls than a tile for each: a row is masked while its scores are made, the
    products of all blocks are one call, and all sequences are summed in one.
    """
    num_sequences, num_heads, num_groups, head_dim = q_SHGK.shape
    value_dim = spans[0].values.shape[2]
    num_rows = -(-num_groups // STEP_ROW_MULTIPLE) * STEP_ROW_MULTIPLE
    q_SHRK = q_SHGK.new_zeros(num_sequences, num_heads, num_rows, head_dim)
    q_SHRK[:, :, :num_groups] = q_SHGK
    products_NRV: list[Tensor] = []
    shares_HG1: list[Tensor] = []
    counts: list[int] = []
    for q_HRK, span, position in zip(q_SHRK, spans, positions, strict=True):
        seen = span.blocks(position, position + 1, window_tokens)
        num_keys = seen.keys.shape[1]
        mask_C = _row_mask(position, seen.first_key, num_keys, window_tokens)
        scores_HRC = _step_scores(q_HRK, seen.keys, mask_C, scale)
        weights_HRC = torch.softmax(scores_HRC, dim=-1)
        if sinks_HG is not None:
            groups = slice(num_groups)
            shares_HG1.append(_keys_share(scores_HRC[:, groups], weights_HRC[:, groups], sinks_HG))
        for weights_RC, v_CV in zip(weights_HRC, seen.values, strict=True):
            weights_NRC = weights_RC.view(num_rows, -1, KEY_BLOCK).transpose(0, 1)
            products_NRV.append(torch.bmm(weights_NRC, v_CV.view(-1, KEY_BLOCK, value_dim)))
        counts.append(num_keys // KEY_BLOCK)
    sums = q_SHGK.new_zeros(num_sequences * num_heads, num_rows * value_dim)
    # index_add_ adds rows in order: block by block, as a tile does.
    sums.index_add_(0, _owners(tuple(counts), num_heads), torch.cat(products_NRV).flatten(1))
    out_SHGV = sums.view(num_sequences, num_heads, num_rows, value_dim)[:, :, :num_groups]
    return out_SHGV if sinks_HG is None else out_SHGV * torch.stack(shares_HG1)


def _step_scores(q_HRK: Tensor, k_HCK: Tensor, mask_C: Tensor, scale: float) -> Tensor:
    """Return scale * q k + mask, [H, R, C]."""
    num_heads, num_rows, head_dim = q_HRK.shape
    if num_heads > 1:
        return torch.baddbmm(mask_C, q_HRK, k_HCK.transpose(1, 2), alpha=scale)
    # One product of few rows is not shared among threads; a product for each block is.
    k_NCK = k_HCK.view(-1, KEY_BLOCK, head_dim)
    q_NRK = q_HRK.expand(len(k_NCK), -1, -1)
    mask_N1C = mask_C.view(-1, 1, KEY_BLOCK)
    scores_NRC = torch.baddbmm(mask_N1C, q_NRK, k_NCK.transpose(1, 2), alpha=scale)
    return scores_NRC.transpose(0, 1).reshape(1, num_rows, -1)


def _row_mask(position: int, first_key: int, num_keys: int, window_tokens: int | None) -> Tensor:
    """Return [C]: 0 where the query at `position` sees the key, else -inf; a view of a table."""
    # Full attention is a window that has not been filled yet.
    width = window_tokens or max(1024, 1 << position.bit_length())
    return _window_table(width).narrow(0, KEY_BLOCK + first_key - (position - width + 1), num_keys)


@lru_cache(maxsize=64)
def _window_table(width: int) -> Tensor:
    table = torch.full((KEY_BLOCK + width + KEY_BLOCK,), float("-inf"))
    table[KEY_BLOCK : KEY_BLOCK + width] = 0.0
    return table


@lru_cache(maxsize=64)
def _owners(counts: tuple[int, ...], num_heads: int) -> Tensor:
    """Return which (sequence, head) each block's product belongs to."""
    repeats = torch.tensor(counts).repeat_interleave(num_heads)
    return torch.arange(len(repeats)).repeat_interleave(repeats)
