"""Attention by torch's kernels against its formula in float64: GQA, windows, sinks, latents."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from prfaas.engine.batch import Batch, KeptRows, Segment
from prfaas.engine.layers.torch_attention import TILE_TOKENS, TorchAttention
from prfaas.engine.mixer_spec import GqaSpec, KvDtype, MlaSpec
from prfaas.engine.sequence_kv import SequenceKv
from tests.engine.places import DEVICES

NUM_TOKENS = 300
GQA = GqaSpec(num_heads=6, num_kv_heads=2, head_dim=24, value_head_dim=16, scale=0.3, rope=None)
LATENT = MlaSpec(
    num_heads=5, latent_dim=32, rope_dim=8, nope_dim=16, value_dim=12, scale=0.2, rope=None
)
TOLERANCES: dict[KvDtype, float] = {"float32": 1e-5, "bfloat16": 0.02}
every_device = pytest.mark.parametrize("device", DEVICES)
every_dtype = pytest.mark.parametrize("kv_dtype", TOLERANCES)
every_window = pytest.mark.parametrize("window", [None, 1, 33, 128, 200])


def random_rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def formula(
    q_THGK: Tensor, k_THK: Tensor, v_THV: Tensor, scale: float, window: int | None, sinks: Tensor
) -> Tensor:
    """In float64; a sink is one more key, whose value is 0."""
    scores = torch.einsum("thgk,chk->hgtc", q_THGK.double(), k_THK.double()) * scale
    positions = torch.arange(len(q_THGK))
    distance = positions[:, None] - positions
    hidden = (distance < 0) | (distance >= (window or len(q_THGK)))
    scores = scores.masked_fill(hidden, float("-inf"))
    sinks_HGT1 = sinks.double()[:, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.softmax(torch.cat([scores, sinks_HGT1], dim=-1), dim=-1)[..., :-1]
    return torch.einsum("hgtc,chv->thgv", weights, v_THV.double())


def attended(
    spec: GqaSpec | MlaSpec,
    q_THGK: Tensor,
    rows_THK: tuple[Tensor, ...],
    cuts: tuple[int, ...],
    *,
    kv_dtype: KvDtype,
    device: str,
    sinks_HG: Tensor | None,
) -> Tensor:
    """The outputs of one sequence beside another, piece by piece, on `device`."""
    place = torch.device(device)
    kv, other = (
        SequenceKv(
            [spec],
            capacity_tokens=len(q_THGK),
            block_tokens=16,
            kv_dtype=kv_dtype,
            device=place,
        )
        for _ in range(2)
    )
    sinks = None if sinks_HG is None else sinks_HG.to(place)
    attend = TorchAttention(scale=spec.scale, window_tokens=spec.window_tokens, sinks_HG=sinks)
    values = rows_THK[-1].shape[-1] if isinstance(spec, GqaSpec) else spec.latent_dim
    out = []
    for start, stop in pairwise((0, *cuts, len(q_THGK))):
        segments = [
            Segment(kv=other, tokens=[0], num_logits=0),
            Segment(kv=kv, tokens=[0] * (stop - start), num_logits=0),
        ]
        batch = Batch(segments, place)
        parts = [torch.cat([part[:1], part[start:stop]]).to(place) for part in (q_THGK, *rows_THK)]
        batch.write_kv(0, KeptRows(*parts[1:]))
        out_THGV = parts[0].new_empty(*parts[0].shape[:3], values)
        attend.of(parts[0], out_THGV)(batch, 0)
        out.append(out_THGV[1:].cpu())
        for segment in segments:
            segment.kv.num_tokens += len(segment.tokens)
    return torch.cat(out)


@every_device
@every_dtype
@every_window
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("cuts", [(), (1, 2, 64, 131, 299)])
def test_grouped_queries_see_their_window_and_their_sink(
    device: str, kv_dtype: KvDtype, window: int | None, has_sinks: bool, cuts: tuple[int, ...]
) -> None:
    spec = GqaSpec(
        num_heads=6,
        num_kv_heads=2,
        head_dim=24,
        value_head_dim=16,
        scale=0.3,
        rope=None,
        window_tokens=window,
        has_sinks=has_sinks,
    )
    q = random_rows(0, NUM_TOKENS, 2, 3, 24)
    k, v = random_rows(1, NUM_TOKENS, 2, 24), random_rows(2, NUM_TOKENS, 2, 16)
    sinks = 4.0 * random_rows(3, 2, 3)
    ours = attended(
        spec,
        q,
        (k, v),
        cuts,
        kv_dtype=kv_dtype,
        device=device,
        sinks_HG=sinks if has_sinks else None,
    )
    if not has_sinks:
        sinks = torch.full_like(sinks, float("-inf"))
    expected = formula(q, k, v, spec.scale, window, sinks)
    assert (ours - expected).norm() / expected.norm() < TOLERANCES[kv_dtype]


@every_device
@every_dtype
@pytest.mark.parametrize("cuts", [(), (5, 6, 7, 200)])
def test_latents_are_keys_whose_first_columns_are_values(
    device: str, kv_dtype: KvDtype, cuts: tuple[int, ...]
) -> None:
    q, latent = random_rows(4, NUM_TOKENS, 1, 5, 40), random_rows(5, NUM_TOKENS, 1, 40)
    ours = attended(LATENT, q, (latent,), cuts, kv_dtype=kv_dtype, device=device, sinks_HG=None)
    no_sinks = torch.full((1, 5), float("-inf"))
    expected = formula(q, latent, latent[..., :32], LATENT.scale, None, no_sinks)
    assert (ours - expected).norm() / expected.norm() < TOLERANCES[kv_dtype]


@every_device
@pytest.mark.parametrize("num_tokens", [TILE_TOKENS, TILE_TOKENS + 1, 2 * TILE_TOKENS + 77])
def test_tiles_join_without_a_seam(device: str, num_tokens: int) -> None:
    q = random_rows(6, num_tokens, 2, 3, 24)
    k, v = random_rows(7, num_tokens, 2, 24), random_rows(8, num_tokens, 2, 16)
    ours = attended(GQA, q, (k, v), (), kv_dtype="float32", device=device, sinks_HG=None)
    expected = formula(q, k, v, GQA.scale, None, torch.full((2, 3), float("-inf")))
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)
