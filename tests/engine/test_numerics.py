"""The start-up self-test: it passes here, names what is broken, and does not depend on threads."""

from concurrent.futures import Executor
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from prfaas.engine import linear
from prfaas.engine.attention import attend_steps
from prfaas.engine.kv import AttentionSpec
from prfaas.engine.layers.gqa import GqaMixer
from prfaas.engine.linear import Packing
from prfaas.engine.loader import load_model
from prfaas.engine.mixer_spec import GqaSpec, MlaSpec
from prfaas.engine.model import Model
from prfaas.engine.numerics import (
    InexactKernelsError,
    candidate_packings,
    self_test,
    steps_equal_tiles,
)
from prfaas.errors import ConfigError
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "gemma3")


def attentions(model: Model) -> list[GqaMixer]:
    return [mixer for layer in model.layers if isinstance(mixer := layer.mixer, GqaMixer)]


def spoil(y_MN: Tensor) -> Tensor:
    """What a kernel does that computes the last row of a batch in another order."""
    y_MN[-1] *= 1.0000002
    return y_MN


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_hash_does_not_depend_on_threads(
    model_dir: Path, dtype: Literal["float16", "float32"]
) -> None:
    model = load_model(model_dir, dtype=dtype)
    alone = self_test(model)
    torch.set_num_threads(2)
    try:
        assert self_test(model) == alone
    finally:
        torch.set_num_threads(1)


def test_the_fingerprint_names_what_decides_the_bits(model_dir: Path) -> None:
    model = load_model(model_dir, dtype="float32")
    words = model.numerics_fingerprint.split()
    assert words[0].endswith(torch.backends.cpu.get_cpu_capability())
    assert words[1] == f"torch-{torch.__version__}"
    assert model.packing in words[2]
    assert words[-1] == f"test-{self_test(model)[:16]}"


def test_other_weights_have_another_hash(model_dir: Path, tmp_path: Path) -> None:
    other = load_model(write_tiny_model(tmp_path, "gemma3", seed=1), dtype="float32")
    assert self_test(other) != self_test(load_model(model_dir, dtype="float32"))


def test_a_packing_that_is_not_exact_is_passed_over(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = candidate_packings("float16")[:2]
    broken = {first}
    monkeypatch.setattr("prfaas.engine.loading.parts.pack", packing_that_breaks(broken))
    assert load_model(model_dir, dtype="float16").packing == second


def test_a_machine_without_an_exact_packing_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = set(candidate_packings("float32"))
    monkeypatch.setattr("prfaas.engine.loading.parts.pack", packing_that_breaks(broken))
    with pytest.raises(ConfigError, match=r"no weight packing is exact.*layer 0"):
        load_model(model_dir, dtype="float32")


def test_a_head_that_is_not_exact_is_found(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(model_dir, dtype="float32")
    exact = model.lm_head
    monkeypatch.setattr(model, "lm_head", lambda x_MK: spoil(exact(x_MK)))
    with pytest.raises(InexactKernelsError, match="the head"):
        self_test(model)


def test_steps_that_are_not_exact_are_computed_as_tiles(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_model(model_dir, dtype="float32")
    assert all(mixer.attend.has_exact_steps for mixer in attentions(expected))
    monkeypatch.setattr(
        "prfaas.engine.numerics.attend_steps", lambda *a, **k: spoil(attend_steps(*a, **k))
    )
    model = load_model(model_dir, dtype="float32")
    assert not any(mixer.attend.has_exact_steps for mixer in attentions(model))
    assert model.numerics_fingerprint == expected.numerics_fingerprint


@pytest.mark.parametrize(
    "spec",
    [
        GqaSpec(
            num_heads=8,
            num_kv_heads=2,
            head_dim=24,
            value_head_dim=16,
            scale=0.2,
            rope=None,
            window_tokens=129,
            has_sinks=True,
        ),
        MlaSpec(
            num_heads=5,
            latent_dim=32,
            rope_dim=8,
            nope_dim=16,
            value_dim=16,
            scale=0.2,
            rope=None,
        ),
    ],
)
def test_steps_of_sinks_and_latents_are_tested_too(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert steps_equal_tiles(spec)
    monkeypatch.setattr(
        "prfaas.engine.numerics.attend_steps", lambda *a, **k: spoil(attend_steps(*a, **k))
    )
    assert not steps_equal_tiles(spec)


def packing_that_breaks(broken: set[Packing]) -> object:
    def pack(
        weight_NK: Tensor,
        packing: Packing,
        bias_N: Tensor | None = None,
        *,
        pool: Executor | None = None,
    ) -> linear.Linear:
        exact = linear.pack(weight_NK, packing, bias_N, pool=pool)
        return (lambda x_MK: spoil(exact(x_MK))) if packing in broken else exact

    return pack
