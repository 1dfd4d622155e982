"""LFM2's gated convolution: its formula, its bits under any cut, and transformers' layer.

Shapes: T rows, C channels, W conv width, D model dim.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.layers.shortconv import ShortConvCore, ShortConvMixer
from prfaas.engine.linear import pack
from prfaas.engine.mixer_spec import ShortConvSpec
from tests.engine.layers import mixing

SPEC = ShortConvSpec(channels=48, conv_width=3)
ODD = ShortConvSpec(channels=13, conv_width=4, has_bias=True)
SPECS = pytest.mark.parametrize("spec", [SPEC, ODD], ids=["lfm2", "odd"])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_conv(spec: ShortConvSpec) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    weight_WC = torch.randn(spec.conv_width, spec.channels, generator=generator)
    return weight_WC, torch.randn(spec.channels, generator=generator) if spec.has_bias else None


def new_core(spec: ShortConvSpec) -> ShortConvCore:
    weight_WC, bias_C = random_conv(spec)
    return ShortConvCore(spec, conv_weight_WC=weight_WC, conv_bias_C=bias_C)


def random_rows(num_rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def new_mixer(spec: ShortConvSpec) -> ShortConvMixer:
    generator = torch.Generator().manual_seed(0)
    weight_WC, bias_C = random_conv(spec)
    return ShortConvMixer(
        spec,
        in_proj=mixing.linear(3 * spec.channels, spec.channels, generator),
        conv_weight_WC=weight_WC,
        conv_bias_C=bias_C,
        out_proj=mixing.linear(spec.channels, spec.channels, generator),
    )


@SPECS
@pytest.mark.parametrize("num_rows", [1, 2, 70])
def test_an_output_is_the_weighted_sum_of_the_last_rows(spec: ShortConvSpec, num_rows: int) -> None:
    rows = random_rows(num_rows, spec.channels)
    state = (random_rows(spec.conv_width - 1, spec.channels, 1),)
    weight_WC, bias_C = random_conv(spec)
    seen = torch.cat([state[0], rows]).double()
    expected = torch.stack(
        [(weight_WC * seen[t : t + spec.conv_width]).sum(0) for t in range(num_rows)]
    )
    expected = expected if bias_C is None else expected + bias_C
    out, (end,) = mixing.scan(new_core(spec), rows, state)
    assert mixing.relative_error(out, expected) < 1e-6
    assert torch.equal(end, seen[num_rows:].float())


@SPECS
def test_steps_have_the_bits_of_a_scan(spec: ShortConvSpec) -> None:
    rows, state = random_rows(20, spec.channels), mixing.zero_state(spec)
    out, end = mixing.steps(new_core(spec), rows, state)
    expected, expected_end = mixing.scan(new_core(spec), rows, state)
    assert torch.equal(out, expected)
    assert mixing.same_bits(end, expected_end)


@given(at=mixing.cuts(), seed=st.integers(0, 99))
@settings(max_examples=15)
@SPECS
def test_any_cut_keeps_the_bits_of_rows_and_states(
    spec: ShortConvSpec, at: list[int], seed: int
) -> None:
    x_TD = random_rows(at[-1], spec.channels, seed)
    mixing.check_mixer_cuts(new_mixer(spec), spec, x_TD, at)


@SPECS
def test_neighbours_in_a_batch_do_not_change_a_bit(spec: ShortConvSpec) -> None:
    mixing.check_mixer_neighbours(new_mixer(spec), spec, random_rows(140, spec.channels))


@pytest.mark.slow
@pytest.mark.parametrize("has_bias", [False, True])
def test_lfm2_equals_transformers(has_bias: bool) -> None:
    transformers = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    config = transformers.Lfm2Config(
        hidden_size=SPEC.channels,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        layer_types=["conv"],
        conv_bias=has_bias,
    )
    torch.manual_seed(3)
    theirs = transformers.Lfm2ShortConv(config, 0).eval()
    weights = {name: value.detach() for name, value in theirs.state_dict().items()}
    spec = ShortConvSpec(channels=SPEC.channels, conv_width=3, has_bias=has_bias)
    in_proj = pack(weights["in_proj.weight"], mixing.PACKING)
    in_bias = weights.get("in_proj.bias", torch.zeros(1))
    out_proj = pack(weights["out_proj.weight"], mixing.PACKING)
    out_bias = weights.get("out_proj.bias", torch.zeros(1))
    mixer = ShortConvMixer(
        spec,
        in_proj=lambda x_MK: in_proj(x_MK) + in_bias,
        conv_weight_WC=weights["conv.weight"][:, 0].T,
        conv_bias_C=weights.get("conv.bias"),
        out_proj=lambda x_MK: out_proj(x_MK) + out_bias,
    )
    x_TD = torch.randn(70, SPEC.channels)
    with torch.no_grad():
        expected = theirs(x_TD[None])[0]
    rows = torch.cat(list(mixing.mixed(mixer, mixing.new_kv(spec), x_TD, [0, 50, 69, 70])))
    assert mixing.relative_error(rows, expected) < 3e-6
