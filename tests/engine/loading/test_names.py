"""Every family of the registry has names, and a checkpoint's tensors are all counted."""

import pytest
import torch

from prfaas.engine.config import model_from_hf
from prfaas.engine.families.registry import BAILING, READERS
from prfaas.engine.loading.build import build_model
from prfaas.engine.loading.names import NAMES
from tests.tiny_configs import FAMILIES, Family, tiny_config
from tests.tiny_models import Recorder


def test_every_family_of_the_registry_has_names() -> None:
    assert set(NAMES) == {*READERS, BAILING}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_are_as_many_numbers_as_the_description_counts(family: Family) -> None:
    model, recorder = model_from_hf(tiny_config(family)), Recorder()
    build_model(model, recorder, "fma-f32", model_fingerprint="")
    stored = sum(
        torch.Size(shape).numel()
        for name, shape in recorder.shapes.items()
        if not name.endswith(("correction_bias", "expert_bias"))  # buffers in transformers
    )
    assert stored == model.num_parameters
