"""Activations against torch's, and rows that do not depend on their neighbours."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from prfaas.engine.layers.mlp import SLAB_ROWS, GatedMlp, PlainMlp, activated
from prfaas.engine.model_spec import Activation
from tests.engine.second_device import second_device


def reference_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def reference_clamped(x: Tensor) -> Tensor:
    low = x.clamp(max=7.0)
    return low * torch.sigmoid(1.702 * low)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": reference_gelu,
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "clamped_silu": reference_clamped,
}
EXTREMES = [-1e4, -100.0, -20.0, -1e-3, -0.0, 0.0, 1e-30, 1e-3, 20.0, 100.0, 1e4]


@pytest.mark.parametrize("on_second", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_torchs(name: Activation, on_second: bool) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor(EXTREMES)])
    expected = ACTIVATIONS[name](x.double())
    if on_second:
        with second_device() as device:
            ours = activated(name, x.to(device)).cpu()
    else:
        ours = activated(name, x)
    torch.testing.assert_close(ours.double(), expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gated_layer_is_the_same_on_another_device(name: Activation) -> None:
    gate_up, down, x = torch.randn(2 * 24, 32), torch.randn(32, 24), torch.randn(8, 32) * 2

    def run(device: torch.device) -> Tensor:
        up_there, down_there = gate_up.T.to(device), down.T.to(device)
        mlp = GatedMlp(lambda x: x @ up_there, lambda x: x @ down_there, name, 24, gate_scale=0.3)
        return mlp(x.to(device)).cpu()

    with second_device() as device:
        there = run(device)
    torch.testing.assert_close(run(torch.device("cpu")), there, rtol=1e-5, atol=1e-4)


def test_slabs_do_not_change_rows() -> None:
    gate_up, down = torch.randn(2 * 96, 32) * 0.2, torch.randn(32, 96) * 0.1
    mlp = GatedMlp(lambda x: x @ gate_up.T, lambda x: x @ down.T, "silu", 96)
    x = torch.randn(2 * SLAB_ROWS + 24, 32)
    gate, up = (x.double() @ gate_up.T.double()).chunk(2, dim=-1)
    expected = (F.silu(gate) * up) @ down.T.double()
    torch.testing.assert_close(mlp(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_gated_layer_scales_its_gate_and_its_output() -> None:
    gate_up, down = torch.randn(2 * 24, 32), torch.randn(32, 24)
    mlp = GatedMlp(
        lambda x: x @ gate_up.T, lambda x: x @ down.T, "silu", 24, gate_scale=0.3, down_scale=1.7
    )
    x = torch.randn(8, 32)
    gate, up = (x.double() @ gate_up.T.double()).chunk(2, dim=-1)
    expected = (F.silu(0.3 * gate) * up) @ down.T.double() * 1.7
    torch.testing.assert_close(mlp(x).double(), expected, rtol=1e-4, atol=1e-3)


def test_a_clamped_layer_is_gpt_oss() -> None:
    gate_up, down = torch.randn(2 * 24, 32), torch.randn(32, 24)
    mlp = GatedMlp(lambda x: x @ gate_up.T, lambda x: x @ down.T, "clamped_silu", 24)
    x = torch.randn(8, 32) * 2
    gate, up = (x.double() @ gate_up.T.double()).chunk(2, dim=-1)
    assert gate.max() > 7
    assert up.abs().max() > 7
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = ((up + 1) * gate * torch.sigmoid(gate * 1.702)) @ down.T.double()
    torch.testing.assert_close(mlp(x).double(), expected, rtol=1e-4, atol=1e-3)


def test_a_plain_layer_has_no_gate() -> None:
    up, down = torch.randn(24, 32), torch.randn(32, 24)
    mlp = PlainMlp(lambda x: x @ up.T, lambda x: x @ down.T, "relu2")
    x = torch.randn(SLAB_ROWS + 8, 32)
    expected = F.relu(x.double() @ up.T.double()).square() @ down.T.double()
    torch.testing.assert_close(mlp(x).double(), expected, rtol=1e-4, atol=1e-3)
