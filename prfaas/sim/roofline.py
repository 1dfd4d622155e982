"""The least time a prefill can take: its arithmetic at the peak, or its weights read once."""

from dataclasses import replace

from prfaas.config.feasibility_file import Hardware
from prfaas.engine.ffn_spec import FfnSpec, MoeSpec
from prfaas.engine.mixer_spec import GqaSpec, MixerSpec, MlaSpec, ParallelSpec
from prfaas.engine.model_spec import ModelSpec
from prfaas.engine.parameters import ffn_parameters, mixer_parameters


def roofline_s(model: ModelSpec, num_tokens: int, hardware: Hardware) -> float:
    """Return a lower bound of T_prefill(num_tokens) on the hardware, for a batch of one."""
    arithmetic_s = prefill_flops(model, num_tokens) / hardware.flops_per_s
    # Every token may choose the same experts, so only the weights of one token are sure to be read.
    read_bytes = active_parameters(model) * hardware.bytes_per_weight
    return max(arithmetic_s, read_bytes / hardware.memory_bytes_per_s)


def active_parameters(model: ModelSpec) -> int:
    """Return the weights that multiply each token of a prompt; embedding and head are left out."""
    mixers = sum(mixer_parameters(layer, model.hidden_size) for layer in model.layers)
    return mixers + sum(_active(ffn, model.hidden_size) for ffn in model.ffns)


def prefill_flops(model: ModelSpec, num_tokens: int) -> int:
    """Return the multiplications and additions with active weights and between queries and keys.

    What linear mixers do with their states is left out: it is small, and a bound may be too low.
    """
    pairs = sum(_attention_flops(layer, num_tokens) for layer in model.layers)
    return 2 * active_parameters(model) * num_tokens + pairs


def _active(ffn: FfnSpec | None, hidden_size: int) -> int:
    if not isinstance(ffn, MoeSpec):
        return ffn_parameters(ffn, hidden_size)
    chosen = replace(ffn, num_experts=ffn.experts_per_token, num_groups=1, groups_per_token=1)
    router = (ffn.num_experts - ffn.experts_per_token) * hidden_size
    return ffn_parameters(chosen, hidden_size) + router


def _attention_flops(layer: MixerSpec, num_tokens: int) -> int:
    match layer:
        case ParallelSpec():
            return _attention_flops(layer.attention, num_tokens)
        case GqaSpec():
            width = layer.head_dim + layer.value_dim
        case MlaSpec():
            width = layer.nope_dim + layer.rope_dim + layer.value_dim
        case _:
            return 0
    return 2 * layer.num_heads * width * _seen(num_tokens, layer.window_tokens)


def _seen(num_tokens: int, window_tokens: int | None) -> int:
    """How many pairs of a query and a key that it sees there are."""
    window = num_tokens if window_tokens is None else min(window_tokens, num_tokens)
    return window * (window + 1) // 2 + (num_tokens - window) * window
