"""Ring 2.5 against its definition in float64, token by token: no other code here computes it.

Written from models.md §1 and §2 alone. Shapes: T tokens, H heads, K head dim, D model dim.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from tests.engine.golden import NUM_TOKENS, Run, load, tokens_of
from tests.tiny_models import tiny_config, write_tiny_model

CONFIG: dict[str, Any] = tiny_config("ring")
TOLERANCES = {"float32": 3e-5, "float16": 5e-2}
NUM_LAYERS, NUM_HEADS = CONFIG["num_hidden_layers"], CONFIG["num_attention_heads"]
HEAD_DIM, NOPE_DIM = CONFIG["head_dim"], CONFIG["qk_nope_head_dim"]
ROPE_DIM, RANK = CONFIG["qk_rope_head_dim"], CONFIG["kv_lora_rank"]
LATENT_EPS = 1e-6
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def expected() -> Tensor:
    with TemporaryDirectory() as directory:
        path = write_tiny_model(Path(directory), "ring")
        weights = load_file(path / "model.safetensors")
    return ring_logits({name: value.double() for name, value in weights.items()}, tokens_of())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_prefill_gives_the_definitions_logits(
    expected: Tensor, dtype: Literal["float16", "float32"]
) -> None:
    logits = Run(load("ring", dtype)).forward(tokens_of())
    torch.testing.assert_close(logits.double(), expected[-1], rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.slow
def test_every_step_gives_the_definitions_logits(expected: Tensor) -> None:
    logits = Run(load("ring")).pieces(tokens_of(), range(1, NUM_TOKENS))
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=TOLERANCES["float32"])


def ring_logits(weights: Weights, tokens: list[int]) -> Tensor:
    x_TD = weights["model.word_embeddings.weight"][tokens]
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        own = {name[len(prefix) :]: v for name, v in weights.items() if name.startswith(prefix)}
        h_TD = rms(x_TD, own["input_layernorm.weight"])
        is_latent = (layer + 1) % CONFIG["layer_group_size"] == 0
        x_TD = x_TD + (latent(own, h_TD) if is_latent else lightning(own, h_TD, layer))
        h_TD = rms(x_TD, own["post_attention_layernorm.weight"])
        is_dense = layer < CONFIG["first_k_dense_replace"]
        x_TD = x_TD + (mlp(own, "mlp.", h_TD) if is_dense else experts(own, h_TD))
    return rms(x_TD, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def rms(x: Tensor, weight: Tensor, eps: float = CONFIG["rms_norm_eps"]) -> Tensor:
    normed: Tensor = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return normed * weight


def angles(num_tokens: int, rotary_dim: int) -> Tensor:
    """[T, rotary_dim / 2]"""
    exponents = -torch.arange(0, rotary_dim, 2).double() / rotary_dim
    frequencies = torch.tensor(CONFIG["rope_theta"]).double() ** exponents
    return torch.arange(num_tokens).double()[:, None] * frequencies


def turn(a: Tensor, b: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    return a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()


def lightning(own: Weights, h_TD: Tensor, layer: int) -> Tensor:
    num_tokens = len(h_TD)
    qkv = (h_TD @ own["attention.query_key_value.weight"].T).view(num_tokens, 3, NUM_HEADS, -1)
    q_THK = rms(qkv[:, 0], own["attention.query_layernorm.weight"])
    k_THK = rms(qkv[:, 1], own["attention.key_layernorm.weight"])
    half = int(HEAD_DIM * CONFIG["partial_rotary_factor"]) // 2
    angle = angles(num_tokens, 2 * half)[:, None]
    q_THK, k_THK = (
        torch.cat([*turn(x[..., :half], x[..., half : 2 * half], angle), x[..., 2 * half :]], -1)
        for x in (q_THK, k_THK)
    )
    heads = torch.arange(1, NUM_HEADS + 1).double()
    slope_H = 2 ** (-8 * heads / NUM_HEADS) * (1 - (layer - 1) / (NUM_LAYERS - 1) + 1e-5)
    state_HKK = torch.zeros(NUM_HEADS, HEAD_DIM, HEAD_DIM).double()
    rows = []
    for q_HK, k_HK, v_HK in zip(q_THK, k_THK, qkv[:, 2], strict=True):
        state_HKK = state_HKK * (-slope_H).exp()[:, None, None] + k_HK[:, :, None] * v_HK[:, None]
        rows.append((q_HK[:, :, None] * HEAD_DIM**-0.5 * state_HKK).sum(1).flatten())
    groups = CONFIG["group_norm_size"]
    out = torch.stack(rows).view(num_tokens, groups, -1)
    normed = rms(out, own["attention.g_norm.weight"].view(groups, -1)).flatten(1)
    gate = torch.sigmoid(h_TD @ own["attention.g_proj.weight"].T)
    return (normed * gate) @ own["attention.dense.weight"].T


def latent(own: Weights, h_TD: Tensor) -> Tensor:
    num_tokens = len(h_TD)
    q = rms(
        h_TD @ own["attention.q_a_proj.weight"].T, own["attention.q_a_layernorm.weight"], LATENT_EPS
    )
    q = (q @ own["attention.q_b_proj.weight"].T).view(num_tokens, NUM_HEADS, -1)
    kv = h_TD @ own["attention.kv_a_proj_with_mqa.weight"].T
    c_TR = rms(kv[:, :RANK], own["attention.kv_a_layernorm.weight"], LATENT_EPS)
    expanded = (c_TR @ own["attention.kv_b_proj.weight"].T).view(num_tokens, NUM_HEADS, -1)
    angle = angles(num_tokens, ROPE_DIM)
    k_rope = torch.cat(turn(kv[:, RANK::2], kv[:, RANK + 1 :: 2], angle), -1)
    q_rope = q[..., NOPE_DIM:]
    q_rope = torch.cat(turn(q_rope[..., ::2], q_rope[..., 1::2], angle[:, None]), -1)
    scores = torch.einsum("qhk,phk->hqp", q[..., :NOPE_DIM], expanded[..., :NOPE_DIM])
    scores = scores + torch.einsum("qhk,pk->hqp", q_rope, k_rope)
    unseen = torch.ones(num_tokens, num_tokens).triu(1).bool()
    scores = (scores * (NOPE_DIM + ROPE_DIM) ** -0.5).masked_fill(unseen, -torch.inf)
    out = torch.einsum("hqp,phv->qhv", scores.softmax(-1), expanded[..., NOPE_DIM:])
    return out.flatten(1) @ own["attention.dense.weight"].T


def mlp(own: Weights, prefix: str, h_TD: Tensor) -> Tensor:
    gate, up, down = (own[f"{prefix}{part}_proj.weight"].T for part in ("gate", "up", "down"))
    return (F.silu(h_TD @ gate) * (h_TD @ up)) @ down


def experts(own: Weights, h_TD: Tensor) -> Tensor:
    out_TD = mlp(own, "mlp.shared_experts.", h_TD)
    scores_TE = torch.sigmoid(h_TD @ own["mlp.gate.weight"].T)
    biased_TE = scores_TE + own["mlp.gate.expert_bias"]
    num_groups, per_group = CONFIG["n_group"], CONFIG["num_experts"] // CONFIG["n_group"]
    for token in range(len(h_TD)):
        by_group = biased_TE[token].view(num_groups, per_group)
        group_scores = by_group.topk(2).values.sum(-1)
        groups = set(group_scores.topk(CONFIG["topk_group"]).indices.tolist())
        allowed = [e for e in range(CONFIG["num_experts"]) if e // per_group in groups]
        chosen = sorted(allowed, key=lambda e: -float(biased_TE[token, e]))
        chosen = chosen[: CONFIG["num_experts_per_tok"]]
        total = scores_TE[token, chosen].sum()
        for expert in chosen:
            weight = scores_TE[token, expert] / total * CONFIG["routed_scaling_factor"]
            row = mlp(own, f"mlp.experts.{expert}.", h_TD[token : token + 1])[0]
            out_TD[token] += weight * row
    return out_TD
