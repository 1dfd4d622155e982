"""Where torch's own kernels are tested: on the CPU, and on a CUDA device where there is one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from prfaas.engine.config import model_from_hf
from prfaas.engine.linear import Packing
from prfaas.engine.loading.build import build_model
from prfaas.engine.loading.checkpoint import Weights, read_json
from prfaas.engine.model import Model
from tests.tiny_models import Family, write_tiny_model


@dataclass(frozen=True)
class Place:
    device: str
    packing: Packing

    def __str__(self) -> str:
        return f"{self.device}-{self.packing}"


def on_cuda(*values: object) -> object:
    """Return a test's parameter that needs a CUDA device."""
    has_none = not torch.cuda.is_available()
    marks = (pytest.mark.gpu, pytest.mark.skipif(has_none, reason="there is no CUDA device"))
    return pytest.param(*values, marks=marks, id="-".join(map(str, values)))


DEVICES: Sequence[object] = ["cpu", on_cuda("cuda")]
PLACES: Sequence[object] = [
    pytest.param(Place("cpu", "torch-f32"), id="cpu-torch-f32"),
    pytest.param(Place("cpu", "torch-bf16"), id="cpu-torch-bf16"),
    on_cuda(Place("cuda", "torch-f32")),
    on_cuda(Place("cuda", "torch-bf16")),
]


@cache
def tiny_on(place: Place, family: Family) -> Model:
    """Return the tiny model of a family, on `place`; it has not been tested by itself."""
    with TemporaryDirectory() as directory:
        path = write_tiny_model(Path(directory), family)
        spec = model_from_hf(read_json(path / "config.json"))
        weights = Weights(path)
        return build_model(
            spec,
            weights,
            place.packing,
            model_fingerprint="tiny",
            device=torch.device(place.device),
        )
