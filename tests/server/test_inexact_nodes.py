"""Real nodes whose rows depend on the batch: they work, and never call an answer exact."""

from dataclasses import replace

import pytest
import torch

from prfaas.clock import monotonic_s
from prfaas.engine.linear import Packing
from prfaas.engine.numerics import packing_of
from prfaas.engine.options import WeightDtype
from prfaas.server import verify
from prfaas.server.verify import verify_node, verify_tokens
from prfaas.types import Request, RequestRecord, RouteName, SamplingParams
from tests.engine.places import PLACES, Place
from tests.server.real_nodes import RealNodes, real_nodes
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
NUM_TOKENS = 150
DTYPES: dict[Packing, WeightDtype] = {"torch-bf16": "bfloat16", "torch-f32": "float32"}
TOLERANCES: dict[Packing, float] = {"torch-bf16": 1.0, "torch-f32": 1e-3}
"""Of a logit; they are of size 1 to 3."""


def use_torch_on_cpu(monkeypatch: pytest.MonkeyPatch, packing: Packing, of: WeightDtype) -> None:
    """On the CPU, where no option does it, weights of the dtype `of` get torch's kernels."""

    def packed(dtype: WeightDtype, device: torch.device) -> Packing:
        if device.type == "cpu" and dtype == of:
            return packing
        return packing_of(dtype, device)

    monkeypatch.setattr("prfaas.engine.loader.packing_of", packed)


async def ask(nodes: RealNodes, name: str, route: RouteName) -> RequestRecord:
    request = Request(
        request_id=name,
        prompt_tokens=verify_tokens(nodes.pd.tokenizer.encode, NUM_TOKENS),
        sampling=SamplingParams(max_tokens=8, seed=5, temperature=0.0),
        cache_salt=name.encode(),
    )
    async with nodes.pd.generate(request, force_route=route) as generation:
        drawn = [event.token_id async for event in generation]
    assert len(drawn) == 8
    return generation.record


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
async def test_like_nodes_work_together_and_verify_tells_what_it_finds(
    place: Place, family, tmp_path, monkeypatch
):
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    model = write_tiny_model(tmp_path / family, family)
    dtype = DTYPES[place.packing]
    use_torch_on_cpu(monkeypatch, place.packing, dtype)
    monkeypatch.setattr("prfaas.server.verify.prompt_lengths", lambda *limits: [65, 197])
    sampling = {name: replace(s, max_tokens=5) for name, s in verify.SAMPLING.items()}
    monkeypatch.setattr(verify, "SAMPLING", sampling)
    async with real_nodes(model, model, device=place.device, dtype=dtype, block_tokens=64) as nodes:
        assert nodes.pd.identity == nodes.prefill.identity
        assert nodes.pd.identity.kv_dtype == dtype
        assert nodes.pd.identity.numerics_fingerprint.endswith("rows-depend-on-batch")
        local, remote = await ask(nodes, "here", "local"), await ask(nodes, "there", "remote")
        assert (local.route, local.exact) == ("local", False)
        assert (remote.route, remote.exact) == ("remote", False)
        report = await verify_node(nodes.pd, clock=monotonic_s)
        for case in report.cases:
            assert case.failure is None
            assert case.max_logit_difference is not None
            assert case.max_logit_difference <= TOLERANCES[place.packing]
            assert case.bits_equal == (case.max_logit_difference == 0.0)
        assert report.bits_equal == all(case.bits_equal for case in report.cases)


async def test_an_exact_node_takes_float32_kv_of_torch_only_as_approximate(tmp_path, monkeypatch):
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    model = write_tiny_model(tmp_path / "llama", "llama")
    use_torch_on_cpu(monkeypatch, "torch-f32", "float16")
    async with real_nodes(model, model, is_approximate=True) as nodes:
        local, remote = await ask(nodes, "here", "local"), await ask(nodes, "there", "remote")
        assert (local.route, local.exact) == ("local", True)
        assert (remote.route, remote.exact) == ("remote", False)


async def test_bfloat16_kv_is_refused_by_a_node_of_float32(tmp_path, monkeypatch):
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    model = write_tiny_model(tmp_path / "llama", "llama")
    use_torch_on_cpu(monkeypatch, "torch-bf16", "float16")
    async with real_nodes(model, model, is_approximate=True) as nodes:
        assert nodes.pd.peer is not None
        assert nodes.pd.peer.state == "incompatible"
        assert "kv_dtype differs: 'float32' here, 'bfloat16' there" in nodes.pd.peer.detail
        record = await ask(nodes, "here", "local")
        assert (record.route, record.exact) == ("local", True)
