"""Grouped-query attention layers of each family against float64, transformers and themselves cut.

Shapes: T rows, H heads, K key dim, V value dim, D model dim.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from prfaas.engine.layers.gqa import GqaMixer
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import pack
from prfaas.engine.mixer_spec import GqaSpec
from prfaas.engine.rope import RopeTable, attention_factor, inverse_frequencies, pair_order
from prfaas.engine.rope_spec import RopeSpec, YarnScaling
from tests.engine.layers import mixing

HIDDEN, EPS = 48, 1e-6
YARN = YarnScaling(factor=32.0, original_context_tokens=4096, is_truncated=False)
LLAMA = GqaSpec(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, rope=RopeSpec(theta=1e4))
QWEN_NEXT = GqaSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    scale=32**-0.5,
    rope=RopeSpec(theta=1e4, rotary_dim=8),
    has_qk_norm=True,
    has_output_gate=True,
)
MINIMAX_M2 = GqaSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    scale=0.25,
    rope=RopeSpec(theta=5e6, rotary_dim=8),
    has_qk_norm=True,
    qk_norm_span="all_heads",
)
MIMO = GqaSpec(
    num_heads=8,
    num_kv_heads=4,
    head_dim=24,
    value_head_dim=16,
    value_scale=0.707,
    scale=24**-0.5,
    rope=RopeSpec(theta=1e4, rotary_dim=8),
    window_tokens=33,
    has_sinks=True,
)
GPT_OSS = GqaSpec(
    num_heads=8,
    num_kv_heads=1,
    head_dim=16,
    scale=0.25,
    rope=RopeSpec(theta=150_000.0, scaling=YARN),
    window_tokens=32,
    has_sinks=True,
    has_bias=True,
)
NEMOTRON = GqaSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=None)
SPECS = {
    "llama": LLAMA,
    "qwen3_next": QWEN_NEXT,
    "minimax_m2": MINIMAX_M2,
    "mimo": MIMO,
    "gpt_oss": GPT_OSS,
    "nemotron": NEMOTRON,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Weights:
    """Random weights of one layer, named and ordered as a checkpoint's."""

    def __init__(self, spec: GqaSpec) -> None:
        self.spec = spec
        generator = torch.Generator().manual_seed(3)
        sizes = {
            "q": spec.num_heads * spec.head_dim,
            "k": spec.num_kv_heads * spec.head_dim,
            "v": spec.num_kv_heads * spec.value_dim,
            "gate": spec.num_heads * spec.value_dim if spec.has_output_gate else 0,
        }
        self.proj = {
            name: torch.randn(size, HIDDEN, generator=generator) * 0.3
            for name, size in sizes.items()
        }
        self.bias = {
            name: torch.randn(size, generator=generator) * float(spec.has_bias)
            for name, size in sizes.items()
        }
        self.o = torch.randn(HIDDEN, spec.num_heads * spec.value_dim, generator=generator) * 0.3
        is_span = spec.qk_norm_span == "all_heads"
        self.norms = {
            name: torch.rand(sizes[name] if is_span else spec.head_dim, generator=generator) + 0.5
            for name in ("q", "k")
        }
        self.sinks = torch.randn(spec.num_heads, generator=generator) if spec.has_sinks else None

    def build(self) -> GqaMixer:
        spec = self.spec
        order = pair_order(spec.head_dim, spec.rope)

        def paired(rows: Tensor) -> Tensor:
            by_head = rows.view(-1, spec.head_dim, *rows.shape[1:])
            return by_head[:, order].flatten(0, 1)

        def stacked(parts: dict[str, Tensor]) -> Tensor:
            return torch.cat([paired(parts["q"]), paired(parts["k"]), parts["v"], parts["gate"]])

        norm = None
        if spec.has_qk_norm:
            heads = ((self.norms["q"], spec.num_heads), (self.norms["k"], spec.num_kv_heads))
            rows = [weight.view(-1, spec.head_dim).expand(num, -1) for weight, num in heads]
            norm = RmsNorm(torch.cat(rows)[:, order], EPS, has_unit_offset=False)
        return GqaMixer(
            spec,
            qkv_proj=pack(
                stacked(self.proj),
                mixing.PACKING,
                stacked(self.bias) if spec.has_bias else None,
            ),
            o_proj=pack(self.o, mixing.PACKING),
            qk_norm=norm,
            rope=None if spec.rope is None else RopeTable(spec.rope, spec.head_dim),
            sinks_H=self.sinks,
        )

    def reference(self, x_TD: Tensor) -> Tensor:
        """The layer in float64, in the checkpoint's order."""
        spec, x = self.spec, x_TD.double()
        part = {
            name: x @ weight.double().T + self.bias[name].double()
            for name, weight in self.proj.items()
        }
        if spec.has_qk_norm:
            for name in ("q", "k"):
                part[name] = self._normed(part[name], self.norms[name].double())
        q, k = (
            rotated(part[name].view(len(x), -1, spec.head_dim), spec.rope) for name in ("q", "k")
        )
        v = part["v"].view(len(x), -1, spec.value_dim) * spec.value_scale
        out = softmax_attention(q, k, v, spec, self.sinks).flatten(1)
        if spec.has_output_gate:
            out *= part["gate"].sigmoid()
        return out @ self.o.double().T

    def _normed(self, x_TN: Tensor, weight: Tensor) -> Tensor:
        x = x_TN.view(len(x_TN), -1, len(weight))
        return (x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight).flatten(1)


def rotated(x_THK: Tensor, spec: RopeSpec | None) -> Tensor:
    """Turn dimension i with i + rotary_dim / 2."""
    if spec is None:
        return x_THK
    dim = x_THK.shape[-1]
    frequencies = inverse_frequencies(spec, dim).double()
    half = len(frequencies)
    turns = torch.polar(
        torch.full((1,), attention_factor(spec), dtype=torch.float64),
        torch.arange(len(x_THK))[:, None] * frequencies,
    )[:, None]
    pairs = torch.complex(x_THK[..., :half], x_THK[..., half : 2 * half]) * turns
    return torch.cat([pairs.real, pairs.imag, x_THK[..., 2 * half :]], dim=-1)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: GqaSpec, sinks: Tensor | None
) -> Tensor:
    num_tokens, groups = len(q), spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("thk,chk->htc", q, k) * spec.scale
    position = torch.arange(num_tokens)
    unseen = position > position[:, None]
    if spec.window_tokens is not None:
        unseen |= position <= position[:, None] - spec.window_tokens
    scores.masked_fill_(unseen, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, num_tokens, 1)
        scores = torch.cat([scores, column], dim=-1)
    return torch.einsum("htc,chv->thv", scores.softmax(-1)[..., :num_tokens], v)


def rows(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def whole(mixer: GqaMixer, x: Tensor) -> Tensor:
    [out] = mixing.mixed(mixer, mixing.new_kv(mixer.spec), x, [0, len(x)])
    return out


@pytest.mark.parametrize("name", SPECS)
def test_a_layer_is_its_formula(name: str) -> None:
    weights, x = Weights(SPECS[name]), rows(200)
    expected = weights.reference(x)
    torch.testing.assert_close(whole(weights.build(), x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SPECS)
@given(at=mixing.cuts(max_tokens=300))
@settings(max_examples=12, deadline=None)
def test_no_cut_changes_a_bit(name: str, at: list[int]) -> None:
    mixer, x = Weights(SPECS[name]).build(), rows(at[-1])
    pieces = list(mixing.mixed(mixer, mixing.new_kv(mixer.spec), x, at))
    assert torch.equal(torch.cat(pieces), whole(mixer, x))


@pytest.mark.parametrize("name", SPECS)
def test_steps_beside_chunks_have_the_bits_of_a_prefill(name: str) -> None:
    mixer = Weights(SPECS[name]).build()
    inputs = [rows(num_tokens, seed) for seed, num_tokens in enumerate((150, 9, 260))]
    expected = [whole(mixer, x) for x in inputs]
    kvs = [mixing.new_kv(mixer.spec) for _ in inputs]
    starts = (149, 0, 100)
    for kv, x, start in zip(kvs, inputs, starts, strict=True):
        if start:
            mixing.mix(mixer, [(kv, x[:start])])
    parts = [(kv, x[start:]) for kv, x, start in zip(kvs, inputs, starts, strict=True)]
    for out, full, start in zip(mixing.mix(mixer, parts), expected, starts, strict=True):
        assert torch.equal(out, full[start:])


@pytest.mark.parametrize("name", ["mimo", "gpt_oss", "qwen3_next"])
def test_an_imported_sequence_goes_on_with_the_same_bits(name: str) -> None:
    mixer, x = Weights(SPECS[name]).build(), rows(140)
    source, target = mixing.new_kv(mixer.spec), mixing.new_kv(mixer.spec)
    expected = torch.cat(list(mixing.mixed(mixer, source, x[:130], [0, 130])))
    first = (130 - mixer.spec.kept_tokens(130)) // 64 * 64
    for start, stop in pairwise([*range(first, 130, 64), 130]):
        page = memoryview(bytearray((stop - start) * mixer.spec.values_per_token * 4))
        source.export_block(0, start // 64, stop - start, page)
        target.import_block(0, start // 64, stop - start, page)
    target.set_num_tokens(130)
    [out] = mixing.mix(mixer, [(target, x[130:])])
    [same] = mixing.mix(mixer, [(source, x[130:])])
    assert torch.equal(out, same)
    assert torch.equal(torch.cat([expected, out]), whole(mixer, x))


def state_of(weights: Weights, **more: Tensor) -> dict[str, Tensor]:
    """The checkpoint's tensors; `more` are others or in another form."""
    state = {f"{part}_proj.weight": weights.proj[part] for part in "qkv"}
    state["o_proj.weight"] = weights.o
    if weights.spec.has_qk_norm:
        state |= {f"{part}_norm.weight": weights.norms[part] for part in "qk"}
    return state | {name.replace("__", "."): tensor for name, tensor in more.items()}


def sizes(spec: GqaSpec, **rope: object) -> dict[str, Any]:
    assert spec.rope is not None
    rotary_dim = spec.rope.rotary_dim or spec.head_dim
    rope = {"rope_type": "default", "partial_rotary_factor": rotary_dim / spec.head_dim} | rope
    return {
        "hidden_size": HIDDEN,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "attn_implementation": "eager",
        "rms_norm_eps": EPS,
        "num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": spec.rope.theta} | rope,
    }


def as_qwen3_next(weights: Weights) -> tuple[Any, Any]:
    """Its gate's rows stand behind the query's, head by head; its norms multiply by 1 + weight."""
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = theirs.Qwen3NextConfig(**sizes(QWEN_NEXT), layer_types=["full_attention"])
    by_head = (-1, QWEN_NEXT.head_dim, HIDDEN)
    halves = [weights.proj[part].view(by_head) for part in ("q", "gate")]
    layer = theirs.Qwen3NextAttention(config, 0)
    state = state_of(
        weights,
        q_proj__weight=torch.cat(halves, dim=1).flatten(0, 1),
        q_norm__weight=weights.norms["q"] - 1,
        k_norm__weight=weights.norms["k"] - 1,
    )
    layer.load_state_dict(state, strict=True)
    return layer, theirs.Qwen3NextRotaryEmbedding(config)


def as_minimax_m2(weights: Weights) -> tuple[Any, Any]:
    theirs = pytest.importorskip("transformers.models.minimax_m2.modeling_minimax_m2")
    config = theirs.MiniMaxM2Config(**sizes(MINIMAX_M2), rotary_dim=8)
    layer = theirs.MiniMaxM2Attention(config, 0)
    layer.load_state_dict(state_of(weights), strict=True)
    return layer, theirs.MiniMaxM2RotaryEmbedding(config)


def as_gpt_oss(weights: Weights) -> tuple[Any, Any]:
    theirs = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    yarn = {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    config = theirs.GptOssConfig(
        **sizes(GPT_OSS, rope_type="yarn", **yarn),
        sliding_window=GPT_OSS.window_tokens,
        layer_types=["sliding_attention"],
    )
    layer = theirs.GptOssAttention(config, 0)
    assert weights.sinks is not None
    biases = {f"{part}_proj__bias": weights.bias[part] for part in "qkv"}
    state = state_of(weights, **biases, o_proj__bias=torch.zeros(HIDDEN), sinks=weights.sinks)
    layer.load_state_dict(state, strict=True)
    return layer, theirs.GptOssRotaryEmbedding(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "theirs"),
    [(QWEN_NEXT, as_qwen3_next), (MINIMAX_M2, as_minimax_m2), (GPT_OSS, as_gpt_oss)],
)
def test_the_layer_is_transformers(
    spec: GqaSpec, theirs: Callable[[Weights], tuple[Any, Any]]
) -> None:
    weights, x = Weights(spec), rows(100)
    layer, rotary = theirs(weights)
    position = torch.arange(100)
    unseen = position > position[:, None]
    if spec.window_tokens is not None:
        unseen |= position <= position[:, None] - spec.window_tokens
    mask = torch.zeros(1, 1, 100, 100).masked_fill_(unseen, float("-inf"))
    with torch.no_grad():
        turns = rotary(x[None], position[None])
        expected = layer(x[None], position_embeddings=turns, attention_mask=mask)[0][0]
    torch.testing.assert_close(whole(weights.build(), x), expected, rtol=1e-4, atol=5e-5)
