"""What a config.json describes is what transformers builds: weights, caches, slopes, scales."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from prfaas.engine.families.registry import describe
from prfaas.engine.mixer_spec import LightningSpec, MixerSpec, MlaSpec
from tests.engine.families.tiny_hf import config_json, hf_configs

pytestmark = pytest.mark.slow
CONFIGS = hf_configs()
NUM_TOKENS = 40
PARALLEL_CACHE_IS_ODD = "minimax"
"""Keeps its lightning state in a cache class of its own."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hide that the fast kernels are not installed."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.set_verbosity(verbosity)


def build(config: PreTrainedConfig, device: str) -> PreTrainedModel:
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


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
