"""Reads which layers have routed experts, and how they are chosen."""

from collections.abc import Callable

from prfaas.engine.families.fields import Fields
from prfaas.engine.ffn_spec import FfnSpec, MlpSpec, MoeSpec
from prfaas.errors import ConfigError

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")


def dense(fields: Fields) -> MlpSpec:
    """Return the gated feed-forward of the config's intermediate_size."""
    return MlpSpec(
        intermediate_size=fields.integer("intermediate_size"), has_bias=fields.flag("mlp_bias")
    )


def softmax_experts(fields: Fields, *, is_renormalised: bool) -> MoeSpec:
    """Return Qwen's experts, with the shared part if the config has one."""
    shared = fields.count("shared_expert_intermediate_size")
    return MoeSpec(
        num_experts=fields.integer(*NUM_EXPERTS),
        experts_per_token=fields.integer(*EXPERTS_PER_TOKEN),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_size=shared,
        has_shared_gate=shared > 0,
        is_renormalised=fields.flag("norm_topk_prob", default=is_renormalised),
    )


def sigmoid_experts(
    fields: Fields,
    *,
    num_groups: int = 1,
    groups_per_token: int = 1,
    default_scale: float | None = None,
) -> MoeSpec:
    """Return DeepSeek's experts: scores are sigmoids, a bias joins the selection alone.

    Public code disagrees on a routed_scaling_factor that is missing: by default it is refused.
    """
    for name in ("moe_router_activation_func", "scoring_func", "score_function"):
        fields.refuse_unless(name, "sigmoid")
    fields.refuse_unless("topk_method", "noaux_tc")
    size = fields.integer("moe_intermediate_size")
    return MoeSpec(
        num_experts=fields.integer(*NUM_EXPERTS),
        experts_per_token=fields.integer(*EXPERTS_PER_TOKEN),
        intermediate_size=size,
        shared_size=fields.count("n_shared_experts", "num_shared_experts")
        * fields.integer("moe_shared_expert_intermediate_size", default=size),
        router="sigmoid",
        is_renormalised=fields.flag("norm_topk_prob", "moe_renormalize", default=True),
        routed_scale=fields.number("routed_scaling_factor", default=default_scale),
        num_groups=fields.integer("n_group", "num_expert_group", default=num_groups),
        groups_per_token=fields.integer("topk_group", default=groups_per_token),
    )


def dense_first(fields: Fields, moe: MoeSpec, default_dense: int) -> list[FfnSpec]:
    """Return experts in all but the first layers, unless the config lists the layers."""
    num_dense = fields.count("first_k_dense_replace")
    if "first_k_dense_replace" not in fields:
        num_dense = default_dense
    every = fields.integer("moe_layer_freq", default=1) if not listed(fields) else 1
    return by_layer(fields, moe, lambda layer: layer >= num_dense and layer % every == 0)


def listed(fields: Fields) -> bool:
    """Whether the config lists its expert layers one by one."""
    return isinstance(fields.get("mlp_layer_types", "moe_layer_freq"), list | tuple)


def by_layer(fields: Fields, moe: MoeSpec, has_experts: Callable[[int], bool]) -> list[FfnSpec]:
    """Return experts where the config lists them, else where `has_experts` says."""
    num_layers = fields.num_layers()
    if listed(fields):
        marks = fields.items("mlp_layer_types", "moe_layer_freq") or []
        if len(marks) != num_layers:
            raise ConfigError(f"mlp_layer_types names {len(marks)} of {num_layers} layers")
        sparse = [mark in {"sparse", "moe", 1} for mark in marks]
    else:
        sparse = [has_experts(layer) for layer in range(num_layers)]
    return [moe if is_sparse else dense(fields) for is_sparse in sparse]
