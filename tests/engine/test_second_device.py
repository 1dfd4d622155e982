"""Every family on a device that is not the CPU, of which no GPU is needed: nothing is left behind."""

from itertools import pairwise

import pytest
import torch

from prfaas.engine.model import Segment
from prfaas.engine.numerics import self_test
from tests.engine.golden import Run
from tests.engine.places import Place, tiny_on
from tests.engine.second_device import SECOND, second_device
from tests.engine.test_device import (
    CUTS,
    FAMILIES,
    FEW,
    TOKENS,
    difference,
    expected,
    exported,
    imported,
    logits_of,
)
from tests.tiny_configs import Family

PLACE = Place(SECOND.type, "torch-f32")
TOLERANCE = 1e-4


ALIKE: tuple[Family, ...] = (
    "bamba",
    "llama",
    "minimax_m2",
    "olmo_hybrid",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "ring",
)
"""Made of the layers of others."""


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ALIKE])
def test_weights_constants_masks_and_states_meet_on_the_device(family: Family) -> None:
    with second_device():
        logits = logits_of(tiny_on(PLACE, family))
        assert logits.device.type == "cpu"
    assert difference(logits, expected(family)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", FEW)
def test_pages_go_to_the_host_and_come_back_beside_a_neighbour(family: Family) -> None:
    with second_device():
        model = tiny_on(PLACE, family)
        run, neighbour = Run(model), Run(model)
        for start, stop in pairwise((0, *CUTS, len(TOKENS))):
            segments = [
                Segment(kv=kv, tokens=tokens, num_logits=1)
                for kv, tokens, end in (
                    (neighbour.kv, [5, 6], 0),
                    (run.kv, TOKENS[start:stop], len(TOKENS)),
                )
            ]
            model.forward(segments)
        pages = exported(model, run.kv)
        there = imported(model, pages)
        assert exported(model, there.kv) == pages
        fork = Run(model)
        fork.kv = run.kv.fork()
        rows = [each.forward(TOKENS[:1]) for each in (run, there, fork)]
    wanted = expected(family)[len(CUTS) + 1].expand(3, -1)
    assert difference(torch.stack(rows), wanted) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", FEW)
def test_the_self_test_runs_there(family: Family) -> None:
    with second_device():
        assert self_test(tiny_on(PLACE, family))


def test_a_cpu_tensor_is_not_taken_for_one_of_the_device() -> None:
    with second_device() as device:
        ours, left_behind = torch.ones(3, device=device), torch.ones(3)
        with pytest.raises(RuntimeError, match="meets a CPU tensor"):
            ours + left_behind
        with pytest.raises(RuntimeError, match="meets a CPU tensor"):
            ours.index_add_(0, torch.tensor([0]), torch.ones(1, device=device))
        assert (ours + 1.0).device == device
        assert torch.equal((ours + left_behind.to(device)).cpu(), torch.full((3,), 2.0))
        assert torch.equal(ours[torch.tensor([0, 2])].cpu(), torch.ones(2))
