"""Latent attention: the absorbed form against the expanded one in float64, transformers, bits.

Shapes: T rows, H heads, N and P dims of a query that do not turn and that do, R latent dim, V value
dim, D model dim.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from prfaas.engine.layers.mla import MlaMixer
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import pack
from prfaas.engine.mixer_spec import MlaSpec
from prfaas.engine.rope import RopeTable, attention_factor, inverse_frequencies, pair_order
from prfaas.engine.rope_spec import RopeSpec, YarnScaling
from tests.engine.layers import mixing

HIDDEN, EPS = 48, 1e-6
KIMI = MlaSpec(
    num_heads=6, latent_dim=32, rope_dim=8, nope_dim=16, value_dim=24, scale=24**-0.5, rope=None
)
LING = replace(
    KIMI,
    rope=RopeSpec(theta=6e6, pairs="neighbours"),
    query_rank=20,
    has_output_gate=True,
)
YARN = YarnScaling(factor=4.0, original_context_tokens=256, mscale=1.0, mscale_all_dim=0.7)
RING = replace(KIMI, rope=RopeSpec(theta=6e5, scaling=YARN), num_heads=1, scale=0.3)
SPECS = {"kimi": KIMI, "ling": LING, "ring": RING}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Weights:
    """Random weights of one layer, named and ordered as a checkpoint's."""

    def __init__(self, spec: MlaSpec) -> None:
        self.spec = spec
        self._generator = torch.Generator().manual_seed(4)
        q_size = spec.num_heads * (spec.nope_dim + spec.rope_dim)
        rank = spec.query_rank or HIDDEN
        self.q_a, self.q_a_norm = self._random(rank, HIDDEN), self._random(rank).abs() + 0.5
        self.q = self._random(q_size, rank)
        self.kv_a = self._random(spec.latent_dim + spec.rope_dim, HIDDEN)
        self.kv_norm = self._random(spec.latent_dim).abs() + 0.5
        self.kv_b = self._random(spec.num_heads * (spec.nope_dim + spec.value_dim), spec.latent_dim)
        self.o = self._random(HIDDEN, spec.num_heads * spec.value_dim)
        self.gate = self._random(spec.num_heads, HIDDEN)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator) * 0.3

    def build(self) -> MlaMixer:
        spec = self.spec
        order = pair_order(spec.rope_dim, spec.rope)
        kv_a, q = self.kv_a.clone(), self.q.clone().view(spec.num_heads, -1, self.q.shape[1])
        kv_a[spec.latent_dim :] = kv_a[spec.latent_dim :][order]
        q[:, spec.nope_dim :] = q[:, spec.nope_dim :][:, order]
        q_a_norm = RmsNorm(self.q_a_norm, EPS, has_unit_offset=False)
        q_a, q_b = (pack(w, mixing.PACKING) for w in (self.q_a, q.flatten(0, 1)))
        k_up, v_up = self._up()
        return MlaMixer(
            spec,
            q_proj=q_b if spec.query_rank is None else lambda x: q_b(q_a_norm(q_a(x))),
            kv_a_proj=pack(kv_a, mixing.PACKING),
            kv_norm=RmsNorm(self.kv_norm, EPS, has_unit_offset=False),
            k_up_HNR=k_up,
            v_up_HRV=v_up.transpose(1, 2),
            o_proj=pack(self.o, mixing.PACKING),
            gate_proj=pack(self.gate, mixing.PACKING) if spec.has_output_gate else None,
            rope=None if spec.rope is None else RopeTable(spec.rope, spec.rope_dim),
        )

    def _up(self) -> tuple[Tensor, Tensor]:
        """kv_b_proj by head: keys [H, N, R] and values [H, V, R]."""
        by_head = self.kv_b.view(self.spec.num_heads, -1, self.spec.latent_dim)
        return by_head[:, : self.spec.nope_dim], by_head[:, self.spec.nope_dim :]

    def reference(self, x_TD: Tensor) -> Tensor:
        """Expanded keys and values in float64, in the checkpoint's order."""
        spec, x = self.spec, x_TD.double()
        q = x
        if spec.query_rank is not None:
            q = normed(x @ self.q_a.double().T, self.q_a_norm)
        q = (q @ self.q.double().T).view(len(x), spec.num_heads, -1)
        kv = x @ self.kv_a.double().T
        latent = normed(kv[:, : spec.latent_dim], self.kv_norm)
        k_up, v_up = self._up()
        k_nope = torch.einsum("tr,hnr->thn", latent, k_up.double())
        v = torch.einsum("tr,hvr->thv", latent, v_up.double())
        k_turned = turned(kv[:, None, spec.latent_dim :], spec.rope)
        k = torch.cat([k_nope, k_turned.expand(-1, spec.num_heads, -1)], dim=-1)
        q = torch.cat([q[..., : spec.nope_dim], turned(q[..., spec.nope_dim :], spec.rope)], dim=-1)
        scores = torch.einsum("thk,chk->htc", q, k) * spec.scale
        position = torch.arange(len(x))
        scores.masked_fill_(position > position[:, None], float("-inf"))
        out = torch.einsum("htc,chv->thv", scores.softmax(-1), v)
        if spec.has_output_gate:
            out *= (x @ self.gate.double().T).sigmoid()[..., None]
        return out.flatten(1) @ self.o.double().T


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def turned(x_THP: Tensor, spec: RopeSpec | None) -> Tensor:
    if spec is None:
        return x_THP
    first, second = x_THP.chunk(2, dim=-1)
    if spec.pairs == "neighbours":
        first, second = x_THP[..., ::2], x_THP[..., 1::2]
    angles = torch.arange(len(x_THP))[:, None] * inverse_frequencies(spec, x_THP.shape[-1]).double()
    factor = torch.tensor(attention_factor(spec), dtype=torch.float64)
    turns = torch.polar(factor.expand_as(angles), angles)
    pairs = torch.complex(first, second) * turns[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def rows(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def whole(mixer: MlaMixer, x: Tensor) -> Tensor:
    [out] = mixing.mixed(mixer, mixing.new_kv(mixer.spec), x, [0, len(x)])
    return out


@pytest.mark.parametrize("name", SPECS)
def test_the_absorbed_form_is_the_expanded_one(name: str) -> None:
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
    starts = (149, 0, 259)
    for kv, x, start in zip(kvs, inputs, starts, strict=True):
        if start:
            mixing.mix(mixer, [(kv, x[:start])])
    parts = [(kv, x[start:]) for kv, x, start in zip(kvs, inputs, starts, strict=True)]
    for out, full, start in zip(mixing.mix(mixer, parts), expected, starts, strict=True):
        assert torch.equal(out, full[start:])


@pytest.mark.slow
def test_kimis_own_sizes_keep_their_bits() -> None:
    spec = replace(KIMI, num_heads=32, latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128)
    mixer, x = Weights(spec).build(), rows(140)
    expected = whole(mixer, x)
    for at in ([0, 1, 2, 5, 140], [0, 137, 138, 139, 140]):
        pieces = list(mixing.mixed(mixer, mixing.new_kv(spec), x, at))
        assert torch.equal(torch.cat(pieces), expected)


def test_an_imported_sequence_goes_on_with_the_same_bits() -> None:
    mixer, x = Weights(LING).build(), rows(140)
    source, target = mixing.new_kv(LING), mixing.new_kv(LING)
    before = torch.cat(list(mixing.mixed(mixer, source, x[:130], [0, 130])))
    for start, stop in pairwise([0, 64, 128, 130]):
        page = memoryview(bytearray((stop - start) * LING.values_per_token * 4))
        source.export_block(0, start // 64, stop - start, page)
        target.import_block(0, start // 64, stop - start, page)
    target.set_num_tokens(130)
    [out] = mixing.mix(mixer, [(target, x[130:])])
    assert torch.equal(torch.cat([before, out]), whole(mixer, x))


@pytest.mark.slow
def test_the_layer_is_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.bailing_hybrid.modeling_bailing_hybrid")
    weights, x = Weights(LING), rows(100)
    config = theirs.BailingHybridConfig(
        hidden_size=HIDDEN,
        num_attention_heads=LING.num_heads,
        num_key_value_heads=LING.num_heads,
        q_lora_rank=LING.query_rank,
        kv_lora_rank=LING.latent_dim,
        qk_nope_head_dim=LING.nope_dim,
        qk_rope_head_dim=LING.rope_dim,
        head_dim=LING.rope_dim,
        v_head_dim=LING.value_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 6e6},
        attn_implementation="eager",
    )
    layer = theirs.BailingHybridAttention(config, 0)
    layer.load_state_dict(
        {
            "q_a_proj.weight": weights.q_a,
            "q_a_layernorm.weight": weights.q_a_norm,
            "q_b_proj.weight": weights.q,
            "kv_a_proj_with_mqa.weight": weights.kv_a,
            "kv_a_layernorm.weight": weights.kv_norm,
            "kv_b_proj.weight": weights.kv_b,
            "o_proj.weight": weights.o,
            "g_proj.weight": weights.gate,
        },
        strict=True,
    )
    position = torch.arange(100)
    mask = torch.zeros(1, 1, 100, 100)
    mask.masked_fill_(position > position[:, None], float("-inf"))
    with torch.no_grad():
        turns = theirs.BailingHybridRotaryEmbedding(config)(x[None], position[None])
        expected = layer(x[None], position_embeddings=turns, attention_mask=mask)[0][0]
    torch.testing.assert_close(whole(weights.build(), x), expected, rtol=1e-4, atol=5e-5)
