"""What a config.json describes is what transformers builds: weights, caches, slopes, scales."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    MiniMaxM2Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.mimo_v2_flash.configuration_mimo_v2_flash import MiMoV2FlashConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from prfaas.engine.families.registry import describe
from prfaas.engine.mixer_spec import (
    GqaSpec,
    LightningSpec,
    MixerSpec,
    MlaSpec,
    ParallelSpec,
)
from prfaas.engine.rope_spec import RopeSpec, YarnScaling
from tests.engine.families.tiny_hf import config_json, hf_configs

pytestmark = pytest.mark.slow
CONFIGS = hf_configs()
MODELS = Path(__file__).parents[3] / "configs" / "models"
auto_model: Any = transformers.AutoModelForCausalLM
logging: Any = transformers.utils.logging
NUM_TOKENS = 40
PARALLEL_CACHE_IS_ODD = "minimax"
"""Keeps its lightning state in a cache class of its own."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hide that the fast kernels are not installed."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.set_verbosity(verbosity)


def build(config: PreTrainedConfig, device: str) -> PreTrainedModel:
    with torch.device(device):
        model: PreTrainedModel = auto_model.from_config(config, dtype=torch.float32).eval()
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_as_many_weights_are_counted_as_transformers_makes(name: str) -> None:
    model = build(CONFIGS[name], "meta")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert describe(config_json(CONFIGS[name])).num_parameters == num_parameters


def cache_shapes(layer: object) -> tuple[list[list[int]], list[list[int]]]:
    """Return the shapes, without the batch, of K and V (or the latent), and of the states."""
    kv, states = [], []
    for name in ("keys", "values"):
        tensor = getattr(layer, name, None)
        if isinstance(tensor, torch.Tensor):
            kv.append(list(tensor.shape[1:]))
    for name in ("conv_states", "recurrent_states"):
        for tensor in getattr(layer, name, {}).values():
            if tensor is not None:
                states.append(list(tensor.shape[1:]))
    return kv, states


def expected_shapes(layer: MixerSpec) -> tuple[int, list[list[int]]]:
    """Return the numbers kept in K and V, and the shapes of the states as transformers has them.

    Its convolution states are [channels, width], the oldest column dead.
    """
    states = []
    for state in layer.states:
        shape = list(state.shape)
        states.append([shape[1], shape[0] + 1] if state.name == "conv" else shape)
    return layer.kept_tokens(NUM_TOKENS) * layer.values_per_token, states


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != PARALLEL_CACHE_IS_ODD])
def test_every_layer_keeps_what_its_transformers_cache_holds(name: str) -> None:
    model = build(CONFIGS[name], "cpu")
    tokens = torch.randint(3, 128, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = model(input_ids=tokens, use_cache=True).past_key_values
    layers = describe(config_json(CONFIGS[name])).layers
    assert len(layers) == len(cache.layers)
    for layer, cached in zip(layers, cache.layers, strict=True):
        kv, states = cache_shapes(cached)
        num_values, expected = expected_shapes(layer)
        assert sum(torch.Size(shape).numel() for shape in kv) == num_values
        assert states == expected


def test_lightning_keeps_and_decays_as_minimax_does() -> None:
    config = CONFIGS["minimax"]
    model = build(config, "cpu")
    with torch.no_grad():
        cache = model(input_ids=torch.arange(3, 43)[None], use_cache=True).past_key_values
    layers = describe(config_json(config)).layers
    for index, layer in enumerate(layers):
        if not isinstance(layer, LightningSpec):
            continue
        assert [list(cache.linear_cache[index].shape[1:])] == [list(s.shape) for s in layer.states]
        heads = torch.arange(1, layer.num_heads + 1)
        slopes = 2 ** (-8 * heads / layer.num_heads) * layer.slope_scale
        theirs = model.model.layers[index].self_attn.slope_rate.flatten()
        torch.testing.assert_close(slopes, theirs)


@pytest.mark.parametrize("name", ["ling3", "kimi_linear"])
def test_latent_attention_scales_as_transformers_does(name: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 0.7, "rope_theta": 1e4}
    config = CONFIGS[name]
    fields = config_json(config)
    if name == "ling3":
        fields["rope_parameters"] = yarn | {"original_max_position_embeddings": 64}
        config = type(config)(**fields)
    model = build(config, "meta")
    layers = describe(fields).layers
    found = 0
    for index, layer in enumerate(layers):
        if isinstance(layer, MlaSpec):
            found += 1
            assert layer.scale == pytest.approx(model.model.layers[index].self_attn.scaling)
    assert found


def their_frequencies(model: PreTrainedModel) -> set[tuple[float, ...]]:
    return {
        rounded(buffer)
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name
    }


def our_frequencies(layer: MixerSpec) -> tuple[float, ...] | None:
    attention = layer.attention if isinstance(layer, ParallelSpec) else layer
    if not isinstance(attention, GqaSpec | MlaSpec) or attention.rope is None:
        return None
    whole = attention.rope_dim if isinstance(attention, MlaSpec) else attention.head_dim
    dim = attention.rope.rotary_dim or whole
    return rounded(attention.rope.theta ** (-torch.arange(0, dim, 2).float() / dim))


def rounded(frequencies: torch.Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in frequencies.tolist())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt_oss"])
def test_as_many_dimensions_turn_as_fast_as_in_transformers(name: str) -> None:
    theirs = their_frequencies(build(CONFIGS[name], "cpu"))
    ours = {our_frequencies(layer) for layer in describe(config_json(CONFIGS[name])).layers}
    assert ours - {None} == theirs


def test_gpt_oss_is_stretched_by_yarn() -> None:
    (rope,) = {
        layer.rope
        for layer in describe(config_json(CONFIGS["gpt_oss"])).layers
        if isinstance(layer, GqaSpec)
    }
    yarn = YarnScaling(factor=32.0, original_context_tokens=4096, is_truncated=False)
    assert rope == RopeSpec(theta=150_000.0, scaling=yarn)


PUBLISHED = {
    # file: transformers' class, and the parameters that the model's name or card gives
    "kimi-linear-48b": (KimiLinearConfig, 48e9),
    "mimo-v2-flash": (MiMoV2FlashConfig, 309e9),
    "minimax-m2.5": (MiniMaxM2Config, 229e9),
    "qwen3-235b": (Qwen3MoeConfig, 235e9),
    "qwen3.5-397b": (Qwen3_5MoeTextConfig, 397e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_config_describes_the_published_model(name: str) -> None:
    config_class, published = PUBLISHED[name]
    fields = json.loads((MODELS / f"{name}.json").read_text())
    model = describe(fields)
    fields = {k: v for k, v in fields.get("text_config", fields).items() if k[0] != "_"}
    theirs = build(config_class(**fields), "meta")
    assert model.num_parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert model.num_parameters == pytest.approx(published, rel=0.025)
    assert describe(config_json(theirs.config)).layers == model.layers
