"""Loads a model directory: config.json and safetensors, every tensor accounted for.

Weights are mapped, packed one matrix at a time, and let go; only the embedding table stays mapped,
on a CPU, and a large head, of which greedy requests read a few rows.
"""

from pathlib import Path

from prfaas.engine.config import model_from_hf
from prfaas.engine.device import find_device
from prfaas.engine.loading.build import build_model
from prfaas.engine.loading.checkpoint import (
    Weights,
    model_fingerprint,
    read_json,
    weights_fingerprint,
)
from prfaas.engine.model import Model
from prfaas.engine.numerics import (
    InexactKernelsError,
    numerics_fingerprint,
    packing_of,
)
from prfaas.engine.options import WeightDtype
from prfaas.errors import ConfigError

__all__ = ["Weights", "load_model", "weights_fingerprint"]


def load_model(
    model_dir: Path,
    *,
    dtype: WeightDtype = "float16",
    device: str = "cpu",
) -> Model:
    """Return the model in `model_dir`, its weights packed for `dtype` on `device`.

    Raises:
        ConfigError: a file is missing or damaged, a feature is not supported, a tensor is missing,
            left over or of another shape, there is no such device, it has no such dtype, or the
            self-test fails.
    """
    place = find_device(device)
    packing = packing_of(dtype, place)
    spec = model_from_hf(read_json(model_dir / "config.json"))
    weights = Weights(model_dir)
    fingerprint = model_fingerprint(model_dir, weights)
    model = build_model(
        spec,
        weights,
        packing,
        model_fingerprint=fingerprint,
        device=place,
    )
    weights.check_all_taken(spec, model.embed_tokens.weight)
    weights.release()
    try:
        model.numerics_fingerprint = numerics_fingerprint(model)
    except InexactKernelsError as error:
        raise ConfigError(f"the self-test fails on this machine with {packing}: {error}") from error
    return model
