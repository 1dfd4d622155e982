"""RMS norm against its formula in float64."""

import pytest
import torch

from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.rope import RopeTable
from prfaas.engine.rope_spec import RopeSpec
from tests.engine.second_device import second_device


@pytest.mark.parametrize("has_unit_offset", [False, True])
@pytest.mark.parametrize("shape", [(7, 640), (5, 3, 64)])
def test_norms_equal_the_formula(shape: tuple[int, ...], has_unit_offset: bool) -> None:
    x, weight = torch.randn(shape) * 10, torch.randn(shape[1:])
    norm = RmsNorm(weight, 1e-6, has_unit_offset=has_unit_offset)
    factor = weight.double() + (1.0 if has_unit_offset else 0.0)
    rms = (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x).double(), x.double() / rms * factor, rtol=1e-5, atol=1e-6)


def test_a_zero_row_stays_zero() -> None:
    norm = RmsNorm(torch.ones(64), 1e-6, has_unit_offset=False)
    assert torch.equal(norm(torch.zeros(2, 64)), torch.zeros(2, 64))


@pytest.mark.parametrize("size", [64, 576, 640, 1000])
def test_rows_do_not_depend_on_their_neighbours(size: int) -> None:
    norm = RmsNorm(torch.randn(size), 1e-6, has_unit_offset=True)
    x = torch.randn(50, size) * 3
    whole = norm(x)
    for start in range(0, 50, 7):
        for count in (1, 2, 3, 5, 8):
            assert torch.equal(norm(x[start : start + count].clone()), whole[start:][:count])


def test_another_device_norms_turns_and_adds_as_this_one() -> None:
    weight, x, y = torch.randn(3, 24), torch.randn(5, 3, 24), torch.randn(5, 24)

    def run(device: torch.device) -> list[torch.Tensor]:
        heads = RmsNorm(weight.to(device), 1e-6, has_unit_offset=False)
        row = RmsNorm(weight[0].to(device), 1e-6, has_unit_offset=True)
        turns = RopeTable(RopeSpec(theta=1e4), 24, device).at(torch.arange(5).to(device), 5)
        stream, plain = y.to(device).clone(), y.to(device).clone()
        row.add_to(stream, y.to(device), 0.5)
        row.add_to(plain, y.to(device))
        x_there = x.to(device)
        outs = [heads(x_there), heads.turned(x_there, turns), row(x_there), stream, plain]
        return [out.cpu() for out in outs]

    with second_device() as device:
        there = run(device)
    for ours, theirs in zip(run(torch.device("cpu")), there, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
