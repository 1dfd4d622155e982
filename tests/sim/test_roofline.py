"""The bound counts what has to be computed, and no more."""

from pathlib import Path

import pytest

from prfaas.config.feasibility_file import Hardware
from prfaas.config.model_file import read_model
from prfaas.engine.mixer_spec import GqaSpec
from prfaas.sim.roofline import active_parameters, prefill_flops, roofline_s

MODELS = Path(__file__).parents[2] / "configs" / "models"
HARDWARE = Hardware(
    name="h", gpus=8, flops_per_s=1e15, memory_bytes_per_s=1e13, bytes_per_weight=2.0
)


@pytest.mark.parametrize(
    ("name", "billions"),
    # As their names say: A3B, A15B, A17B, A63B, A10B, A22B, the head included there.
    [
        ("kimi-linear-48b", 3),
        ("mimo-v2-flash", 15),
        ("qwen3.5-397b", 17),
        ("ring-2.5-1t", 63),
        ("minimax-m2.5", 10),
        ("qwen3-235b", 22),
    ],
)
def test_the_active_weights_are_about_what_the_model_is_named_for(name, billions):
    model = read_model(MODELS / f"{name}.json")
    total = active_parameters(model) + model.vocab_size * model.hidden_size
    assert total / 1e9 == pytest.approx(billions, rel=0.15)
    assert active_parameters(model) < model.num_parameters


def test_attention_counts_each_pair_that_a_query_sees():
    model = read_model(MODELS / "mimo-v2-flash.json")
    for length in (1, 5, 128, 129, 300):
        pairs = 0
        for layer in model.layers:
            assert isinstance(layer, GqaSpec)
            window = layer.window_tokens or length
            seen = sum(min(position + 1, window) for position in range(length))
            pairs += 2 * layer.num_heads * (layer.head_dim + layer.value_dim) * seen
        assert prefill_flops(model, length) == 2 * active_parameters(model) * length + pairs


def test_the_bound_is_the_slower_of_arithmetic_and_reading():
    model = read_model(MODELS / "qwen3-235b.json")
    short, long = roofline_s(model, 1, HARDWARE), roofline_s(model, 32_768, HARDWARE)
    assert short == pytest.approx(2 * active_parameters(model) / 1e13)
    assert long == pytest.approx(prefill_flops(model, 32_768) / 1e15)


def test_linear_mixers_add_no_pairs():
    model = read_model(MODELS / "kimi-linear-48b.json")
    full = [layer for layer in model.layers if layer.mixer == "mla"]
    per_pair = sum(2 * m.num_heads * (m.nope_dim + m.rope_dim + m.value_dim) for m in full)
    at = [prefill_flops(model, n) for n in (0, 1, 2)]
    assert at[0] == 0
    assert at[2] - 2 * at[1] == per_pair  # 3 pairs, and twice 1
