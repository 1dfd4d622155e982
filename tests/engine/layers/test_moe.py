"""Routed experts against a float64 sum over all experts and transformers' own, row by row."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from prfaas.engine.ffn_spec import MoeSpec
from prfaas.engine.layers.mlp import GatedMlp, PlainMlp
from prfaas.engine.layers.moe import MoeMlp
from prfaas.engine.linear import ExactPacking, Linear, Packing, pack

PACKINGS = get_args(ExactPacking)
HIDDEN, WIDTH = 32, 24
QWEN = MoeSpec(
    num_experts=128,
    experts_per_token=8,
    intermediate_size=WIDTH,
    shared_size=40,
    has_shared_gate=True,
)
KIMI = MoeSpec(
    num_experts=64,
    experts_per_token=6,
    intermediate_size=WIDTH,
    shared_size=WIDTH,
    router="sigmoid",
    routed_scale=2.5,
    num_groups=8,
    groups_per_token=3,
)
GPT_OSS = MoeSpec(
    num_experts=16,
    experts_per_token=4,
    intermediate_size=WIDTH,
    router="top_softmax",
    has_bias=True,
)
NEMOTRON = MoeSpec(
    num_experts=12,
    experts_per_token=3,
    intermediate_size=WIDTH,
    shared_size=40,
    router="sigmoid",
    is_gated=False,
    latent_size=16,
)
MINIMAX = MoeSpec(
    num_experts=9,
    experts_per_token=2,
    intermediate_size=WIDTH,
    router="sigmoid",
    is_renormalised=False,
)
SPECS = {"qwen": QWEN, "kimi": KIMI, "gpt-oss": GPT_OSS, "nemotron": NEMOTRON, "minimax": MINIMAX}


class Weights:
    """Random weights of one layer."""

    def __init__(self, spec: MoeSpec) -> None:
        self.spec = spec
        self._generator = torch.Generator().manual_seed(1)
        inner = spec.latent_size or HIDDEN
        ups = 2 if spec.is_gated else 1
        self.router = self.random(spec.num_experts, HIDDEN)
        self.router_bias = self.random(spec.num_experts) if spec.has_bias else None
        self.selection_bias = self.random(spec.num_experts) if spec.router == "sigmoid" else None
        self.up = self.random(spec.num_experts, ups * spec.intermediate_size, inner)
        self.down = self.random(spec.num_experts, inner, spec.intermediate_size)
        self.up_bias = self.down_bias = None
        if spec.has_bias:
            self.up_bias = self.random(spec.num_experts, ups * spec.intermediate_size)
            self.down_bias = self.random(spec.num_experts, inner)
        self.shared_up = self.random(ups * spec.shared_size, HIDDEN)
        self.shared_down = self.random(HIDDEN, spec.shared_size)
        self.shared_gate = self.random(1, HIDDEN)
        self.latent_in, self.latent_out = self.random(inner, HIDDEN), self.random(HIDDEN, inner)

    def random(self, *shape: int) -> Tensor:
        # Of few bits, so that float16 holds them exactly.
        return torch.randint(-64, 65, shape, generator=self._generator) / 256.0

    def build(self, packing: Packing) -> MoeMlp:
        spec = self.spec
        linear = partial(pack, packing=packing)
        shared: Callable[[Tensor], Tensor] | None = None
        if spec.shared_size:
            shared = self._ffn(self.shared_up, None, self.shared_down, None, packing)
        return MoeMlp(
            spec,
            router=linear(self.router, bias_N=self.router_bias),
            selection_bias_E=self.selection_bias,
            experts=[
                self._ffn(
                    self.up[expert],
                    None if self.up_bias is None else self.up_bias[expert],
                    self.down[expert],
                    None if self.down_bias is None else self.down_bias[expert],
                    packing,
                )
                for expert in range(spec.num_experts)
            ],
            shared=shared,
            shared_gate=linear(self.shared_gate) if spec.has_shared_gate else None,
            latent_in=linear(self.latent_in) if spec.latent_size else None,
            latent_out=linear(self.latent_out) if spec.latent_size else None,
        )

    def _ffn(
        self,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        packing: Packing,
    ) -> Callable[[Tensor], Tensor]:
        up_proj: Linear = pack(up, packing, up_bias)
        down_proj: Linear = pack(down, packing, down_bias)
        if not self.spec.is_gated:
            return PlainMlp(up_proj, down_proj, "relu2")
        if self.spec.has_bias:
            return GatedMlp(up_proj, down_proj, "clamped_silu", down.shape[1])
        return GatedMlp(up_proj, down_proj, "silu", down.shape[1])

    def reference(self, x_TD: Tensor) -> Tensor:
        """The same in float64: every expert computes every token."""
        spec, x = self.spec, x_TD.double()
        logits = x @ self.router.double().T
        if self.router_bias is not None:
            logits += self.router_bias
        weights_TE = torch.stack([self._reference_weights(row) for row in logits])
        inner = x @ self.latent_in.double().T if spec.latent_size else x
        routed = torch.zeros_like(inner)
        for expert in range(spec.num_experts):
            up = inner @ self.up[expert].double().T
            if self.up_bias is not None:
                up += self.up_bias[expert]
            out = self._reference_activation(up) @ self.down[expert].double().T
            if self.down_bias is not None:
                out += self.down_bias[expert]
            routed += weights_TE[:, expert, None] * out
        out = routed @ self.latent_out.double().T if spec.latent_size else routed
        if spec.shared_size:
            up = x @ self.shared_up.double().T
            shared = self._reference_activation(up) @ self.shared_down.double().T
            out += (
                shared * (x @ self.shared_gate.double().T).sigmoid()
                if spec.has_shared_gate
                else shared
            )
        return out

    def _reference_activation(self, up: Tensor) -> Tensor:
        if not self.spec.is_gated:
            return F.relu(up).square()
        gate, up = up.chunk(2, dim=-1)
        if self.spec.has_bias:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return (up + 1) * gate * (1.702 * gate).sigmoid()
        return F.silu(gate) * up

    def _reference_weights(self, logits: Tensor) -> Tensor:
        """One token's weight of each expert, most of them 0, by sorting in plain Python."""
        spec = self.spec
        scores = logits.sigmoid() if spec.router == "sigmoid" else logits.softmax(-1)
        selection = scores if self.selection_bias is None else scores + self.selection_bias
        size = spec.num_experts // spec.num_groups
        groups = [selection[first : first + size] for first in range(0, spec.num_experts, size)]
        ranked = sorted(
            range(spec.num_groups), key=lambda group: -float(groups[group].sort().values[-2:].sum())
        )
        allowed = set(ranked[: spec.groups_per_token])
        experts = [e for e in range(spec.num_experts) if e // size in allowed]
        chosen = sorted(experts, key=lambda e: -float(selection[e]))[: spec.experts_per_token]
        weights = torch.zeros_like(logits)
        weights[chosen] = scores[chosen]
        if spec.is_renormalised or spec.router == "top_softmax":
            weights /= weights.sum()
        return weights * spec.routed_scale


def rows(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SPECS)
def test_the_output_is_the_weighted_sum_of_the_chosen_experts(name: str) -> None:
    weights, x = Weights(SPECS[name]), rows(48)
    ours = weights.build("fma-f32")(x)
    torch.testing.assert_close(ours.double(), weights.reference(x), rtol=1e-4, atol=1e-4)


def test_groups_limit_the_choice() -> None:
    x = rows(48)
    limited = Weights(KIMI).build("fma-f32")
    free = Weights(replace(KIMI, num_groups=1, groups_per_token=1)).build("fma-f32")
    assert not torch.equal(limited(x), free(x))
    chosen, _ = limited.choose(limited.router(x))
    assert all(len(set(row.tolist())) <= KIMI.groups_per_token for row in chosen // 8)


def test_the_selection_bias_does_not_weigh() -> None:
    weights = Weights(replace(MINIMAX, is_renormalised=False))
    x = rows(16)
    moe = weights.build("fma-f32")
    chosen, found = moe.choose(moe.router(x))
    scores = (x @ weights.router.T).sigmoid()
    torch.testing.assert_close(found, scores.gather(1, chosen), rtol=1e-5, atol=1e-6)
    assert not torch.equal(chosen, scores.topk(2).indices)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", SPECS)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_a_rows_bits_depend_on_itself_alone(
    name: str, packing: Packing, data: st.DataObject
) -> None:
    moe = Weights(SPECS[name]).build(packing)
    whole_x = rows(130)
    whole = moe(whole_x)
    picked = data.draw(st.lists(st.integers(0, 129), min_size=1, max_size=40), label="rows")
    assert torch.equal(moe(whole_x[picked]), whole[picked])


@pytest.mark.parametrize("num_rows", [1, 40])
def test_an_expert_computes_the_rows_that_chose_it_and_no_others(num_rows: int) -> None:
    moe, x = Weights(QWEN).build("fma-f32"), rows(num_rows)
    seen = [0] * QWEN.num_experts

    def counting(index: int, expert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            seen[index] += len(x)
            return expert(x)

        return call

    moe.experts = [counting(index, expert) for index, expert in enumerate(moe.experts)]
    moe(x)
    chosen_TK, _ = moe.choose(moe.router(x))
    assert seen == torch.bincount(chosen_TK.flatten(), minlength=QWEN.num_experts).tolist()


def load(module: Any, **tensors: Tensor | None) -> Any:
    state = {name.replace("__", "."): value for name, value in tensors.items() if value is not None}
    module.load_state_dict(state, strict=True)
    return module.eval()


def sizes(spec: MoeSpec) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": WIDTH,
    }


def as_qwen(weights: Weights) -> Any:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = qwen.Qwen3NextConfig(
        **sizes(QWEN), num_experts=QWEN.num_experts, shared_expert_intermediate_size=40
    )
    gate, up = weights.shared_up.chunk(2)
    return load(
        qwen.Qwen3NextSparseMoeBlock(config),
        experts__gate_up_proj=weights.up,
        experts__down_proj=weights.down,
        gate__weight=weights.router,
        shared_expert__gate_proj__weight=gate,
        shared_expert__up_proj__weight=up,
        shared_expert__down_proj__weight=weights.shared_down,
        shared_expert_gate__weight=weights.shared_gate,
    )


def as_kimi(weights: Weights) -> Any:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = kimi.KimiLinearConfig(
        **sizes(KIMI),
        num_local_experts=KIMI.num_experts,
        n_shared_experts=1,
        routed_scaling_factor=KIMI.routed_scale,
        n_group=KIMI.num_groups,
        topk_group=KIMI.groups_per_token,
        norm_topk_prob=True,
    )
    gate, up = weights.shared_up.chunk(2)
    return load(
        kimi.KimiLinearMoE(config),
        experts__gate_up_proj=weights.up,
        experts__down_proj=weights.down,
        gate__weight=weights.router,
        gate__e_score_correction_bias=weights.selection_bias,
        shared_experts__gate_proj__weight=gate,
        shared_experts__up_proj__weight=up,
        shared_experts__down_proj__weight=weights.shared_down,
    )


def as_gpt_oss(weights: Weights) -> Any:
    oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = oss.GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_local_experts=GPT_OSS.num_experts,
        num_experts_per_tok=GPT_OSS.experts_per_token,
    )
    assert weights.up_bias is not None
    # Its gate and up are interleaved, and its matrices transposed.
    up = torch.stack(weights.up.chunk(2, dim=1), dim=2).flatten(1, 2)
    up_bias = torch.stack(weights.up_bias.chunk(2, dim=1), dim=2).flatten(1, 2)
    return load(
        oss.GptOssMLP(config),
        experts__gate_up_proj=up.transpose(1, 2),
        experts__gate_up_proj_bias=up_bias,
        experts__down_proj=weights.down.transpose(1, 2),
        experts__down_proj_bias=weights.down_bias,
        router__weight=weights.router,
        router__bias=weights.router_bias,
    )


def as_nemotron(weights: Weights) -> Any:
    nemotron = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    config = nemotron.NemotronHConfig(
        **sizes(NEMOTRON),
        n_routed_experts=NEMOTRON.num_experts,
        moe_shared_expert_intermediate_size=40,
        moe_latent_size=NEMOTRON.latent_size,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
    )
    return load(
        nemotron.NemotronHMoE(config),
        experts__up_proj=weights.up,
        experts__down_proj=weights.down,
        gate__weight=weights.router,
        gate__e_score_correction_bias=weights.selection_bias,
        shared_experts__up_proj__weight=weights.shared_up,
        shared_experts__down_proj__weight=weights.shared_down,
        fc1_latent_proj__weight=weights.latent_in,
        fc2_latent_proj__weight=weights.latent_out,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "theirs"),
    [(QWEN, as_qwen), (KIMI, as_kimi), (GPT_OSS, as_gpt_oss), (NEMOTRON, as_nemotron)],
)
def test_the_layer_is_transformers(spec: MoeSpec, theirs: Callable[[Weights], Any]) -> None:
    weights, x = Weights(spec), rows(48)
    with torch.no_grad():
        expected = theirs(weights)(x[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    ours = weights.build("fma-f32")(x)
    torch.testing.assert_close(ours, expected.view(ours.shape), rtol=1e-4, atol=1e-5)
