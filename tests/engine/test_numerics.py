"""The start-up self-test: it passes here, names what is broken, and does not depend on threads."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

from prfaas.engine import linear, numerics
from prfaas.engine.attention import attend
from prfaas.engine.device import device_names
from prfaas.engine.kv import AttentionSpec
from prfaas.engine.layers.moe import MoeMlp
from prfaas.engine.linear import Packing
from prfaas.engine.loader import load_model
from prfaas.engine.mixer_spec import GqaSpec, MlaSpec
from prfaas.engine.model import Model
from prfaas.engine.model_spec import Activation
from prfaas.engine.numerics import (
    InexactKernelsError,
    activation_everywhere,
    long_attention,
    numerics_fingerprint,
    packing_of,
    self_test,
)
from prfaas.engine.probe import Probe
from prfaas.errors import ConfigError
from tests.engine.golden import load
from tests.tiny_models import Family, write_tiny_model


@cache
def tiny(family: Family) -> Model:
    return load(family)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "gemma3")


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
    assert words[:2] == ["cpu", model.packing]
    assert words[-1] == f"test-{self_test(model)[:32]}"


def test_the_fingerprint_names_neither_the_cpu_nor_libraries(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(model_dir, dtype="float32")
    for name in device_names(model.device):
        assert name not in model.numerics_fingerprint
    monkeypatch.setattr("torch.__version__", "2.99")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    assert numerics_fingerprint(model) == model.numerics_fingerprint


ONE_BIT = 1 + 2.0**-23


@pytest.mark.parametrize(
    "part", ["gated", "turns_of", "Probe.normal", "Model.norm", "Model.embed_tokens"]
)
def test_a_machine_that_rounds_otherwise_has_another_fingerprint(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    model = load_model(model_dir, dtype="float32")
    holder: Any = numerics
    name = part
    if part.startswith("Model."):
        holder, name = model, part.removeprefix("Model.")
    elif part.startswith("Probe."):
        holder, name = Probe, part.removeprefix("Probe.")
    exact = getattr(holder, name)
    monkeypatch.setattr(holder, name, lambda *args: exact(*args) * ONE_BIT)
    assert numerics_fingerprint(model) != model.numerics_fingerprint


@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_are_tested_over_the_whole_range_of_the_exponential(
    activation: Activation,
) -> None:
    result = activation_everywhere(activation)
    assert result.isfinite().all()
    assert len(set(result.flatten().tolist())) > 2000
    smallest = float(result.abs()[result != 0].min())
    assert smallest < 2.0**-126 or activation == "clamped_silu"  # a denormal is not flushed


def test_a_machine_that_flushes_denormals_has_another_fingerprint(model_dir: Path) -> None:
    model = load_model(model_dir, dtype="float32")
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        assert numerics_fingerprint(model) != model.numerics_fingerprint
    finally:
        torch.set_flush_denormal(False)


def test_other_weights_have_another_hash(model_dir: Path, tmp_path: Path) -> None:
    other = load_model(write_tiny_model(tmp_path, "gemma3", seed=1), dtype="float32")
    assert self_test(other) != self_test(load_model(model_dir, dtype="float32"))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_machine_whose_products_are_not_exact_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, dtype: Literal["float16", "float32"]
) -> None:
    monkeypatch.setattr("prfaas.engine.loading.parts.pack", broken_pack)
    with pytest.raises(ConfigError, match=rf"self-test fails.*{packing_of(dtype)}.*layer 0"):
        load_model(model_dir, dtype=dtype)


def test_a_head_that_is_not_exact_is_found(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(model_dir, dtype="float32")
    exact = model.lm_head
    monkeypatch.setattr(model, "lm_head", lambda x_MK: spoil(exact(x_MK)))
    with pytest.raises(InexactKernelsError, match="the head"):
        self_test(model)


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
def test_steps_that_are_not_exact_are_found(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend_otherwise(*args: Any, out_THGV: Tensor, **more: Any) -> None:
        attend(*args, out_THGV=out_THGV, **more)
        if len(args[1]) > 1:
            spoil(out_THGV)

    assert long_attention(spec, Probe()).isfinite().all()
    monkeypatch.setattr("prfaas.engine.numerics.attend", attend_otherwise)
    with pytest.raises(InexactKernelsError, match="attention of window"):
        long_attention(spec, Probe())


def broken_pack(weight_NK: Tensor, packing: Packing, bias_N: Tensor | None = None) -> linear.Linear:
    exact = linear.pack(weight_NK, packing, bias_N)
    return lambda x_MK: spoil(exact(x_MK))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_the_fingerprint_says_that_cuts_keep_the_bits(family: Family) -> None:
    assert tiny(family).numerics_fingerprint.split()[-2] == "exact"


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "minimax", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("num_rows", [3, 7, 66])  # a piece behind its neighbour's two rows
def test_a_walk_that_depends_on_how_tokens_were_cut_is_found(
    family: Family, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    index = next(i for i, layer in enumerate(model.config.layers) if layer.states)
    block = model.layers[index]
    exact = block.mixer
    assert exact is not None

    def mixer(x_TD: Tensor, *more: Any) -> Tensor:
        out_TD = exact(x_TD, *more)
        return spoil(out_TD) if len(x_TD) == num_rows else out_TD

    broken = replace(block, mixer=mixer)
    monkeypatch.setattr(
        model, "layers", (*model.layers[:index], broken, *model.layers[index + 1 :])
    )
    with pytest.raises(InexactKernelsError, match=rf"layer {index}"):
        self_test(model)


def test_an_expert_whose_rows_depend_on_their_neighbours_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("qwen3_moe")
    moe = next(layer.ffn for layer in model.layers if isinstance(layer.ffn, MoeMlp))
    exact = moe.experts[0]
    broken = [lambda x_TD: spoil(exact(x_TD)), *moe.experts[1:]]
    monkeypatch.setattr(moe, "experts", broken)
    with pytest.raises(InexactKernelsError, match=r"layer 0: "):
        self_test(model)
