"""The mixers of mixer_families.py in plain torch, one token after the other: what a recurrence costs without chunks.

Projections, convolutions and gates are those of the family's layer, of all tokens at once; only the recurrence
itself walks, over heads at once. Weights are random: speed is measured, and the recurrences are tested.

Shapes: T tokens, H heads, K key dim, V value dim, D model dim, E experts, F their width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.bench.mixer_families import SHARED, Family

Run = Callable[[Tensor], Tensor]
"""x_TD -> y_TD."""


def delta(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, decay_THK: Tensor, beta_TH: Tensor
) -> Tensor:
    """Return S^T q of each token, where S = decay S, then S += beta k (v - S^T k)^T."""
    state_HKV = q_THK.new_zeros(*q_THK.shape[1:], v_THV.shape[2])
    out_THV = torch.empty_like(v_THV)
    for t, (k_HK, v_HV) in enumerate(zip(k_THK, v_THV, strict=True)):
        state_HKV *= decay_THK[t, :, :, None]
        seen_HV = torch.einsum("hkv,hk->hv", state_HKV, k_HK)
        change_HV = beta_TH[t, :, None] * (v_HV - seen_HV)
        state_HKV += k_HK[:, :, None] * change_HV[:, None]
        out_THV[t] = torch.einsum("hkv,hk->hv", state_HKV, q_THK[t])
    return out_THV


def decayed(q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, decay_TH: Tensor) -> Tensor:
    """Return S^T q of each token, where S = decay S + k v^T: lightning attention, and Mamba-2."""
    state_HKV = k_THK.new_zeros(*k_THK.shape[1:], v_THV.shape[2])
    out_THV = torch.empty_like(v_THV)
    for t, (k_HK, v_HV) in enumerate(zip(k_THK, v_THV, strict=True)):
        state_HKV *= decay_TH[t, :, None, None]
        state_HKV += k_HK[:, :, None] * v_HV[:, None]
        out_THV[t] = torch.einsum("hkv,hk->hv", state_HKV, q_THK[t])
    return out_THV


def convolved(x_TD: Tensor, weight_DW: Tensor) -> Tensor:
    """Return the causal convolution of each column, a window of rows at a time."""
    width = weight_DW.shape[1]
    weight_WD = weight_DW.T.contiguous()
    rows_TD = torch.cat([x_TD.new_zeros(width - 1, x_TD.shape[1]), x_TD])
    return torch.stack([(rows_TD[t : t + width] * weight_WD).sum(0) for t in range(len(x_TD))])


def routed(
    x_TD: Tensor, router_ED: Tensor, experts: list[tuple[Tensor, Tensor]], num: int
) -> Tensor:
    """Return each token's weighted sum of its best experts, (gate and up [2F, D], down [D, F])."""
    out_TD = torch.empty_like(x_TD)
    for t, x_D in enumerate(x_TD):
        weights, chosen = torch.softmax(router_ED @ x_D, 0).topk(num)
        y_D = torch.zeros_like(x_D)
        for weight, expert in zip(weights / weights.sum(), chosen.tolist(), strict=True):
            gate_up, down = experts[expert]
            gate_F, up_F = (gate_up @ x_D).chunk(2)
            y_D += weight * (down @ (F.silu(gate_F) * up_F))
        out_TD[t] = y_D
    return out_TD


def sequential(family: Family) -> Run | None:
    """Return the family's layer with random weights; None if it has no recurrence."""
    make = _MAKERS.get(family.name)
    return None if make is None else make(family.config)


def _weight(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(shape[-1] ** -0.5)


def _conv4(x_TD: Tensor, weight_D1W: Tensor) -> Tensor:
    padded = F.pad(x_TD.T, (weight_D1W.shape[2] - 1, 0))
    out_DT = F.conv1d(padded[None], weight_D1W, groups=len(weight_D1W))[0]
    return F.silu(out_DT.T)


def _delta_layer(num_heads: int, dim: int, *, has_wide_decay: bool) -> Run:
    hidden, width = SHARED["hidden_size"], num_heads * dim
    decays = width if has_wide_decay else num_heads
    widths = [3 * width, width, decays, num_heads]
    in_proj, out_proj, conv = (
        _weight(sum(widths), hidden),
        _weight(hidden, width),
        _weight(3 * width, 1, 4),
    )

    def run(x_TD: Tensor) -> Tensor:
        qkv, gate, decay, beta = torch.split(x_TD @ in_proj.T, widths, 1)
        q, k, v = (part.reshape(-1, num_heads, dim) for part in _conv4(qkv, conv).chunk(3, 1))
        decay_THK = torch.exp(-F.softplus(decay)).view(len(x_TD), num_heads, -1).expand(-1, -1, dim)
        out = delta(F.normalize(q, dim=2), F.normalize(k, dim=2), v, decay_THK, beta.sigmoid())
        return (F.rms_norm(out, (dim,)).flatten(1) * F.silu(gate)) @ out_proj.T

    return run


def _gdn(config: dict[str, Any]) -> Run:
    heads, dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    return _delta_layer(heads, dim, has_wide_decay=False)


def _kda(config: dict[str, Any]) -> Run:
    linear = config["linear_attn_config"]
    return _delta_layer(linear["num_heads"], linear["head_dim"], has_wide_decay=True)


def _lightning(config: dict[str, Any]) -> Run:
    del config  # its heads are what all have
    hidden, heads, dim = (SHARED[key] for key in ("hidden_size", "num_attention_heads", "head_dim"))
    width = heads * dim
    in_proj, out_proj = _weight(4 * width, hidden), _weight(hidden, width)
    decay_H = torch.exp(-(2.0 ** -torch.arange(1, heads + 1)))

    def run(x_TD: Tensor) -> Tensor:
        *qkv, gate = (x_TD @ in_proj.T).chunk(4, 1)
        q, k, v = (F.silu(part).view(-1, heads, dim) for part in qkv)
        out = decayed(q, k, v, decay_H.expand(len(x_TD), -1)).flatten(1)
        return (F.rms_norm(out, (width,)) * gate.sigmoid()) @ out_proj.T

    return run


def _mamba2(config: dict[str, Any]) -> Run:
    hidden, heads = SHARED["hidden_size"], config["mamba_n_heads"]
    dim, num_states = config["mamba_d_head"], config["mamba_d_state"]
    width = heads * dim
    widths = [width, width + 2 * num_states, heads]
    in_proj, out_proj = _weight(sum(widths), hidden), _weight(hidden, width)
    conv = _weight(widths[1], 1, config["mamba_d_conv"])

    def run(x_TD: Tensor) -> Tensor:
        gate, mixed, step = torch.split(x_TD @ in_proj.T, widths, 1)
        x, b, c = torch.split(_conv4(mixed, conv), [width, num_states, num_states], 1)
        step_TH, x_THV = F.softplus(step), x.reshape(-1, heads, dim)
        q, k = (part[:, None].expand(-1, heads, -1) for part in (c, b))
        out = decayed(q, k, x_THV * step_TH[:, :, None], torch.exp(-step_TH)) + x_THV
        return F.rms_norm(out.flatten(1) * F.silu(gate), (width,)) @ out_proj.T

    return run


def _shortconv(config: dict[str, Any]) -> Run:
    hidden = SHARED["hidden_size"]
    in_proj, out_proj = _weight(3 * hidden, hidden), _weight(hidden, hidden)
    conv = _weight(hidden, config["conv_L_cache"])

    def run(x_TD: Tensor) -> Tensor:
        b, c, x = (x_TD @ in_proj.T).chunk(3, 1)
        return (c * convolved(b * x, conv)) @ out_proj.T

    return run


def _moe(config: dict[str, Any]) -> Run:
    hidden, width = SHARED["hidden_size"], config["moe_intermediate_size"]
    num_experts, num_chosen = config["num_experts"], config["num_experts_per_tok"]
    router = _weight(num_experts, hidden)
    experts = [(_weight(2 * width, hidden), _weight(hidden, width)) for _ in range(num_experts)]
    return lambda x_TD: routed(x_TD, router, experts, num_chosen)


_MAKERS: dict[str, Callable[[dict[str, Any]], Run]] = {
    "gdn": _gdn,
    "kda": _kda,
    "lightning": _lightning,
    "lightning-ring": _lightning,
    "mamba2": _mamba2,
    "shortconv": _shortconv,
    "moe": _moe,
}
