"""Softmax attention whose rows do not depend on how a sequence was cut.

A query's result is the same bits in a whole prefill, in any chunk, as a single decode step, beside
any neighbours and on imported keys. Three rules make it so:

- keys lie on an absolute grid of KEY_BLOCK tokens. A query visits whole blocks; keys that it must
  not see get a score of -inf, hence a weight of exactly zero, so one block more changes nothing;
- the softmax is taken over whole grid blocks with the row's own maximum. torch sums a contiguous
  row in lanes of fixed stride, to which leading and trailing zeros in multiples of the block add
  nothing;
- weights meet values block by block in ascending order, each a product of one fixed inner size.

Row counts are multiples of ROW_MULTIPLE: below 4 rows the matrix product takes another kernel.

Shapes: T query tokens, G query heads of one KV head, H KV heads, R = T * G rows, C keys, K head dim.
"""

import torch
from torch import Tensor

KEY_BLOCK = 128
TILE_TOKENS = 64
"""Query tokens computed at once."""
ROW_MULTIPLE = 8


def attend(
    q_HRK: Tensor,
    k_HCK: Tensor,
    v_HCK: Tensor,
    *,
    num_groups: int,
    first_position: int,
    first_key: int,
    scale: float,
    window_tokens: int | None,
) -> Tensor:
    """Return softmax(scale * q k) v for consecutive query positions, [H, R, K].

    Args:
        q_HRK: rows in the order (token, head of the group).
        k_HCK: keys of the positions first_key + 0, 1, ...; first_key is a multiple of KEY_BLOCK. It
            reaches to the end of the last query's block; everything past a query is masked but
            must be finite.
        v_HCK: values likewise.
        num_groups: G, query heads that share a KV head.
        first_position: position of the first query.
        first_key: position of the first key.
        scale: multiplies q.k.
        window_tokens: how many keys a query sees, itself included; None: all before it.
    """
    num_tokens = q_HRK.shape[1] // num_groups
    tiles = []
    for start in range(0, num_tokens, TILE_TOKENS):
        stop = min(start + TILE_TOKENS, num_tokens)
        position = first_position + start
        low = 0 if window_tokens is None else max(0, position - window_tokens + 1)
        low = low // KEY_BLOCK * KEY_BLOCK
        high = -(-(first_position + stop) // KEY_BLOCK) * KEY_BLOCK
        tiles.append(
            _attend_tile(
                q_HRK[:, start * num_groups : stop * num_groups],
                k_HCK[:, low - first_key : high - first_key],
                v_HCK[:, low - first_key : high - first_key],
                first_position=position - low,
                num_tokens=stop - start,
                scale=scale,
                window_tokens=window_tokens,
            )
        )
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)


def _attend_tile(
    q_HRK: Tensor,
    k_HCK: Tensor,
    v_HCK: Tensor,
    *,
    first_position: int,
    num_tokens: int,
    scale: float,
    window_tokens: int | None,
) -> Tensor:
    """Attend from a few tokens to whole blocks of keys; positions count from the first key."""
    num_heads, num_rows, head_dim = q_HRK.shape
    num_keys = k_HCK.shape[1]
    padding = -num_rows % ROW_MULTIPLE
    if padding:
        q_HRK = torch.cat([q_HRK, q_HRK[:, :1].expand(-1, padding, -1)], dim=1)
    scores_HRC = q_HRK.new_empty(num_heads, num_rows + padding, num_keys)
    torch.baddbmm(scores_HRC, q_HRK, k_HCK.transpose(1, 2), beta=0, alpha=scale, out=scores_HRC)
    _mask_(
        scores_HRC[:, :num_rows].view(num_heads, num_tokens, -1, num_keys),
        first_position=first_position,
        window_tokens=window_tokens,
    )
    weights_HRC = torch.softmax(scores_HRC, dim=-1)
    out_HRK = q_HRK.new_zeros(num_heads, num_rows + padding, head_dim)
    for start in range(0, num_keys, KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        out_HRK.baddbmm_(weights_HRC[:, :, block], v_HCK[:, block])
    return out_HRK[:, :num_rows]


def _mask_(scores_HTGC: Tensor, *, first_position: int, window_tokens: int | None) -> None:
    """Set the scores of unseen keys to -inf, touching only blocks that have any."""
    num_tokens, num_keys = scores_HTGC.shape[1], scores_HTGC.shape[3]
    queries_T11 = torch.arange(first_position, first_position + num_tokens)[:, None, None]
    for start in range(0, num_keys, KEY_BLOCK):
        stop = start + KEY_BLOCK
        keys_C = torch.arange(start, stop)
        if stop - 1 > first_position:
            scores_HTGC[..., start:stop].masked_fill_(keys_C > queries_T11, float("-inf"))
        if window_tokens is not None and start <= first_position + num_tokens - 1 - window_tokens:
            scores_HTGC[..., start:stop].masked_fill_(
                keys_C <= queries_T11 - window_tokens, float("-inf")
            )
