"""The delta rule: what Gated DeltaNet and Kimi Delta Attention fold their tokens by.

For each token and head, S float32 [K, V] (models: arXiv 2412.06464, 2510.26692):

    S <- e^g S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T q

GDN has one g for a head, KDA one for each key channel, which multiplies S's row.

Shapes: T tokens, N chunks, C = CHUNK_TOKENS, H heads, h key heads (each serves H / h heads),
K key dim, V value dim, G decays of a head (1 or K), D = 2 C rows of keys, then queries, S sequences,
R width of an input row, X = H V.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prfaas.engine.layers.conv import CausalConv
from prfaas.engine.layers.delta_scores import channel_scores, head_scores, inverse_unit_lower
from prfaas.engine.recurrence import CHUNK_TOKENS
from prfaas.engine.states import State

SLAB_TOKENS = 2 * CHUNK_TOKENS
"""Tokens whose chunks are prepared at once: what is made of them stays in cache."""
NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRows:
    """The delta rule's inputs, by token or by sequence."""

    q: Tensor
    """[T, h, K], scaled."""
    k: Tensor
    """[T, h, K]."""
    v: Tensor
    """[T, H, V]."""
    g: Tensor
    """[T, H, G]: logarithm of the decay, <= 0."""
    beta: Tensor
    """[T, H]."""


class DeltaRecurrence:
    """A short convolution of q, k and v, silu, unit q and k, and the delta rule.

    An input row is [q | k | v | beta | g], by heads. States are the convolution's rows and S.
    """

    def __init__(
        self,
        conv: CausalConv,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        decays_per_head: int,
    ) -> None:
        self._conv = conv
        self._qk_shape = (2 * num_key_heads, key_dim)
        self._v_shape = (num_value_heads, value_dim)
        self._g_shape = (num_value_heads, decays_per_head)
        self._widths = [
            2 * num_key_heads * key_dim + num_value_heads * value_dim,
            num_value_heads,
            num_value_heads * decays_per_head,
        ]
        self.row_dim = sum(self._widths)
        self.out_dim = num_value_heads * value_dim
        self._norm_eps = torch.tensor([NORM_EPS], device=conv.device)
        scales = torch.ones(2 * num_key_heads, 1, device=conv.device)
        scales[:num_key_heads] = key_dim**-0.5
        self._qk_scales = scales

    def scan(self, rows_TR: Tensor, state: State) -> tuple[Tensor, State]:
        """Return [T, X] by the chunked form, and the state after the rows."""
        out_TX = rows_TR.new_empty(len(rows_TR), self.out_dim)
        conv_rows_WC, state_HKV = state
        for start in range(0, len(rows_TR), SLAB_TOKENS):
            slab_TR = rows_TR[start : start + SLAB_TOKENS]
            u_TC, beta_TH, g_TG = torch.split(slab_TR, self._widths, dim=1)
            qkv_TC, conv_rows_WC = self._conv.scan(u_TC, conv_rows_WC)
            rows = self._rows(qkv_TC, beta_TH, g_TG)
            out_THV = out_TX[start : start + len(slab_TR)].view(-1, *self._v_shape)
            state_HKV = fold_chunks(rows, state_HKV, out_THV)
        return out_TX, (conv_rows_WC, state_HKV)

    def step(self, rows_SR: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        """Return [S, X]: one row of each of S sequences, and their states."""
        u_SC, beta_SH, g_SG = torch.split(rows_SR, self._widths, dim=1)
        qkv_SC, kept = self._conv.step(u_SC, [conv for conv, _ in states])
        rows = self._rows(qkv_SC, beta_SH, g_SG)
        folded = [fold_one(rows, i, state_HKV) for i, (_, state_HKV) in enumerate(states)]
        out_SX = torch.stack([out_HV for out_HV, _ in folded]).flatten(1)
        return out_SX, [(conv, after) for conv, (_, after) in zip(kept, folded, strict=True)]

    def _rows(self, qkv_TC: Tensor, beta_TH: Tensor, g_TG: Tensor) -> "DeltaRows":
        num_heads, key_dim = self._qk_shape
        qk_THK = qkv_TC[:, : num_heads * key_dim].view(-1, num_heads, key_dim)
        norm_TH1 = torch.linalg.vector_norm(qk_THK, dim=2, keepdim=True)
        scale_TH1 = torch.addcmul(self._norm_eps, norm_TH1, norm_TH1).rsqrt_().mul_(self._qk_scales)
        q_ThK, k_ThK = (qk_THK * scale_TH1).chunk(2, dim=1)
        return DeltaRows(
            q=q_ThK,
            k=k_ThK,
            v=qkv_TC[:, num_heads * key_dim :].view(-1, *self._v_shape),
            g=g_TG.view(-1, *self._g_shape),
            beta=beta_TH,
        )


def fold_one(rows: DeltaRows, token: int, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return one token's output [H, V] and the state after it: the rule as it stands."""
    num_repeats = rows.v.shape[1] // rows.k.shape[1]
    k_HK = rows.k[token].repeat_interleave(num_repeats, 0)
    q_HK = rows.q[token].repeat_interleave(num_repeats, 0)
    state_HKV = state_HKV * rows.g[token].exp()[:, :, None]
    seen_H2V = torch.bmm(torch.stack([k_HK, q_HK], dim=1), state_HKV)
    d_HV = (rows.v[token] - seen_H2V[:, 0]).mul_(rows.beta[token][:, None])
    state_HKV.addcmul_(k_HK[:, :, None], d_HV[:, None, :])
    # S^T q of the new S, without reading it again.
    return torch.addcmul(seen_H2V[:, 1], (q_HK * k_HK).sum(1, keepdim=True), d_HV), state_HKV


def fold_in_order(rows: DeltaRows, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return [T, H, V] and the state after all tokens, taken one by one; in any float dtype."""
    outs_HV = []
    for token in range(len(rows.v)):
        out_HV, state_HKV = fold_one(rows, token, state_HKV)
        outs_HV.append(out_HV)
    return torch.stack(outs_HV), state_HKV


def fold_chunks(rows: DeltaRows, state_HKV: Tensor, out_THV: Tensor) -> Tensor:
    """Write the outputs to `out_THV`; return the state after them.

    Within a chunk that starts from S0, with G_i the decay from its start through token i and A the
    decayed products beta_i k_i . k_j below the diagonal, all its d come at once from

        (I + A) d = beta (v - (G k) S0)
    """
    q_NhCK, k_NhCK, g_NHCG = _chunks(rows.q), _chunks(rows.k), _chunks(rows.g)
    v_NHCV, beta_NHC1 = _chunks(rows.v), _chunks(rows.beta[:, :, None])
    scores = (head_scores if g_NHCG.shape[3] == 1 else channel_scores)(q_NhCK, k_NhCK, g_NHCG)
    inverse_NHCC = inverse_unit_lower(scores.keys.mul_(beta_NHC1))
    both_NHDK = v_NHCV.new_empty(*v_NHCV.shape[:2], 2 * CHUNK_TOKENS, q_NhCK.shape[3])
    _times_heads(k_NhCK, scores.from_start, both_NHDK[:, :, :CHUNK_TOKENS])
    _times_heads(q_NhCK, scores.from_start, both_NHDK[:, :, CHUNK_TOKENS:])
    later_k_NHCK = torch.empty_like(both_NHDK[:, :, CHUNK_TOKENS:])
    later_k_NHKC = _times_heads(k_NhCK, scores.to_end, later_k_NHCK).transpose(2, 3)
    decay_NHG1 = scores.from_start[:, :, -1, :, None]
    for chunk, v_HCV in enumerate(v_NHCV):
        out_CHV = out_THV[chunk * CHUNK_TOKENS : (chunk + 1) * CHUNK_TOKENS]
        seen_HDV = torch.bmm(both_NHDK[chunk], state_HKV)
        wanted_HCV = (v_HCV - seen_HDV[:, :CHUNK_TOKENS]).mul_(beta_NHC1[chunk])
        d_HCV = torch.bmm(inverse_NHCC[chunk], wanted_HCV)
        out_HCV = torch.bmm(scores.queries[chunk], d_HCV)
        out_HCV += seen_HDV[:, CHUNK_TOKENS:]
        out_CHV.copy_(out_HCV.transpose(0, 1)[: len(out_CHV)])
        state_HKV = (state_HKV * decay_NHG1[chunk]).baddbmm_(later_k_NHKC[chunk], d_HCV)
    return state_HKV


def _chunks(x_THK: Tensor) -> Tensor:
    """Return [N, H, C, K], zeros past the last token: neutral, as k, beta and g are 0."""
    if padding := -len(x_THK) % CHUNK_TOKENS:
        x_THK = torch.cat([x_THK, x_THK.new_zeros(padding, *x_THK.shape[1:])])
    return x_THK.reshape(-1, CHUNK_TOKENS, *x_THK.shape[1:]).transpose(1, 2).contiguous()


def _times_heads(x_NhCK: Tensor, factor_NHCG: Tensor, out_NHCK: Tensor) -> Tensor:
    """Write each key head's rows times the factors of the heads it serves; return them."""
    num_chunks, num_key_heads, length, _ = x_NhCK.shape
    by_key_head = (num_chunks, num_key_heads, -1, length)
    factors = factor_NHCG.view(*by_key_head, factor_NHCG.shape[3])
    out = out_NHCK.view(*by_key_head, out_NHCK.shape[3])
    torch.mul(x_NhCK.unsqueeze(2), factors, out=out)
    return out_NHCK
